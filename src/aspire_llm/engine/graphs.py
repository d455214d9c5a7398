"""CUDA graphs of the forward and of a step's end, keyed by padded token count and by whether any verification is scored: row
metadata lies on the device, so no draft length, mix of rows or batch size costs a new one. The only place that is CUDA's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from aspire_llm.attention.backend import Backend
from aspire_llm.context.state import ContextState
from aspire_llm.engine.columns import Columns
from aspire_llm.engine.finish import Finish, Finished
from aspire_llm.engine.forward import Described, EagerForward, Forwarded, describe
from aspire_llm.engine.slot_ops import StepRows
from aspire_llm.engine.slots import SlotState
from aspire_llm.engine.upload import Array
from aspire_llm.models.decoder import Decoder
from aspire_llm.request import RowKind
from aspire_llm.scheduler.plan import Row

Result = TypeVar("Result")


def graph_sizes(widest: int) -> list[int]:
    """Padded token counts up to `widest`: within 8 tokens of any small step, within an eighth of any larger one."""
    sizes = [1, 2, 4]
    step = 8
    while sizes[-1] < widest:
        if sizes[-1] >= 16 * step:
            step *= 2
        sizes.append((sizes[-1] // step + 1) * step)
    return sizes


def padded_size(sizes: Sequence[int], num_tokens: int) -> int:
    """The smallest captured size that holds `num_tokens`; `num_tokens` itself where none does."""
    return next((size for size in sizes if size >= num_tokens), num_tokens)


@dataclass(slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # what the graph reads: see `same_type`
    forwarded: Forwarded
    held: Sequence[Tensor] = ()  # the arrays that were copied into them last


class GraphForward:
    """Replays a captured graph for every step up to the widest size; wider ones (long prompt chunks) run eagerly.

    finish: ends a step all of whose tokens get logits; a graph of its own, since not every such step can end that way.
    scored: whether the graphs leave attention scores, so whether anything is drafted.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend[Any],
        state: SlotState,
        contexts: ContextState,
        finish: Finish,
        sizes: Sequence[int],
        *,
        scored: bool,
    ) -> None:
        self._eager = EagerForward(decoder, backend, state, contexts)
        self._finish = finish
        self._sizes = list(sizes)
        self._scored = scored
        self._scratch = state.num_slots
        self.pad_rows = state.num_slots + 1
        self._graphs: dict[tuple[int, bool], Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: cuBLAS keeps a workspace of 32 MiB for every stream it has seen.
        self._stream = torch.cuda.Stream(self._eager.device)  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            for size in reversed(self._sizes):  # the widest first: the others fit into its memory
                for verified in (True, False) if scored else (False,):
                    self._graphs[size, verified] = self._capture(size, verified)

    def padded(self, num_tokens: int) -> int:
        return padded_size(self._sizes, num_tokens)

    def run(self, step: Described, arrays: Sequence[Tensor]) -> Forwarded:
        """As `EagerForward.run`. The results are the graph's own buffers, good until its next replay. arrays: what is in them
        does not change; the same ones may come again."""
        captured = self._graphs.get((arrays[-1].shape[0], step.scores_verified))
        if captured is None:
            return self._eager.run(step, arrays)
        if captured.held is not arrays:
            torch._foreach_copy_(captured.inputs, same_type(arrays))
            captured.held = arrays
        captured.graph.replay()
        return captured.forwarded

    def _capture(self, size: int, verified: bool) -> Captured:
        kind = RowKind.VERIFY if verified or not self._scored else RowKind.DRAFT
        step, without_rows = step_to_capture(size, kind, self.pad_rows, self._scratch, scored=self._scored)
        arrays = [torch.from_numpy(array).to(self._eager.device) for array in without_rows]
        graph, forwarded = self._captured(lambda: self._eager.run(step, arrays))
        rows = StepRows(*arrays[:-1])
        ending, finished = self._captured(
            lambda: self._finish(rows, forwarded.hidden, forwarded.positions, forwarded.attention)
        )

        def finish() -> Finished:
            ending.replay()
            return finished

        return Captured(graph, same_type(arrays), replace(forwarded, finish=finish))

    def _captured(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """A graph of the work, and the buffers that it leaves its results in."""
        stream, current = self._stream, torch.cuda.current_stream(self._eager.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # compiles kernels and takes library workspaces outside of the capture
            work()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            result = work()
        graph.replay()  # the first one is slow: not while serving
        return graph, result


def step_to_capture(
    size: int, kind: RowKind, pad_rows: int, scratch_slot: int, *, scored: bool
) -> tuple[Described, Sequence[Array]]:
    """A step of one row, by whose kind the forward chooses its kernels, and arrays of `size` tokens that are padding alone: what
    a row writes would go to the page that the scratch slot's table begins with, where another engine may keep a prefix."""
    row = Row(scratch_slot, 0, kind, min(size, 2))
    weights = np.full(row.num_tokens, float(scored), dtype=np.float32)
    step = describe(Columns.of([row]), weights, pad_rows, size, scratch_slot)
    return step, describe(Columns.of([]), weights[:0], pad_rows, size, scratch_slot).arrays


def same_type(arrays: Sequence[Tensor]) -> list[Tensor]:
    """Views of a step's arrays, all int32: tensors of one type are copied by one kernel."""
    *rows, weights = arrays
    return [*rows, weights.view(torch.int32)]
