"""The end of a step as a GPU's graphs hold it, against the one that the host prepares: under the interpreter, or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aspire_llm.engine.engine import Engine
from aspire_llm.engine.finish import Finish, Finished
from aspire_llm.engine.forward import Described, EagerForward, Forwarded
from aspire_llm.engine.launched import Launched
from aspire_llm.engine.slot_ops import StepRows
from aspire_llm.request import Request, RowKind, SamplingParams
from aspire_llm.sampling.batch import SampleBatch
from aspire_llm.sampling.sampler import DraftSampling, Sampler
from aspire_llm.scheduler.plan import StepPlan
from tiny import always_draft_to, prompts_of, requests_for, run, tiny_engine, tiny_model

pytest.importorskip("triton")
pytestmark = pytest.mark.kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, DRAFTS, LONGEST = 8, 6, 40
PLAIN = (SamplingParams(temperature=0), SamplingParams(temperature=1.0), SamplingParams(temperature=0.6))
MORE = (
    SamplingParams(temperature=0.6, top_k=3),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0, logit_bias={0: 2.0}),
    SamplingParams(temperature=0, repetition_penalty=1.2),
    SamplingParams(temperature=0, logprobs=1),
)


def sampler_of(mode: DraftSampling, params: Sequence[SamplingParams], vocab_size: int = 100) -> Sampler:
    sampler = Sampler(SLOTS, vocab_size, DEVICE, mode, max_draft_tokens=DRAFTS)
    sampler.on_kernels = True
    for slot, one in enumerate(params):
        sampler.admit(slot, one, 1000 * slot - 3, [0])
    return sampler


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(("greedy", "coupled")),
    st.lists(st.sampled_from(PLAIN), min_size=SLOTS, max_size=SLOTS),
    st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True),
    st.sampled_from((1, 7, 100, 130)),
    st.integers(0, 20),
    st.integers(0, 2**31),
)
def test_rows_choose_what_the_prepared_step_does(
    mode: DraftSampling, params: list[SamplingParams], slots: list[int], vocab_size: int, spare_tokens: int, seed: int
) -> None:
    """Ragged drafts and verifications and last tokens of prompts, tied and impossible logits among them; padding behind them."""
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    sampler = sampler_of(mode, params, vocab_size)
    kinds = [RowKind(kind) for kind in random.integers(0, len(RowKind), len(slots)).tolist()]
    counts = [int(random.integers(1, DRAFTS + 2)) if kind is RowKind.VERIFY else 1 for kind in kinds]
    total, padding = sum(counts), SLOTS + 1 - len(slots)
    logits = (torch.randint(-8, 9, (total + spare_tokens, vocab_size), generator=generator) / 2).to(DEVICE)
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -torch.inf
    history = torch.randint(0, vocab_size, (SLOTS + 1, LONGEST), generator=generator).to(DEVICE)
    firsts = random.integers(0, LONGEST - DRAFTS - 2, len(slots)).tolist()
    places = [torch.arange(first, first + n) for first, n in zip(firsts, counts, strict=True)]
    positions = torch.cat([*places, torch.zeros(spare_tokens, dtype=torch.int64)]).to(DEVICE)
    batch = SampleBatch(kinds, slots, counts, logits[:total], positions[:total], history)
    expected = sampler.run(batch)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    offsets = np.cumsum([0, *counts, *[0] * padding])
    assert sampler.runs_by_row(np.array(slots))
    found = sampler.run_rows(
        ints(*slots, *[SLOTS] * padding), ints(*kinds, *[RowKind.PREFILL] * padding), ints(*offsets.tolist()),
        logits, positions, history,
    )  # fmt: skip
    rows, width = len(slots), expected.tokens.shape[1]
    assert torch.equal(found.num_emitted[:rows], expected.num_emitted)
    assert torch.equal(found.tokens[:rows, :width], expected.tokens)
    assert not found.tokens[:rows, width:].any()
    assert torch.equal(found.confidence[:rows], expected.confidence)


@pytest.mark.parametrize("params", MORE)
def test_requests_that_ask_for_more_do_not_choose_by_row(params: SamplingParams) -> None:
    sampler = sampler_of("coupled", [PLAIN[0], PLAIN[1], params])
    assert sampler.runs_by_row(np.array([0, 1]))
    assert not sampler.runs_by_row(np.array([0, 2]))
    sampler.release(2)
    sampler.admit(2, PLAIN[2], 0, [0])
    assert sampler.runs_by_row(np.array([0, 2]))


def test_only_greedy_rows_choose_by_row_where_drafts_are_rejected_by_their_distribution() -> None:
    sampler = sampler_of("rejection", PLAIN)
    assert sampler.runs_by_row(np.array([0]))
    assert not sampler.runs_by_row(np.array([0, 1]))


class EndsByRow:
    """A forward that pads its steps and offers their end, as captured graphs do."""

    def __init__(self, inner: EagerForward, finish: Finish, pad_rows: int) -> None:
        self._inner = inner
        self._finish = finish
        self.pad_rows = pad_rows
        self.num_finished = 0

    def padded(self, num_tokens: int) -> int:
        return -(-num_tokens // 4) * 4

    def run(self, step: Described, arrays: Sequence[Tensor]) -> Forwarded:
        forwarded = self._inner.run(step, arrays)

        def finish() -> Finished:
            self.num_finished += 1
            rows = StepRows(*arrays[:-1])
            return self._finish(rows, forwarded.hidden, forwarded.positions, forwarded.attention)

        return replace(forwarded, finish=finish)


def end_by_row(engine: Engine) -> EndsByRow:
    runner = engine.runner
    runner.sampler.on_kernels = runner.state.on_kernels = True
    finish = Finish(runner.decoder, runner.sampler, runner.state)
    forward = EndsByRow(runner._forward, finish, runner.state.num_slots + 1)  # type: ignore[arg-type]
    runner._forward = forward
    return forward


def note_rows_ended(engine: Engine, forward: EndsByRow) -> set[RowKind]:
    """Kinds of rows in steps that ended by row, as they come."""
    kinds: set[RowKind] = set()
    launch = engine.runner.launch

    def noting(plan: StepPlan) -> Launched:
        before = forward.num_finished
        launched = launch(plan)
        if forward.num_finished > before:
            kinds.update(row.kind for row in plan.rows)
        return launched

    engine.runner.launch = noting  # type: ignore[method-assign]
    return kinds


@pytest.mark.skipif(torch.cuda.is_available(), reason="the engine's own forward is captured there")
@pytest.mark.parametrize("late", [False, True])
def test_an_engine_whose_steps_end_by_row_gives_the_same_tokens(late: bool) -> None:
    """Requests of every sort come and go, so steps end either way; those of one sort alone end by row."""
    model = tiny_model()
    prompts = prompts_of([5, 37, 20, 11, 1])  # the last one is read in one token, in a step that ends by row
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 0.7, "top_k": 5, "seed": 4},
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.0},
    ]
    lengths = [21, 17, 6, 5, 4]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, **k) for n, k in zip(lengths, kinds, strict=True)]

    def requests() -> list[Request]:
        return [requests_for(model, [p], one)[0] for p, one in zip(prompts, params, strict=True)]

    expected = run(tiny_engine(model, method="plain", max_num_seqs=3), requests())
    options = {"policy": always_draft_to(3), "attention_backend": "triton", "block_size": 16}
    engine = tiny_engine(model, method="aspire", late=late, max_num_seqs=3, **options)
    forward = end_by_row(engine)
    ended = note_rows_ended(engine, forward)
    made = requests()
    assert run(engine, made) == expected
    assert ended == {RowKind.DRAFT, RowKind.VERIFY, RowKind.PREFILL}
    assert sum(r.stats.num_accepted_tokens for r in made) > 0
    scratch = engine.runner.state.num_slots
    assert engine.runner.state.computed[scratch] == engine.runner.state.pending[scratch] == 0
