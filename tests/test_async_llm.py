"""AsyncLLM: many concurrent readers of one engine thread; aborts, early exits, failures and shutdown leave nothing behind."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from aspire_llm import LLM, AsyncLLM, SamplingParams, UserError
from aspire_llm.request import RequestOutput
from byte_tokenizer import VOCAB, byte_tokenizer
from tiny import tiny_model

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
