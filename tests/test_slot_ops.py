"""The kernels of slot arithmetic against torch, on ragged steps: under the interpreter, or on a GPU where there is one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_llm.engine.after import AfterForward
from aspire_llm.engine.columns import Columns
from aspire_llm.engine.forward import describe
from aspire_llm.engine.slot_ops import StepRows, gather, settle
from aspire_llm.engine.slots import SlotState
from aspire_llm.request import RowKind, SamplingParams
from aspire_llm.sampling.batch import SampleOutput
from aspire_llm.scheduler.plan import Row
from tiny import always_draft_to, plain_tokens, prompts_of, requests_for, run, tiny_engine, tiny_model

pytest.importorskip("triton")
pytestmark = pytest.mark.kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, LONGEST, DRAFTS = 12, 700, 33


@dataclass(frozen=True)
class Scene:
    rows: tuple[Row, ...]
    computed: tuple[int, ...]  # of each row's slot
    pending: tuple[int, ...]
    emitted: tuple[int, ...]
    pad_rows: bool
    spare_tokens: int
    seed: int


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    rows, computed, pending, emitted = [], [], [], []
    for slot in slots:
        kind = draw(st.sampled_from(RowKind))
        known = draw(st.sampled_from((0, 1, 5, 64, LONGEST - 2 * DRAFTS)))
        drafted = draw(st.integers(0, DRAFTS - 1))
        tokens, start, samples = 1, 0, True
        if kind is RowKind.VERIFY:
            tokens = 1 + drafted
        elif kind is RowKind.PREFILL:
            tokens = draw(st.sampled_from((1, 2, 31, 32, 33, 300)))
            start = draw(st.integers(0, LONGEST - tokens - 1))
            samples = draw(st.booleans())
        rows.append(Row(slot, 1, kind, tokens, start, samples=samples))
        computed.append(known)
        pending.append(drafted)
        if samples:
            emitted.append(draw(st.integers(1, tokens)) if kind is RowKind.VERIFY else 1)
    padded = draw(st.booleans())
    return Scene(
        tuple(rows), tuple(computed), tuple(pending), tuple(emitted),
        padded, draw(st.sampled_from((0, 1, 7, 300))) if padded else 0, draw(st.integers(0, 2**31)),
    )  # fmt: skip


def state_of(scene: Scene, *, kernels: bool) -> SlotState:
    state = SlotState(SLOTS, LONGEST, DRAFTS, 16, DEVICE)
    generator = torch.Generator().manual_seed(scene.seed)
    for field in (state.computed, state.pending, state.tokens):  # of slots that the step does not name, too
        field.copy_(torch.randint(0, 500, field.shape, generator=generator))
    state.computed[SLOTS] = state.pending[SLOTS] = 0
    for row, known, drafted in zip(scene.rows, scene.computed, scene.pending, strict=True):
        state.computed[row.slot], state.pending[row.slot] = known, drafted
    state.on_kernels = kernels
    return state


def on_device(scene: Scene) -> tuple[StepRows, torch.Tensor, int]:
    """Rows, places of the sampling ones, and the step's tokens with padding."""
    columns = Columns.of(scene.rows)
    weights = np.zeros(columns.num_tokens, dtype=np.float32)
    pad_rows = SLOTS + 1 if scene.pad_rows else 0
    step = describe(columns, weights, pad_rows, columns.num_tokens + scene.spare_tokens, SLOTS)
    *rows, padded = (torch.from_numpy(array).to(DEVICE) for array in step.arrays)
    places, *_ = AfterForward.of(columns, np.zeros(len(scene.rows), dtype=bool), int).arrays
    return StepRows(*rows), torch.from_numpy(places).to(DEVICE), len(padded)


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_gather(scene: Scene) -> None:
    rows, _, num_tokens = on_device(scene)
    state = state_of(scene, kernels=False)
    expected = gather(state, rows, num_tokens)
    found = gather(state_of(scene, kernels=True), rows, num_tokens)
    for field in ("starts", "sparse", "positions", "token_ids"):
        ours, theirs = getattr(found, field), getattr(expected, field)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), field
    at = 0
    for row, known, drafted in zip(scene.rows, scene.computed, scene.pending, strict=True):
        first = {RowKind.PREFILL: row.start, RowKind.DRAFT: known + drafted, RowKind.VERIFY: known}[row.kind]
        positions = list(range(first, first + row.num_tokens))
        assert found.positions[at : at + row.num_tokens].tolist() == positions
        assert found.token_ids[at : at + row.num_tokens].tolist() == state.tokens[row.slot, positions].tolist()
        at += row.num_tokens
    assert not found.positions[at:].any()  # padding stands at the start of the slot that nobody has


@settings(max_examples=60, deadline=None)
@given(scenes(), st.booleans())
def test_settle(scene: Scene, nothing_sampled: bool) -> None:
    rows, places, _ = on_device(scene)
    widest = max(scene.emitted, default=1) + scene.seed % 3
    generator = torch.Generator().manual_seed(scene.seed)
    tokens = torch.randint(500, 1000, (len(scene.emitted), widest), generator=generator).to(DEVICE)
    emitted = torch.tensor(scene.emitted, dtype=torch.int64, device=DEVICE)
    sampled: SampleOutput | None = SampleOutput(tokens, emitted, torch.zeros(len(emitted), device=DEVICE))
    if nothing_sampled or not scene.emitted:
        places, sampled = torch.full_like(places, -1), None
    before = state_of(scene, kernels=False)
    expected, found = state_of(scene, kernels=False), state_of(scene, kernels=True)
    settle(expected, rows, places, sampled)
    settle(found, rows, places, sampled)
    assert torch.equal(found.computed, expected.computed)
    assert torch.equal(found.pending, expected.pending)
    assert torch.equal(found.tokens[:, :-1], expected.tokens[:, :-1])  # nobody reads the last column

    # what must be so, by the rows themselves
    for row, known, drafted, place in zip(scene.rows, scene.computed, scene.pending, places.tolist(), strict=True):
        if row.kind is RowKind.PREFILL:
            known = row.start + row.num_tokens
        first = known + {RowKind.PREFILL: 0, RowKind.DRAFT: drafted + 1, RowKind.VERIFY: 1}[row.kind]
        new = [] if place < 0 else tokens[place, : scene.emitted[place]].tolist()
        before.tokens[row.slot, first : first + len(new)] = torch.tensor(new, dtype=torch.int64, device=DEVICE)
        before.computed[row.slot] = known + (len(new) if row.kind is RowKind.VERIFY else 0)
        if place >= 0:
            before.pending[row.slot] = drafted + 1 if row.kind is RowKind.DRAFT else 0
    assert torch.equal(found.computed, before.computed)
    assert torch.equal(found.pending, before.pending)
    assert torch.equal(found.tokens[:, :-1], before.tokens[:, :-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines on a GPU run on the kernels anyway")
def test_an_engine_on_the_kernels_gives_the_same_tokens() -> None:
    model = tiny_model()
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    prompts = prompts_of([5, 37, 50])
    engine = tiny_engine(model, method="aspire", policy=always_draft_to(3), max_num_seqs=3)
    engine.runner.state.on_kernels = True
    requests = requests_for(model, prompts, params)
    assert run(engine, requests) == plain_tokens(model, prompts, params)
    assert sum(r.stats.num_accepted_tokens for r in requests) > 0
