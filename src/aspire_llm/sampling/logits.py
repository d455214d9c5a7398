"""What a request's parameters do to its logits, each position by its own prefix: committed tokens and the drafts before it.

In vLLM's order: allowed_token_ids, bad_words, min_tokens, logit_bias, the user's logits processors, penalties, and last
the grammar's mask. Requests without such parameters cost nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aspire_llm.request import SamplingParams
from aspire_llm.sampling.rows import Bools, Rows, SlotTable, send, upload
from aspire_llm.sampling.structured import GrammarMatcher

NOTHING_ALLOWED = (
    "no token is allowed here: allowed_token_ids, bad_words, min_tokens, structured_outputs or logits_processors "
    "exclude each other"
)


@dataclass(slots=True)
class HostEdits:
    """What must run on the host for one request."""

    prompt_token_ids: list[int]
    processors: list[Callable[[list[int], list[int], Tensor], Any]]
    matcher: GrammarMatcher | None


class LogitsEdits:
    """The edits of every slot. Tables are gathered by slot, so a batch costs a few operations whatever its size."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        def table(dtype: torch.dtype, pad: float = 0, tail: int | None = None) -> SlotTable:
            return SlotTable(max_slots, device, pad, dtype, tail)

        def flags() -> Bools:
            return np.zeros(max_slots, dtype=bool)

        self._vocab_size = vocab_size
        self._device = device
        self._prompt_lengths = torch.zeros(max_slots, dtype=torch.int64, device=device)
        self._min_tokens = torch.zeros(max_slots, dtype=torch.int64, device=device)
        self._penalties = torch.zeros(max_slots, 3, device=device)  # repetition, presence, frequency
        self._stop_ids, self._stop_values = table(torch.int64), table(torch.float32)
        self._bias_ids, self._bias_values = table(torch.int64), table(torch.float32)
        self._allowed_ids = table(torch.int64, pad=vocab_size)
        self._bad_ids, self._bad_values = table(torch.int64), table(torch.float32)
        self._bad_prefixes = table(torch.int64, pad=-1, tail=1)  # aligned to the right; -1 matches anything
        self._has_min_tokens, self._has_bias, self._has_allowed = flags(), flags(), flags()
        self._has_bad_words, self._has_penalties, self._can_conflict = flags(), flags(), flags()
        self._on_host: dict[int, HostEdits] = {}
        self.any = flags()  # whether anything is edited

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_token_ids: Collection[int],
        matcher: GrammarMatcher | None,
    ) -> None:
        """stop_token_ids: every token that ends the request; matcher: of structured_outputs, at its start."""
        self.release(slot)
        self._prompt_lengths[slot] = len(prompt_token_ids)
        if params.min_tokens and stop_token_ids:
            self._has_min_tokens[slot] = True
            self._min_tokens[slot] = params.min_tokens
            self._stop_ids.set(slot, torch.tensor(sorted(stop_token_ids)))
            self._stop_values.set(slot, torch.full((len(stop_token_ids),), float("-inf")))
        if params.logit_bias:
            self._has_bias[slot] = True
            self._bias_ids.set(slot, torch.tensor(list(params.logit_bias)))
            self._bias_values.set(slot, torch.tensor(list(params.logit_bias.values())))
        if params.allowed_token_ids is not None:
            self._has_allowed[slot] = True
            self._allowed_ids.set(slot, torch.tensor(params.allowed_token_ids))
        if words := params.bad_words_token_ids:
            self._has_bad_words[slot] = True
            width = max(len(word) for word in words) - 1 or 1
            prefixes = [[-1] * (width - len(word) + 1) + list(word[:-1]) for word in words]
            self._bad_ids.set(slot, torch.tensor([word[-1] for word in words]))
            self._bad_values.set(slot, torch.full((len(words),), float("-inf")))
            self._bad_prefixes.set(slot, torch.tensor(prefixes))
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if penalties != (1.0, 0.0, 0.0):
            self._has_penalties[slot] = True
            self._penalties[slot] = send(self._device, torch.tensor(penalties))
        if params.logits_processors or matcher is not None:
            processors = [_with_prompt(processor) for processor in params.logits_processors]
            self._on_host[slot] = HostEdits(list(prompt_token_ids), processors, matcher)
        self._can_conflict[slot] = slot in self._on_host or (
            self._has_allowed[slot] and (self._has_bad_words[slot] or self._has_min_tokens[slot])
        )
        self.any[slot] = slot in self._on_host or any(flags[slot] for flags in self._flags())

    def release(self, slot: int) -> None:
        for flags in (*self._flags(), self._can_conflict, self.any):
            flags[slot] = False
        self._on_host.pop(slot, None)

    def _flags(self) -> tuple[Bools, ...]:
        return (self._has_min_tokens, self._has_bias, self._has_allowed, self._has_bad_words, self._has_penalties)

    def needs_host(self, slot: int) -> bool:
        """Whether this slot's edits make the host wait for the device."""
        return bool(self._can_conflict[slot])

    def apply(self, logits: Tensor, rows: Rows, positions: Tensor, history: Tensor) -> tuple[Tensor, dict[int, str]]:
        """The edited logits [N, vocabulary] (a float32 copy where anything is edited); what went wrong, by token.

        A token in the second has meaningless, finite logits. positions [N] and history as in SampleBatch.
        """
        if not self.any[rows.slots].any():
            return logits, {}
        logits = logits.to(torch.float32, copy=True)
        if self._has_allowed[rows.slots].any():
            self._allow(logits, rows)
        if self._has_bad_words[rows.slots].any():
            self._ban_words(logits, rows, positions, history)
        if self._has_min_tokens[rows.slots].any():
            index, slots = self._tokens(rows, self._has_min_tokens)
            early = positions[index] + 1 - self._prompt_lengths[slots] < self._min_tokens[slots]
            values = torch.where(early[:, None], self._stop_values.values[slots], 0.0)
            self._add(logits, index, self._stop_ids.values[slots], values)
        if self._has_bias[rows.slots].any():
            index, slots = self._tokens(rows, self._has_bias)
            self._add(logits, index, self._bias_ids.values[slots], self._bias_values.values[slots])
        failures: dict[int, str] = {}
        outputs = self._read_outputs(rows, positions, history)
        for row, (output, drafts) in outputs.items():
            host = self._on_host[int(rows.slots[row])]
            for i in range(len(drafts) + 1 if host.processors else 0):
                token = int(rows.offsets[row]) + i
                try:
                    for processor in host.processors:
                        changed = processor(list(host.prompt_token_ids), output + drafts[:i], logits[token])
                        logits[token] = _checked(changed, self._vocab_size)
                except Exception as error:
                    failures[token] = f"logits processor failed: {type(error).__name__}: {error}"
                    logits[token] = 0.0
        if self._has_penalties[rows.slots].any():
            self._penalise(logits, rows, positions, history)
        for row, (output, drafts) in outputs.items():
            if (matcher := self._on_host[int(rows.slots[row])].matcher) is not None:
                begin = int(rows.offsets[row])
                banned = ~matcher.allowed(output, drafts)
                logits[begin : begin + len(drafts) + 1].masked_fill_(send(self._device, banned), float("-inf"))
        if self._can_conflict[rows.slots].any():
            index, _ = self._tokens(rows, self._can_conflict)
            dead = index[logits[index].amax(1) == float("-inf")]
            for token in dead.tolist():
                failures.setdefault(token, NOTHING_ALLOWED)
            logits[dead] = 0.0
        return logits, failures

    def _tokens(self, rows: Rows, flags: Bools) -> tuple[Tensor, Tensor]:
        """The tokens of slots that have a flag, and their slots."""
        chosen = np.flatnonzero(flags[rows.token_slots])
        index, slots = upload(self._device, chosen, rows.token_slots[chosen])
        return index, slots

    def _add(self, logits: Tensor, index: Tensor, ids: Tensor, values: Tensor) -> None:
        """logits[index[i], ids[i, j]] += values[i, j]. Padding adds 0 to token 0."""
        logits.view(-1).index_add_(0, (index[:, None] * self._vocab_size + ids).flatten(), values.flatten())

    def _allow(self, logits: Tensor, rows: Rows) -> None:
        index, slots = self._tokens(rows, self._has_allowed)
        banned = torch.ones(len(index), self._vocab_size + 1, dtype=torch.bool, device=self._device)
        banned.scatter_(1, self._allowed_ids.values[slots], False)
        logits[index] = logits[index].masked_fill(banned[:, :-1], float("-inf"))

    def _ban_words(self, logits: Tensor, rows: Rows, positions: Tensor, history: Tensor) -> None:
        """Ban the last token of a word whose other tokens are the output's newest (as vLLM does)."""
        index, slots = self._tokens(rows, self._has_bad_words)
        prefixes = self._bad_prefixes.values[slots]  # [n, words, width]
        width = prefixes.shape[2]
        at = positions[index][:, None] - torch.arange(width - 1, -1, -1, device=self._device)  # [n, width]
        newest = history[slots[:, None], at.clamp(min=0)].masked_fill(at < self._prompt_lengths[slots][:, None], -2)
        matches = ((prefixes == newest[:, None]) | (prefixes == -1)).all(2)
        values = torch.where(matches, self._bad_values.values[slots], 0.0)
        self._add(logits, index, self._bad_ids.values[slots], values)

    def _penalise(self, logits: Tensor, rows: Rows, positions: Tensor, history: Tensor) -> None:
        """Penalties as vLLM defines them: repetition over prompt and output, presence and frequency over the output.

        Tokens are counted once a row, up to its first position; the drafts after it are added position by position.
        """
        chosen = self._has_penalties[rows.slots]
        part = rows.select(chosen)
        token_index = np.flatnonzero(chosen[rows.token_rows])
        within = np.arange(len(part.token_rows)) - part.offsets[part.token_rows]
        index, first, slots, token_rows, step = upload(
            self._device, token_index, rows.offsets[chosen], part.slots, part.token_rows, within
        )
        base = positions[first]  # [r]
        prompt = self._prompt_lengths[slots][:, None]
        place = torch.arange(history.shape[1], device=self._device)[None]
        known = (place <= base[:, None]).int()
        tokens = history[slots].clamp(0, self._vocab_size - 1)  # unused places may hold anything
        seen = torch.zeros(len(slots), self._vocab_size, dtype=torch.int32, device=self._device)
        count = seen.clone()
        seen.scatter_add_(1, tokens, known)
        count.scatter_add_(1, tokens, known * (place >= prompt).int())
        seen, count = seen[token_rows], count[token_rows]  # [n, vocabulary]
        if (widest := int(part.counts.max())) > 1:
            after = torch.arange(1, widest, device=self._device)
            at = base[:, None] + after  # [r, widest - 1]: the drafts
            drafts = history[slots[:, None], at.clamp(max=history.shape[1] - 1)].clamp(0, self._vocab_size - 1)
            before = (after[None] <= step[:, None]).int()  # [n, widest - 1]: drafts before this token's position
            seen.scatter_add_(1, drafts[token_rows], before)
            count.scatter_add_(1, drafts[token_rows], before)
        repetition, presence, frequency = self._penalties[slots][token_rows].split(1, dim=1)  # type: ignore[no-untyped-call]
        part_logits = logits[index]
        scaled = torch.where(part_logits > 0, part_logits / repetition, part_logits * repetition)
        part_logits = torch.where(seen > 0, scaled, part_logits)
        logits[index] = part_logits - frequency * count - presence * (count > 0)

    def _read_outputs(self, rows: Rows, positions: Tensor, history: Tensor) -> dict[int, tuple[list[int], list[int]]]:
        """Row -> output tokens up to the row's first position and the drafts after it, for rows with host edits (waits)."""
        outputs: dict[int, tuple[list[int], list[int]]] = {}
        if not any(slot in self._on_host for slot in rows.slots.tolist()):
            return outputs
        (first,) = upload(self._device, rows.offsets)
        for row, (slot, base) in enumerate(zip(rows.slots.tolist(), positions[first].tolist(), strict=True)):
            if slot in self._on_host:
                begin = len(self._on_host[slot].prompt_token_ids)
                tokens: list[int] = history[slot, begin : base + int(rows.counts[row])].tolist()
                drafts = int(rows.counts[row]) - 1
                outputs[row] = (tokens[: len(tokens) - drafts], tokens[len(tokens) - drafts :])
        return outputs


def _with_prompt(processor: Callable[..., Any]) -> Callable[[list[int], list[int], Tensor], Any]:
    """A processor of (output, logits) or (prompt, output, logits) as one of the latter."""
    try:
        parameters = list(inspect.signature(processor).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        parameters = []
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) == 3:
        return processor
    return lambda _prompt, output, logits: processor(output, logits)


def _checked(logits: object, vocab_size: int) -> Tensor:
    if not isinstance(logits, Tensor) or logits.shape != (vocab_size,):
        found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"it must return a tensor of shape ({vocab_size},), not {found}")
    if bool(torch.isnan(logits).any()) or bool((logits == float("inf")).any()):
        raise ValueError("its logits must not be NaN or +inf")
    return logits
