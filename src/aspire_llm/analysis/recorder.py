"""Free-running drafts of a real model, from given positions of its own plain greedy continuation.

The engine's own runner and selectors do the work; only the schedule differs. From *start* s, the first s tokens of the
continuation are given: they are verified as the engine verifies a cycle that was right throughout (from the last start
on, so that the context set is what the engine would have), then K tokens are drafted, compared with the continuation, and
thrown away. Every method is thus measured from the very same positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from aspire_llm.attention.reference import ReferenceBackend
from aspire_llm.cache.pool import KVPool
from aspire_llm.config import SelectorName
from aspire_llm.context.selectors import Selector, make_selector, scored_layers
from aspire_llm.context.state import ContextState
from aspire_llm.engine.forward import EagerForward
from aspire_llm.engine.runner import Runner
from aspire_llm.engine.slots import SlotState
from aspire_llm.errors import UserError
from aspire_llm.models.load import LoadedModel
from aspire_llm.request import RowKind, SamplingParams
from aspire_llm.sampling.sampler import Sampler
from aspire_llm.scheduler.plan import Admission, PageWrite, Row, RowResult, StepPlan

PAGE = 64  # tokens
CHUNK = 512  # prompt tokens a step

OnTokens = Callable[[int], None]  # called with the tokens done so far


@dataclass(frozen=True, slots=True)
class Method:
    """A drafting context: a selector and its settings."""

    context: SelectorName
    budget: int
    refresh_layers: tuple[int, ...] = ()  # of "refreshed"
    verified_share: float = 0.5  # of "refreshed"

    @property
    def name(self) -> str:
        """As trace files call it: `verified`, `refreshed_16`, `refreshed_11_22`."""
        return "_".join([self.context, *map(str, self.refresh_layers)])


@dataclass(frozen=True, slots=True)
class Drafts:
    """Free-running drafts of R requests from S starts, K tokens each. `measured` is False where a request had no such start
    (its continuation ended before); the other arrays mean nothing there."""

    starts: tuple[int, ...]
    measured: NDArray[np.bool_]  # [R, S]
    accepted: NDArray[np.int64]  # [R, S]: right tokens before the first wrong one
    confidence: NDArray[np.float64]  # [R, S, K]: top-1 probability of each draft
    match: NDArray[np.bool_]  # [R, S, K]: the draft is the plain token; meaningful to the first that is not

    @property
    def draft_tokens(self) -> int:
        return int(self.match.shape[2])

    def survival(self) -> list[float]:
        """[K]: share of the measured drafts whose first k + 1 tokens are right."""
        accepted = self.accepted[self.measured]
        return [float((accepted > k).mean()) for k in range(self.draft_tokens)]

    def mean_accepted_length(self) -> float:
        """1 + accepted drafts: the token that the verification adds counts."""
        return 1.0 + float(self.accepted[self.measured].mean())


class Recorder:
    """Prompts in a KV cache of their own, and what is measured on them.

    prompts: token ids of R requests. num_output: most tokens of continuation. Raises UserError where the cache does not fit
    the machine's memory.
    """

    def __init__(self, model: LoadedModel, prompts: Sequence[Sequence[int]], num_output: int) -> None:
        self.model = model
        self.prompts = [tuple(prompt) for prompt in prompts]
        self.num_output = num_output
        self.continuations: list[list[int]] = [[] for _ in prompts]  # to the model's end of text, or num_output tokens
        self.device = model.decoder.device
        shape = model.config
        counts = [-(-(len(prompt) + num_output) // PAGE) for prompt in self.prompts]
        firsts = np.cumsum([0, *counts]).tolist()
        self._pages = [tuple(range(first, first + count)) for first, count in zip(firsts, counts, strict=False)]
        self._longest = max(map(len, self.prompts)) + num_output
        needed = sum(counts) * PAGE * shape.kv_bytes_per_token(model.decoder.dtype)
        free = psutil.virtual_memory().available
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
        if needed > free:
            raise UserError(
                f"the KV cache of {len(prompts)} requests needs {needed / 2**30:.2f} GiB and {free / 2**30:.2f} GiB "
                "are free; take fewer or shorter ones"
            )
        self._pool = KVPool(
            shape.num_layers, shape.num_kv_heads, shape.head_dim, sum(counts), PAGE, model.decoder.dtype, self.device
        )
        self._num_steps = 0

    def decode(self, on_tokens: OnTokens, scorer: Selector | None = None) -> None:
        """Prefill every prompt, then decode all of them plainly and greedily into `continuations`. scorer: is shown the
        attention scores of the last prompt token and of every output token (see `recall.ScoreRecorder`)."""
        runner = self._runner(scorer, 1, max_drafts=1)
        done = self._prefill(runner, on_tokens)
        while True:
            # as chunks of one token, since verifications without drafts are not always scored
            rows = [
                Row(slot, 0, RowKind.PREFILL, 1, len(self.prompts[slot]) + len(text) - 1)
                for slot, text in enumerate(self.continuations)
                if not self._ended(text)
            ]
            if not rows:
                return
            for row, result in zip(rows, self._step(runner, rows), strict=True):
                self.continuations[row.slot].extend(result.token_ids)
            done += len(rows)
            on_tokens(done)

    def restore(self, continuations: Sequence[Sequence[int]], on_tokens: OnTokens) -> None:
        """Take continuations that `decode` once gave; the prompts' keys and values are computed as it does."""
        self._prefill(self._runner(None, 1, max_drafts=1), on_tokens)
        self.continuations = [list(text) for text in continuations]

    def has_start(self, request: int, start: int, draft_tokens: int) -> bool:
        return start + draft_tokens <= len(self.continuations[request])

    def record(self, method: Method, starts: Sequence[int], draft_tokens: int, on_tokens: OnTokens) -> Drafts:
        """Draft from each of `starts` (ascending, at least 1: output tokens known). Call after `decode` or `restore`."""
        shape = self.model.config
        selector = make_selector(
            method.context,
            windows=shape.windows,
            refresh_layers=method.refresh_layers or None,
            num_slots=len(self.prompts) + 1,
            budget=method.budget,
            verified_share=method.verified_share,
            device=self.device,
        )
        gaps = [later - earlier for earlier, later in zip([1, *starts], starts, strict=False)]
        runner = self._runner(selector, method.budget, max_drafts=max(draft_tokens, *gaps))
        self._begin(runner, max(1, selector.prompt_queries))
        shape3 = (len(self.prompts), len(starts), draft_tokens)
        tokens = np.full(shape3, -1, dtype=np.int64)
        confidence = np.zeros(shape3)
        measured = np.array([[self.has_start(r, s, draft_tokens) for s in starts] for r in range(len(self.prompts))])
        plain = np.full(shape3, -2, dtype=np.int64)
        for r, i in zip(*np.nonzero(measured), strict=True):
            plain[r, i] = self.continuations[r][starts[i] : starts[i] + draft_tokens]
        done = 0
        for i, (start, gap) in enumerate(zip(starts, gaps, strict=True)):
            slots = np.flatnonzero(measured[:, i]).tolist()
            if not slots:
                break
            if gap:
                self._verify_plain(runner, slots, start, gap)
            for j in range(draft_tokens):
                for slot, result in zip(
                    slots, self._step(runner, [Row(s, 0, RowKind.DRAFT, 1) for s in slots]), strict=True
                ):
                    tokens[slot, i, j] = result.token_ids[0]
                    confidence[slot, i, j] = result.confidence
                done += len(slots)
                on_tokens(done)
        match = tokens == plain
        return Drafts(tuple(starts), measured, np.cumprod(match, axis=2).sum(axis=2), confidence, match)

    # ---- the runner, without a scheduler

    def _runner(self, selector: Selector | None, budget: int, *, max_drafts: int) -> Runner:
        shape = self.model.config
        slots = len(self.prompts)
        backend = ReferenceBackend(
            self._pool,
            num_heads=shape.num_heads,
            scale=shape.attention_scale,
            windows=shape.windows,
            refresh_layers=selector.refresh_layers if selector else (),
            score_layers=scored_layers(selector),
        )
        state = SlotState(slots, self._longest, max_drafts, PAGE, self.device)
        contexts = ContextState(shape.num_layers, slots + 1, budget, self.device)
        forward = EagerForward(self.model.decoder, backend, state, contexts)
        sampler = Sampler(slots, shape.vocab_size, self.device, max_draft_tokens=max_drafts)
        return Runner(self.model.decoder, forward, sampler, selector, contexts, state)

    def _admit(self, computed: Sequence[int]) -> tuple[Admission, ...]:
        params = SamplingParams(temperature=0.0, max_tokens=self.num_output, ignore_eos=True)
        return tuple(
            Admission(slot, 0, 0, prompt, (), computed[slot], params, frozenset())
            for slot, prompt in enumerate(self.prompts)
        )

    def _prefill(self, runner: Runner, on_tokens: OnTokens) -> int:
        """Every prompt and, as its continuation, its first output token. Returns the number of prompt tokens."""
        done = 0
        admissions = self._admit([0] * len(self.prompts))
        for slot, prompt in enumerate(self.prompts):
            for start in range(0, len(prompt), CHUNK):
                n = min(CHUNK, len(prompt) - start)
                row = Row(slot, 0, RowKind.PREFILL, n, start, samples=start + n == len(prompt))
                (result,) = self._step(runner, [row], admissions)
                admissions = ()
                self.continuations[slot] = list(result.token_ids)
                done += n
                on_tokens(done)
        return done

    def _begin(self, runner: Runner, num_queries: int) -> None:
        """Every request as it is when its prompt has ended, the prompt's last queries scored."""
        lengths = [len(prompt) for prompt in self.prompts]
        counts = [min(num_queries, n) for n in lengths]
        rows = [Row(s, 0, RowKind.PREFILL, n, lengths[s] - n) for s, n in enumerate(counts)]
        self._step(runner, rows, self._admit([n - c for n, c in zip(lengths, counts, strict=True)]))

    def _verify_plain(self, runner: Runner, slots: Sequence[int], start: int, gap: int) -> None:
        """One verification of the `gap` plain tokens before `start`, so that `start` output tokens are known. Of two where it
        is one: a verification without drafts does not always renew the context."""
        gap = max(2, gap)
        for slot in slots:
            self._set(runner, slot, start - gap)
            runner.state.pending[slot] = gap - 1
        self._step(runner, [Row(slot, 0, RowKind.VERIFY, gap) for slot in slots])
        for slot in slots:  # where the two likeliest tokens tie, a batch may say another than plain decoding did
            self._set(runner, slot, start)

    def _set(self, runner: Runner, slot: int, num_output: int) -> None:
        """The slot knows `num_output` plain tokens, the newest of which is not computed; nothing is pending."""
        length = len(self.prompts[slot])
        text = self.continuations[slot]
        runner.state.tokens[slot, length : length + len(text)] = torch.tensor(text, device=self.device)
        runner.state.computed[slot] = length + num_output - 1
        runner.state.pending[slot] = 0

    def _step(
        self, runner: Runner, rows: Sequence[Row], admissions: tuple[Admission, ...] = ()
    ) -> tuple[RowResult, ...]:
        writes = tuple(PageWrite(new.slot, 0, self._pages[new.slot]) for new in admissions)
        self._num_steps += 1
        return runner.run(StepPlan(self._num_steps, tuple(rows), admissions, writes)).rows

    def _ended(self, text: Sequence[int]) -> bool:
        return len(text) >= self.num_output or text[-1] in self.model.eos_token_ids
