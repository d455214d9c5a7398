"""What the runner prepares on the host."""

from __future__ import annotations

import gc
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from aspire_llm.context.selectors import WindowSelector
from aspire_llm.engine.after import AfterForward
from aspire_llm.engine.columns import Columns
from aspire_llm.engine.engine import Step
from aspire_llm.engine.forward import Described, describe
from aspire_llm.engine.garbage import RARELY, YOUNG, rare_collections
from aspire_llm.engine.launched import emitted_tokens
from aspire_llm.engine.runner import KEPT_STEPS, page_entries
from aspire_llm.engine.score_weights import KEPT, ScoreWeights
from aspire_llm.request import RowKind, SamplingParams
from aspire_llm.scheduler.plan import PageWrite, Row
from tiny import plain_tokens, prompts_of, requests_for, tiny_engine, tiny_model

P, D, V = RowKind.PREFILL, RowKind.DRAFT, RowKind.VERIFY


def test_a_slots_later_page_counts() -> None:
    writes = [PageWrite(1, 2, (7, 8)), PageWrite(0, 0, ()), PageWrite(1, 3, (9,)), PageWrite(0, 4, (5,))]
    places, pages = page_entries(writes, width=10)
    assert (places.dtype, pages.dtype) == (np.int64, np.int32)
    assert dict(zip(places.tolist(), pages.tolist(), strict=True)) == {12: 7, 13: 9, 4: 5}


def test_rows_as_arrays() -> None:
    rows = (Row(3, 0, V, 3), Row(0, 0, P, 4, 8), Row(5, 0, D, 1), Row(2, 0, P, 2, 1, samples=False), Row(4, 0, V, 1))
    columns = Columns.of(rows)
    weights = np.array([0.5, 0, 0.5, 0, 0, 0, 1, 1, 0, 0, 0], dtype=np.float32)
    step = describe(columns, weights, pad_rows=7, pad_tokens=16, scratch_slot=6)
    slots, kinds, starts, offsets, padded = (array.tolist() for array in step.arrays)
    assert slots == [3, 0, 5, 2, 4, 6, 6]
    assert kinds == [V, P, D, P, V, P, P]
    assert starts == [0, 8, 0, 1, 0, 0, 0]
    assert offsets == [0, 3, 7, 8, 10, 11, 11, 11]
    assert padded == [*weights.tolist(), *[0.0] * 5]
    assert (step.kinds, step.num_tokens) == ((V, P, D, P, V), (3, 4, 1, 2, 1))
    assert all(isinstance(kind, RowKind) for kind in step.kinds)
    assert (step.scored_rows, step.num_scored_tokens, step.scores_verified) == ((0, 1, 2), 4, True)

    tail = AfterForward.of(columns, np.array([True, True, True, False, False]), lambda n: n + 2)
    places, sampled, renewed, renewed_slots, refreshed, refreshed_slots = (array.tolist() for array in tail.arrays)
    assert places == [0, 1, 2, -1, 3]
    assert sampled == [0, 1, 2, 6, 7, 10, 0, 0]
    assert (renewed, renewed_slots, refreshed, refreshed_slots) == ([0, 1], [3, 0], [0, 1, 2], [3, 0, 5])
    assert (tail.num_logits, tail.all_sampled) == (6, False)
    assert AfterForward.of(Columns.of(rows[::4]), np.zeros(2, dtype=bool), int).all_sampled


def test_score_weights_are_those_of_the_selector() -> None:
    def weigh(kind: RowKind, num_tokens: int) -> list[float]:
        return [100.0 * int(kind) + num_tokens + 0.5 * i for i in range(num_tokens)]

    asked: list[tuple[RowKind, int]] = []

    class Weighing(WindowSelector):
        def query_weights(self, kind: RowKind, num_tokens: int) -> list[float]:
            asked.append((kind, num_tokens))
            return weigh(kind, num_tokens)

    weights, rng = ScoreWeights(Weighing()), random.Random(0)
    for size in (1, 7, 40):
        rows = tuple(
            Row(slot, 0, kind, 1 if kind is D else rng.choice((1, 2, 9, KEPT - 1, KEPT, KEPT + 1, 200)))
            for slot, kind in enumerate(rng.choices((P, D, V), k=size))
        )
        for updates in (np.zeros(size, bool), np.ones(size, bool), np.array(rng.choices((True, False), k=size))):
            found = weights.of(Columns.of(rows), updates)
            expected = [
                weight if update else 0.0
                for row, update in zip(rows, updates.tolist(), strict=True)
                for weight in weigh(row.kind, row.num_tokens)
            ]
            assert (found.dtype, found.tolist()) == (np.float32, expected)
    short = [shape for shape in asked if shape[1] <= KEPT]
    assert len(short) == len(set(short)) < len(asked)  # once each


def test_each_row_has_the_tokens_that_it_emitted() -> None:
    tokens = np.arange(12).reshape(3, 4)
    for emitted in ([1, 1, 1], [2, 1, 4], [0, 1, 1], [0, 0, 0]):
        expected = [tuple(row[:n]) for row, n in zip(tokens.tolist(), emitted, strict=True)]
        assert emitted_tokens(tokens, np.array(emitted)) == expected


def test_prompts_say_nothing_about_the_hosts_pace() -> None:
    model = tiny_model()
    engine = tiny_engine(model, method="plain", late=True, max_num_seqs=3)
    for request in requests_for(model, prompts_of([40, 50, 9]), SamplingParams(temperature=0.0, max_tokens=12)):
        engine.add(request)
    steps: list[Step] = []
    while engine.has_work:
        steps.append(engine.step())
    done = [(s.plan.takes_prompts, s.result.host_seconds) for s in steps if s.plan is not None and s.result is not None]
    for (took, seconds), (takes, _) in pairwise(done):  # the latter was planned while the former ran
        assert (seconds == 0.0) == (took or takes)
    assert {took for took, _ in done} == {True, False}


def test_full_collections_are_rare_while_requests_run() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold() == (YOUNG, before[1], RARELY)
    with pytest.raises(ZeroDivisionError), rare_collections():
        _ = 1 / 0
    assert gc.get_threshold() == before


def test_rows_that_come_again_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every step still gets the pages and the prompts that are its own, with requests joining and leaving."""
    described: list[tuple[RowKind, ...]] = []

    def spy(*args: Any) -> Described:
        described.append((step := describe(*args)).kinds)
        return step

    monkeypatch.setattr("aspire_llm.engine.runner.describe", spy)
    model = tiny_model()
    prompts = prompts_of([30, 41, 7, 22, 19])
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (40, 25, 60, 33, 50)]
    expected = [plain_tokens(model, [prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    described.clear()
    engine = tiny_engine(model, method="vegas", late=True, max_num_seqs=3)  # block_size 4: pages come all the time
    requests = requests_for(model, prompts, params)
    for request in requests:
        engine.add(request)
    drafting = steps = 0
    while engine.has_work:
        step = engine.step()
        engine.check()
        if step.plan is not None:
            steps += 1
            drafting += all(row.kind is D for row in step.plan.rows)
    assert [request.output_token_ids for request in requests] == expected
    assert drafting > 3 * sum(set(kinds) == {D} for kinds in described)
    assert len(described) < steps
    assert 0 < len(engine.runner._prepared) <= KEPT_STEPS
