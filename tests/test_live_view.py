"""What the live page is told: complete, bounded, and true to the engine's own counts."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from aspire_llm import AsyncLLM, SamplingParams
from aspire_llm.engine.engine import Engine, Step
from aspire_llm.request import RowKind
from aspire_llm.serving import live
from aspire_llm.serving.live import LiveMonitor
from aspire_llm.serving.live_view import CYCLES, HISTORY, LiveView, RecentCycles
from byte_tokenizer import VOCAB, byte_tokenizer
from tiny import GREEDY, FixedCost, always_draft_to, prompts_of, requests_for, tiny_engine, tiny_model

MODEL = tiny_model()


def frames_of(
    engine: Engine, lengths: list[int], max_tokens: int = 40, every: int = 3
) -> tuple[list[dict[str, Any]], Any]:
    """Run a batch to its end; every few steps a frame, as the page would get them, and the requests."""
    view = LiveView(engine)
    requests = requests_for(MODEL, prompts_of(lengths), GREEDY.model_copy(update={"max_tokens": max_tokens}))
    for request in requests:
        engine.add(request)
    frames, count = [], 0
    while engine.has_work:
        view.add(engine.step(), now=count * 0.01)
        count += 1
        if count % every == 0:
            frames.append(view.frame(count * 0.01, whole=False))
    frames.append(view.frame(count * 0.01, whole=False))
    assert view.frame(count * 0.01, whole=True)["lanes"] == [], "an ended request is kept"
    return frames, requests


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("pages", [None, 40], ids=["room", "preempting"])
def test_deltas_tell_everything_once(late: bool, pages: int | None) -> None:
    engine = tiny_engine(MODEL, late=late, policy=always_draft_to(3))
    if pages is not None:
        engine = tiny_engine(
            MODEL,
            late=late,
            policy=always_draft_to(3),
            max_model_len=128,
            kv_cache_memory=pages * 4 * 2 * 2 * 2 * 8 * 4,
        )
    frames, requests = frames_of(engine, [9, 17, 33, 60])
    assert (engine.scheduler.num_preemptions > 0) == (pages is not None)
    for request in requests:
        sent = [lane for frame in frames for lane in frame["lanes"] if lane["key"] == request.key]
        cells = [cell for lane in sent for cell in lane["cells"]]
        steps = [cell[0] for cell in cells]
        assert steps == sorted(set(steps))
        kinds = [cell[1] for cell in cells]
        if not late and pages is None:  # else rows are planned whose results nobody waits for
            assert {kind.name.lower(): kinds.count(kind) for kind in RowKind} == request.stats.steps
        verified = [cell for cell in cells if cell[1] == RowKind.VERIFY]
        drafted = sum(cell[2] - 1 for cell in verified)
        assert drafted == request.stats.num_draft_tokens > 0
        # the last verification may be cut by max_tokens
        assert 0 <= sum(cell[3] for cell in verified) - request.stats.num_accepted_tokens <= 3
        assert [lane["ended"] for lane in sent] == [None] * (len(sent) - 1) + ["length"]
        assert sent[-1]["output"] == len(request.output_token_ids) == 40


def test_memory_is_bounded_and_whole_frames_change_nothing() -> None:
    engine = tiny_engine(MODEL, policy=always_draft_to(1), max_model_len=512)
    view = LiveView(engine)
    (request,) = requests_for(MODEL, [[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=480, ignore_eos=True))
    engine.add(request)
    count = 0
    whole: dict[str, Any] = {}
    while engine.has_work:
        view.add(engine.step(), now=0.0)
        count += 1
        if count % 50 == 0:
            whole = view.frame(0.0, whole=True)
    assert count > HISTORY
    assert len(whole["lanes"][0]["cells"]) == HISTORY
    (lane,) = view.frame(0.0, whole=False)["lanes"]
    assert len(lane["cells"]) == HISTORY
    assert lane["cells"][-1][0] == count - 1


def test_an_abort_between_steps_is_seen() -> None:
    engine = tiny_engine(MODEL)
    view = LiveView(engine)
    (request,) = requests_for(MODEL, [[1, 2, 3]], GREEDY)
    engine.add(request)
    for _ in range(4):
        view.add(engine.step(), now=0.0)
    assert len(view.frame(0.0, whole=True)["lanes"]) == 1
    engine.abort(request)
    (lane,) = view.frame(0.0, whole=False)["lanes"]
    assert lane["ended"] == "abort"
    frame = view.frame(9.0, whole=False)
    assert frame["lanes"] == []
    assert (frame["running"], frame["tokens_per_s"], frame["speed_up"]) == (0, 0.0, None)


def test_recent_cycles_against_a_plain_count() -> None:
    chance = random.Random(0)
    cycles = RecentCycles()
    assert cycles.as_json() == {"lengths": [0], "drafted_at": [], "accepted_at": [], "mean_accepted": None}
    done = []
    for _ in range(CYCLES + 100):
        drafted = chance.randint(0, 7)
        done.append((drafted, chance.randint(0, drafted)))
        cycles.add(*done[-1])
    kept = done[-CYCLES:]
    shown = cycles.as_json()
    assert shown["lengths"] == [sum(d == n for d, _ in kept) for n in range(8)]
    assert shown["drafted_at"] == [sum(d > i for d, _ in kept) for i in range(7)]
    assert shown["accepted_at"] == [sum(a > i for _, a in kept) for i in range(7)]
    with_drafts = [a for d, a in kept if d]
    assert shown["mean_accepted"] == pytest.approx(1 + sum(with_drafts) / len(with_drafts))


def speed_up(engine: Engine) -> float | None:
    view = LiveView(engine)
    for request in requests_for(MODEL, prompts_of([100] * 4), GREEDY):
        engine.add(request)
    while engine.has_work:
        view.add(engine.step(), now=0.0)
    frame = view.frame(0.0, whole=False)
    assert frame["has_cost_model"] is (engine.cost is not None)
    result: float | None = frame["speed_up"]
    return result


def test_speed_up_is_the_cost_models() -> None:
    """One for plain decoding; known where every draft is right; not given without a cost model."""
    assert speed_up(tiny_engine(MODEL, policy_name="staggered")) is None
    plain = tiny_engine(MODEL, method="plain")
    plain.cost = FixedCost(1.0, 0.01, 0.05)
    assert speed_up(plain) == pytest.approx(1.0, abs=0.02)
    # only the fixed cost counts, and a set of 256 reads all: cycles of 4 steps give 4 tokens, as plain decoding does
    even = tiny_engine(MODEL, policy=always_draft_to(3), budget=256)
    even.cost = FixedCost(1.0, 0.0, 0.0)
    assert speed_up(even) == pytest.approx(1.0, abs=0.1)
    # only reads count: a set of 16 of 100 or more positions, of which the refresh layer (one of two) reads all
    cheap = tiny_engine(MODEL, policy=always_draft_to(3), budget=256)
    cheap.cost = FixedCost(0.0, 1.0, 0.0)  # tokens alone: 3 drafts and 4 verified give 4
    assert speed_up(cheap) == pytest.approx(4 / 7, abs=0.05)


def make_llm(monitor: LiveMonitor, **options: Any) -> AsyncLLM:
    return AsyncLLM(
        "tiny",
        on_step=monitor.on_step,
        loaded=replace(tiny_model(vocab_size=VOCAB), tokenizer=byte_tokenizer()),
        **(
            {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory": 1 << 20, "budget": 16, "block_size": 16}
            | options
        ),
        cost=FixedCost(1.0, 0.01, 0.05),
    )


def parse(event: str) -> tuple[str, dict[str, Any]]:
    name, data = event.strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_nobody_watching_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    monitor = LiveMonitor()
    monitor.on_step(None)  # type: ignore[arg-type]  # not even looked at
    assert monitor.is_idle
    llm = make_llm(monitor)

    async def scenario() -> None:
        async for _ in llm.generate([97, 98, 99], SamplingParams(max_tokens=8)):
            assert monitor.is_idle
        with monitor.watch(llm), monitor.watch(llm):
            assert not monitor.is_idle
        assert monitor.is_idle
        assert monitor.num_watchers == 0

    asyncio.run(scenario())
    llm.shutdown()
    assert not caplog.records


def test_watchers_share_frames_and_a_slow_one_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL", 0.02)
    monitor = LiveMonitor()
    llm = make_llm(monitor)
    built = 0
    frame = LiveView.frame

    def counted(self: LiveView, now: float, *, whole: bool) -> dict[str, Any]:
        nonlocal built
        built += not whole
        return frame(self, now, whole=whole)

    monkeypatch.setattr(LiveView, "frame", counted)

    async def fast(seen: list[tuple[str, dict[str, Any]]]) -> None:
        async for event in monitor.events(llm):
            if not event.startswith(":"):
                seen.append(parse(event))

    async def scenario() -> None:
        readers: list[list[tuple[str, dict[str, Any]]]] = [[] for _ in range(5)]
        tasks = [asyncio.create_task(fast(seen)) for seen in readers]
        await asyncio.sleep(0)
        slow = monitor.events(llm)
        assert parse(await anext(slow))[0] == "snapshot"
        assert monitor.num_watchers == 6
        async for _ in llm.generate([97, 98, 99, 100], SamplingParams(max_tokens=400, ignore_eos=True)):
            pass
        await asyncio.sleep(0.1)
        name, newest = parse(await anext(slow))
        assert name == "snapshot", "a watcher that missed frames gets the whole state"
        assert newest["steps"] == readers[0][-1][1]["steps"]
        await slow.aclose()
        assert monitor.num_watchers == 5
        assert all(len(seen) > 3 for seen in readers)
        assert built < 2 * max(len(seen) for seen in readers) + 20, "each watcher has its frames built"
        cells = [c for _, frame in readers[0] for lane in frame["lanes"] for c in lane["cells"]]
        assert len({c[0] for c in cells}) == readers[0][-1][1]["steps"]
        await asyncio.to_thread(llm.shutdown)
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert all(seen[-1] == ("stopped", {"reason": "it was shut down"}) for seen in readers)

    asyncio.run(scenario())
    assert monitor.is_idle


def test_a_broken_view_does_not_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: LiveView, step: Step, now: float) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(LiveView, "add", broken)
    monitor = LiveMonitor()
    llm = make_llm(monitor)

    async def scenario() -> None:
        with monitor.watch(llm):
            outputs = [o async for o in llm.generate([97, 98, 99], SamplingParams(max_tokens=8, ignore_eos=True))]
        assert len(outputs[-1].outputs[0].token_ids) == 8

    asyncio.run(scenario())
    llm.shutdown()
    assert "lost a step" in caplog.text


def test_frames_hold_no_text() -> None:
    monitor = LiveMonitor()
    llm = make_llm(monitor)
    events = []

    async def scenario() -> None:
        stream = monitor.events(llm)
        events.append(await anext(stream))
        outputs = [o async for o in llm.generate([*b"SECRET"], SamplingParams(max_tokens=60, ignore_eos=True))]
        assert outputs[-1].finished
        events.append(await anext(stream))
        await stream.aclose()

    asyncio.run(scenario())
    llm.shutdown()
    assert '"cells":[[' in events[1]
    assert "SECRET" not in "".join(events)
    assert {key for lane in parse(events[1])[1]["lanes"] for key in lane} == {
        *("key", "id", "prompt", "output", "max", "waiting", "ended", "cells")
    }
