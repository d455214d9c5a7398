"""AsyncLLM: many concurrent readers of one engine thread; aborts, early exits, failures and shutdown leave nothing behind."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from aspire_llm import LLM, AsyncLLM, SamplingParams, UserError
from aspire_llm.engine.outputs import request_metrics
from aspire_llm.engine.streams import News, OutputStream
from aspire_llm.engine.thread import EngineThread
from aspire_llm.request import Request, RequestOutput
from aspire_llm.scheduler.plan import StepPlan, StepResult
from byte_tokenizer import VOCAB, byte_tokenizer
from tiny import requests_for, tiny_engine, tiny_model

MODEL = replace(tiny_model(vocab_size=VOCAB), tokenizer=byte_tokenizer())
OPTIONS: dict[str, Any] = {
    "loaded": MODEL,
    "max_model_len": 256,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "kv_cache_memory": 3 << 18,
    "budget": 16,
}
PROMPTS = [[97 + (i * j) % 26 for j in range(1, 10 + 7 * i)] for i in range(1, 9)]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[AsyncLLM]:
    before = {thread.name for thread in threading.enumerate()}
    made = AsyncLLM("tiny", **OPTIONS)
    yield made
    made.shutdown()
    made._llm.engine.check()
    assert not made._llm.engine.has_work
    assert not any(t.name == "aspire-llm-engine" for t in threading.enumerate() if t.name not in before)


async def read(llm: AsyncLLM, i: int, **kwargs: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(PROMPTS[i], PARAMS, **kwargs)]


def test_streams_equal_the_batch(llm: AsyncLLM) -> None:
    async def everyone() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(read(llm, i) for i in range(8)))

    batch = LLM("tiny", **OPTIONS).generate(PROMPTS, PARAMS)
    for outputs, whole in zip(asyncio.run(everyone()), batch, strict=True):
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].token_ids == whole.outputs[0].token_ids
        assert outputs[-1].outputs[0].text == whole.outputs[0].text
        for earlier, later in itertools.pairwise(outputs):
            before, after = earlier.outputs[0], later.outputs[0]
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert after.text.startswith(before.text)


def test_early_exit_cancel_and_abort(llm: AsyncLLM) -> None:
    async def scenario() -> None:
        chance = random.Random(1)

        async def leave(i: int) -> None:
            async for output in llm.generate(PROMPTS[i % 8], PARAMS):
                if len(output.outputs[0].token_ids) > chance.randint(0, 20):
                    break

        async def cancelled(i: int) -> None:
            task = asyncio.create_task(read(llm, i % 8))
            await asyncio.sleep(chance.random() * 0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        async def aborted(i: int) -> None:
            name = f"abort-{i}"
            outputs = []
            async for output in llm.generate(PROMPTS[i % 8], PARAMS, request_id=name):
                outputs.append(output)
                await llm.abort(name)
            assert outputs[-1].outputs[0].finish_reason in ("abort", "length")

        await asyncio.gather(*(f(i) for i in range(8) for f in (leave, cancelled, aborted)))
        assert len((await read(llm, 3))[-1].outputs[0].token_ids) == 30

    asyncio.run(scenario())


def test_refusals_start_nothing(llm: AsyncLLM) -> None:
    async def scenario() -> None:
        for prompt, params, word in (
            ([], PARAMS, "empty"),
            ([9999], PARAMS, "vocabulary"),
            ([1] * 256, PARAMS, "max_model_len"),
        ):
            with pytest.raises(UserError, match=word):
                async for _ in llm.generate(prompt, params):
                    pass
        with pytest.raises(UserError, match="allowed_token_ids"):
            async for _ in llm.generate([1], SamplingParams(allowed_token_ids=[VOCAB])):
                pass

        async def twice() -> None:
            first = llm.generate(PROMPTS[0], PARAMS, request_id="same")
            await anext(first)
            with pytest.raises(UserError, match="in use"):
                await anext(llm.generate(PROMPTS[0], PARAMS, request_id="same"))
            await first.aclose()

        await twice()

    asyncio.run(scenario())


def test_a_dead_engine_leaves_nobody_waiting(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(llm._llm.engine.scheduler, "plan", lambda: 1 / 0)
        outputs = await asyncio.wait_for(asyncio.gather(*(read(llm, i) for i in range(3)), return_exceptions=True), 30)
        for output in outputs:
            assert isinstance(output, UserError) or output[-1].error == "ZeroDivisionError: division by zero"
        assert not llm.is_running
        with pytest.raises(UserError, match="stopped"):
            await read(llm, 0)

    asyncio.run(scenario())
    monkeypatch.undo()
    for request in [*llm._llm.engine.scheduler.running, *llm._llm.engine.scheduler.waiting]:
        request.finish_reason = None
        llm._llm.engine.abort(request)


def test_shutdown_ends_streams() -> None:
    llm = AsyncLLM("tiny", **OPTIONS)

    async def scenario() -> list[RequestOutput]:
        stream = llm.generate(PROMPTS[0], PARAMS)
        outputs = [await anext(stream)]
        await asyncio.to_thread(llm.shutdown)
        outputs.extend([o async for o in stream])
        return outputs

    last = asyncio.run(scenario())[-1]
    assert last.finished
    assert last.outputs[0].finish_reason in ("abort", "length")


class Watched:
    """An engine that results reach late or at once, with the slots of every plan, and one step held up while it runs."""

    def __init__(self, late: bool) -> None:
        self.engine = tiny_engine(MODEL, late=late, max_num_seqs=4)
        self.plans: list[set[int]] = []
        self.held, self.free = threading.Event(), threading.Event()
        self.hold_at = 6  # the plan whose step is held up
        plan, launch = self.engine.scheduler.plan, self.engine.runner.launch

        def planned() -> StepPlan | None:
            made = plan()
            if made is not None:
                self.plans.append({row.slot for row in made.rows})
            return made

        def launched(made: StepPlan) -> Any:
            return Held(self, launch(made)) if len(self.plans) == self.hold_at else launch(made)

        self.engine.scheduler.plan = planned  # type: ignore[method-assign]
        self.engine.runner.launch = launched  # type: ignore[method-assign]


class Held:
    """A step whose results take until the test lets them come."""

    def __init__(self, watched: Watched, inner: Any) -> None:
        self._watched, self._inner = watched, inner

    def result(self) -> StepResult:
        self._watched.held.set()
        assert self._watched.free.wait(60)
        result: StepResult = self._inner.result()
        return result


@pytest.mark.parametrize("late", [False, True])
def test_an_abort_seen_while_a_step_runs_is_in_no_later_plan(late: bool) -> None:
    watched = Watched(late)
    told: list[Request] = []
    thread = EngineThread(watched.engine, told.extend)
    going, staying = requests_for(MODEL, [[5] * 9, [6] * 11], SamplingParams(max_tokens=40, ignore_eos=True))
    thread.add([going, staying])
    assert watched.held.wait(60)
    slots = going.slot, staying.slot
    num_plans = len(watched.plans)  # late: one more than the step that runs
    assert num_plans == watched.hold_at + late
    thread.abort([going])
    watched.free.set()
    while not staying.finished:
        time.sleep(0.005)
    thread.close()
    assert all(slots[0] in plan for plan in watched.plans[1:num_plans])
    assert len(watched.plans) > num_plans
    for plan in watched.plans[num_plans:]:
        assert plan == {slots[1]}
    assert going.finish_reason == "abort"
    assert len(staying.output_token_ids) == 40
    assert told.count(staying) > 1
    watched.engine.check()


def test_what_goes_over_is_what_is_new(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread hands over each token once, however long the output has become, and all of them."""
    handed: list[int] = []
    collect = OutputStream.collect

    def counted(stream: OutputStream, changed: Iterable[Request]) -> News | None:
        news = collect(stream, changed)
        if news is not None:
            handed.append(sum(len(piece.token_ids) for piece in news.pieces))
        return news

    monkeypatch.setattr(OutputStream, "collect", counted)

    async def scenario() -> None:
        params = PARAMS.model_copy(update={"n": 2, "logprobs": 1, "max_tokens": 60})
        [whole] = [o async for o in llm.stream(llm.prepare(PROMPTS[2], params), kind="final_only")]
        assert handed == [120]
        handed.clear()
        text, tokens, logprobs = ["", ""], [[], []], [[], []]  # type: ignore[var-annotated]
        num_outputs = 0
        prepared = llm.prepare(PROMPTS[2], params)
        async for output in llm.stream(prepared, kind="delta"):
            num_outputs += 1
            assert output.metrics is not None
            for choice in output.outputs:
                text[choice.index] += choice.text
                tokens[choice.index] += choice.token_ids
                logprobs[choice.index] += choice.logprobs or []
        assert num_outputs > 10
        assert output.finished
        assert output.metrics == request_metrics(prepared.requests)  # exact at the end
        assert sum(handed) == 120
        assert max(handed) <= 2 * 17
        for i, choice in enumerate(whole.outputs):
            assert (text[i], tokens[i]) == (choice.text, choice.token_ids)
            assert choice.logprobs is not None
            assert [at.token_id for at in logprobs[i]] == [at.token_id for at in choice.logprobs] == tokens[i]

    asyncio.run(scenario())


def test_a_reader_that_waits_gets_all_at_once(llm: AsyncLLM) -> None:
    async def scenario() -> None:
        stream = llm.stream(llm.prepare(PROMPTS[1], PARAMS), kind="delta")
        first = await anext(stream)
        deadline = time.monotonic() + 120
        while llm.engine.has_work and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        rest = [output async for output in stream]
        assert len(rest) == 1
        assert len(first.outputs[0].token_ids) + len(rest[0].outputs[0].token_ids) == 30
        assert rest[0].finished

    asyncio.run(scenario())
