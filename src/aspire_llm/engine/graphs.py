"""CUDA graphs of the forward, keyed by padded token count and by whether any verification is scored: row metadata lies on the
device, so no draft length, mix of rows or batch size costs a new one. The only place that is CUDA's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aspire_llm.attention.backend import Backend
from aspire_llm.context.state import ContextState
from aspire_llm.engine.columns import Columns
from aspire_llm.engine.forward import Described, EagerForward, Forwarded, describe
from aspire_llm.engine.slots import SlotState
from aspire_llm.models.decoder import Decoder
from aspire_llm.request import RowKind
from aspire_llm.scheduler.plan import Row


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

    scored: whether the graphs leave attention scores, so whether anything is drafted.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend[Any],
        state: SlotState,
        contexts: ContextState,
        sizes: Sequence[int],
        *,
        scored: bool,
    ) -> None:
        self._eager = EagerForward(decoder, backend, state, contexts)
        self._logits = decoder.logits
        self._sizes = list(sizes)
        self._scored = scored
        self._scratch = state.num_slots
        self.pad_rows = state.num_slots + 1
        self._graphs: dict[tuple[int, bool], Captured] = {}
        pool = torch.cuda.graph_pool_handle()
        # One for all: cuBLAS keeps a workspace of 32 MiB for every stream it has seen.
        self._stream = torch.cuda.Stream(self._eager.device)  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            for size in reversed(self._sizes):  # the widest first: the others fit into its memory
                for verified in (True, False) if scored else (False,):
                    self._graphs[size, verified] = self._capture(size, verified, pool)

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

    def _capture(self, size: int, verified: bool, pool: Any) -> Captured:
        device = self._eager.device
        rows = [Row(self._scratch, 0, RowKind.VERIFY if verified or not self._scored else RowKind.DRAFT, min(size, 2))]
        weights = np.full(rows[0].num_tokens, float(self._scored), dtype=np.float32)
        described = describe(Columns.of(rows), weights, self.pad_rows, size, self._scratch)
        arrays = [torch.from_numpy(array).to(device) for array in described.arrays]
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # compiles kernels and takes library workspaces outside of the capture
            self._eager.run(described, arrays)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            forwarded = self._eager.run(described, arrays)
        graph.replay()  # the first one is slow: not while serving
        self._logits(forwarded.hidden)  # nor may this size load its kernel then, which waits for the device
        return Captured(graph, same_type(arrays), forwarded)


def same_type(arrays: Sequence[Tensor]) -> list[Tensor]:
    """Views of a step's arrays, all int32: tensors of one type are copied by one kernel."""
    *rows, weights = arrays
    return [*rows, weights.view(torch.int32)]
