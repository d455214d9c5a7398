"""The runner: the one place that touches the device. Carries out a StepPlan and says what came of it.

Per-request state lives in permanent rows, one a slot, and is updated on the device: after a verification the accepted
count, the next token and the new context set are settled there, so the next step needs nothing from the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aspire_llm.attention.backend import AttentionBatch, AttentionPlan, Backend
from aspire_llm.context.selectors import Selector
from aspire_llm.context.state import ContextState
from aspire_llm.models.decoder import Decoder
from aspire_llm.request import RowKind, TokenLogprobs
from aspire_llm.sampling.batch import SampleBatch, SampleOutput
from aspire_llm.sampling.logprobs import token_logprobs
from aspire_llm.sampling.sampler import Sampler
from aspire_llm.scheduler.plan import Row, RowResult, StepPlan, StepResult

PROMPT_LOGPROB_TOKENS = 64  # prompt tokens whose logits exist at once, when prompt logprobs are asked for


class Runner:
    def __init__(
        self,
        decoder: Decoder,
        backend: Backend[Any],
        sampler: Sampler,
        selector: Selector | None,  # None: nothing is drafted
        contexts: ContextState,
        *,
        num_slots: int,
        max_model_len: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.decoder = decoder
        self.backend = backend
        self.sampler = sampler
        self.selector = selector
        self.contexts = contexts
        self.device = device
        self.computed = torch.zeros(num_slots, dtype=torch.int64, device=device)  # [S] exact positions
        self.pending = torch.zeros(num_slots, dtype=torch.int64, device=device)  # [S] drafts after the newest token
        # [S, max_model_len + 1] every known token by position; drafts stand behind the newest one
        self.tokens = torch.zeros(num_slots, max_model_len + 1, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(num_slots, -(-max_model_len // page_size), dtype=torch.int32, device=device)
        self._drafting = [False] * num_slots  # host: the request in this slot may draft
        self._prompt_logprobs: list[int | None] = [None] * num_slots  # host: how many, for prompt tokens
        self._prompt_ends = [0] * num_slots  # host

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        self._stage(plan)
        batch = self._gather(plan.rows)
        attention = self.backend.plan(batch)
        token_ids = self.tokens[batch.slots.long().repeat_interleave(self._on_device(batch.num_tokens)), batch.positions]
        hidden = self.decoder(token_ids, batch.positions, lambda layer, q, k, v: self.backend.run(attention, layer, q, k, v))
        sampled = self._sample(plan.rows, batch, hidden)
        self._settle(plan.rows, batch, sampled)
        self._renew_contexts(plan.rows, batch, attention)
        rows = self._results(plan.rows, sampled, self._score_prompts(plan.rows, hidden))
        return StepResult(rows, time.perf_counter() - started, dict(attention.kv_tokens_read), self.decoder.config.num_layers)

    # ---- before the forward

    def _stage(self, plan: StepPlan) -> None:
        """Write what the scheduler gave: new tenants of slots, new pages."""
        for new in plan.admissions:
            known = self._on_device(new.token_ids)
            self.tokens[new.slot, : known.numel()] = known
            self.computed[new.slot] = new.num_computed
            self.pending[new.slot] = 0
            self.sampler.admit(new.slot, new.params, new.seed, new.prompt_token_ids, new.eos_token_ids)
            self._drafting[new.slot] = self.selector is not None and new.params.draft
            self._prompt_logprobs[new.slot] = new.params.prompt_logprobs
            self._prompt_ends[new.slot] = len(new.prompt_token_ids)
        for write in plan.page_writes:
            self.page_table[write.slot, write.first : write.first + len(write.pages)] = self._on_device(write.pages).int()

    def _gather(self, rows: Sequence[Row]) -> AttentionBatch:
        """The step's flat batch. R rows, T tokens."""
        slots = self._on_device([row.slot for row in rows])
        kinds = self._on_device([int(row.kind) for row in rows])
        counts = [row.num_tokens for row in rows]
        starts = torch.where(
            kinds == RowKind.PREFILL,
            self._on_device([row.start for row in rows]),
            self.computed[slots] + self.pending[slots] * (kinds == RowKind.DRAFT),
        )
        row_of_token = self._on_device([i for i, n in enumerate(counts) for _ in range(n)])
        within = self._on_device([j for n in counts for j in range(n)])
        weights = [self._query_weights(row) for row in rows]
        return AttentionBatch(
            kinds=tuple(row.kind for row in rows),
            num_tokens=tuple(counts),
            row_offsets=self._on_device([0, *counts]).cumsum(0).int(),
            slots=slots.int(),
            starts=starts.int(),
            positions=starts[row_of_token] + within,
            page_table=self.page_table,
            sparse=kinds == RowKind.DRAFT,
            sets=self.contexts.sets,
            set_lengths=self.contexts.set_lengths,
            tail_starts=self.contexts.tail_starts,
            score_weights=torch.tensor([w for row in weights for w in row], device=self.device),
            scored_rows=tuple(i for i, row in enumerate(weights) if any(row)),
        )

    def _query_weights(self, row: Row) -> list[float]:
        if self.selector is None or not self._drafting[row.slot] or not row.samples:
            return [0.0] * row.num_tokens
        return self.selector.query_weights(row.kind, row.num_tokens)

    # ---- after the forward

    def _sample(self, rows: Sequence[Row], batch: AttentionBatch, hidden: Tensor) -> SampleOutput | None:
        """Logits of the rows that sample, and of no other token; then tokens from them."""
        places: list[int] = []
        offset = 0
        for row in rows:
            if row.samples:
                first = row.num_tokens - 1 if row.kind is RowKind.PREFILL else 0
                places.extend(range(offset + first, offset + row.num_tokens))
            offset += row.num_tokens
        if not places:
            return None
        at = self._on_device(places)
        sampling = [row for row in rows if row.samples]
        return self.sampler.run(
            SampleBatch(
                kinds=tuple(row.kind for row in sampling),
                slots=tuple(row.slot for row in sampling),
                num_tokens=tuple(1 if row.kind is RowKind.PREFILL else row.num_tokens for row in sampling),
                logits=self.decoder.logits(hidden[at]),
                positions=batch.positions[at],
                history=self.tokens,
            )
        )

    def _settle(self, rows: Sequence[Row], batch: AttentionBatch, sampled: SampleOutput | None) -> None:
        """Counters and tokens of every slot as they are after this step. All on the device."""
        prefill = [i for i, row in enumerate(rows) if row.kind is RowKind.PREFILL]
        if prefill:
            slots = self._on_device([rows[i].slot for i in prefill])
            self.computed[slots] = self._on_device([rows[i].start + rows[i].num_tokens for i in prefill])
        if sampled is None:
            return
        sampling = [row for row in rows if row.samples]
        slots = self._on_device([row.slot for row in sampling])
        drafts = self._on_device([row.kind is RowKind.DRAFT for row in sampling])
        verifies = self._on_device([row.kind is RowKind.VERIFY for row in sampling])
        # the first new token stands right behind the newest committed token, or behind the last draft
        first = self.computed[slots] + torch.where(drafts, self.pending[slots] + 1, verifies.long())
        columns = torch.arange(sampled.tokens.shape[1], device=self.device)
        row, column = (columns < sampled.num_emitted[:, None]).nonzero(as_tuple=True)
        self.tokens[slots[row], first[row] + column] = sampled.tokens[row, column]
        self.computed[slots] += sampled.num_emitted * verifies
        self.pending[slots] = (self.pending[slots] + 1) * drafts

    def _renew_contexts(self, rows: Sequence[Row], batch: AttentionBatch, attention: AttentionPlan) -> None:
        if self.selector is None:
            return
        place = {row: i for i, row in enumerate(batch.scored_rows)}
        drafting = [(i, row) for i, row in enumerate(rows) if row.samples and self._drafting[row.slot]]
        for step in (self.selector.renew, self.selector.refresh):
            renews = step == self.selector.renew
            chosen = [(i, row) for i, row in drafting if (row.kind is not RowKind.DRAFT) == renews]
            if not chosen:
                continue
            slots = self._on_device([row.slot for _, row in chosen])
            # a selector ignores the scores of rows it did not ask to be scored
            scored = self._on_device([place.get(i, 0) for i, _ in chosen])
            scores = {layer: score[scored] for layer, score in attention.scores.items()}
            if renews:
                ended = self._on_device([row.kind is RowKind.PREFILL for _, row in chosen])
                self.selector.renew(self.contexts, slots, self.computed[slots], scores, ended)
            else:
                self.selector.refresh(self.contexts, slots, self.computed[slots], scores)

    def _score_prompts(self, rows: Sequence[Row], hidden: Tensor) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of prompt tokens, for the rows that ask; logits of a few tokens at a time."""
        scored: dict[int, list[TokenLogprobs]] = {}
        offset = 0
        for i, row in enumerate(rows):
            top = self._prompt_logprobs[row.slot]
            if row.kind is RowKind.PREFILL and top is not None:
                n = max(0, min(row.num_tokens, self._prompt_ends[row.slot] - 1 - row.start))  # each scores the token after it
                following = self.tokens[row.slot, row.start + 1 : row.start + 1 + n]
                parts = scored[i] = []
                for low in range(0, n, PROMPT_LOGPROB_TOKENS):
                    high = min(n, low + PROMPT_LOGPROB_TOKENS)
                    logits = self.decoder.logits(hidden[offset + low : offset + high])
                    parts.extend(token_logprobs(logits, following[low:high], top))
            offset += row.num_tokens
        return scored

    def _results(
        self, rows: Sequence[Row], sampled: SampleOutput | None, prompts: dict[int, list[TokenLogprobs]]
    ) -> tuple[RowResult, ...]:
        """The one place where the host waits for the device."""
        tokens = sampled.tokens.tolist() if sampled else []
        emitted = sampled.num_emitted.tolist() if sampled else []
        confidence = sampled.confidence.tolist() if sampled else []
        results = []
        j = 0
        for i, row in enumerate(rows):
            prompt_logprobs = tuple(prompts.get(i, ()))
            if not row.samples or sampled is None:
                results.append(RowResult(row.slot, row.epoch, prompt_logprobs=prompt_logprobs))
                continue
            results.append(
                RowResult(
                    slot=row.slot,
                    epoch=row.epoch,
                    token_ids=tuple(tokens[j][: emitted[j]]),
                    num_accepted=emitted[j] - 1 if row.kind is RowKind.VERIFY else 0,
                    confidence=confidence[j],
                    logprobs=tuple(sampled.logprobs.get(j, ())),
                    prompt_logprobs=prompt_logprobs,
                    error=sampled.errors.get(j),
                )
            )
            j += 1
        return tuple(results)

    def _on_device(self, values: Sequence[int] | Sequence[bool]) -> Tensor:
        """int64 (or bool) [len(values)]."""
        dtype = torch.bool if values and isinstance(values[0], bool) else torch.int64
        return torch.tensor(values, dtype=dtype, device=self.device)
