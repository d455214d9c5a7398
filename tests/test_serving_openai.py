"""The server as its clients see it: the official `openai` package, LangChain's, curl."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI

from aspire_llm import LLM, SamplingParams
from serving_server import NAME, Served, engine, served, served_model

MODEL = served_model()
KEY = "sk-test"
USER: Any = [{"role": "user", "content": "Say something."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Graz", "Linz"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Graz"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    llm = engine(MODEL)
    with served(llm, api_key=KEY) as made:
        yield made
        made.assert_idle()
    llm.shutdown()


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def direct(prompt: str, **params: Any) -> Any:
    """The same from the engine, without a server."""
    options = {"max_model_len": 1024, "kv_cache_memory": 8 << 20, "method": "plain", "block_size": 16}
    return LLM(NAME, loaded=MODEL, **options).generate(prompt, SamplingParams(**params))[0]  # type: ignore[arg-type]


def test_completions_are_the_engines(client: OpenAI) -> None:
    params: dict[str, Any] = {"max_tokens": 20, "temperature": 0.8, "seed": 3, "n": 2}
    expected = direct("Once upon a time", **params)
    made = client.completions.create(model=NAME, prompt="Once upon a time", **params)
    assert [c.text for c in made.choices] == [o.text for o in expected.outputs]
    assert [c.finish_reason for c in made.choices] == [o.finish_reason for o in expected.outputs]
    assert made.usage is not None
    assert made.usage.prompt_tokens == 16
    assert made.usage.completion_tokens == sum(len(o.token_ids) for o in expected.outputs)
    assert made.id.startswith("cmpl-")


def test_streams_say_the_same(client: OpenAI) -> None:
    params: dict[str, Any] = {"model": NAME, "max_tokens": 40, "temperature": 0.9, "seed": 7, "n": 3, "logprobs": 2}
    prompts = ["One", "Another prompt"]
    whole = client.completions.create(prompt=prompts, **params)
    texts: dict[int, str] = {}
    tokens: dict[int, list[Any]] = {}
    reasons, usage = {}, None
    for chunk in client.completions.create(
        prompt=prompts, stream=True, stream_options={"include_usage": True}, **params
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing comes after the end"
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs is not None:
                tokens.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs or [])
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert [texts[i] for i in range(6)] == [c.text for c in whole.choices]
    assert [reasons[i] for i in range(6)] == [c.finish_reason for c in whole.choices]
    for i, choice in enumerate(whole.choices):
        assert choice.logprobs is not None
        assert tokens[i] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    assert usage is not None
    assert usage == whole.usage


def test_logprobs_echo_and_stop(client: OpenAI) -> None:
    made = client.completions.create(model=NAME, prompt="abc", max_tokens=6, temperature=0, logprobs=3, echo=True)
    choice = made.choices[0]
    assert choice.logprobs is not None
    assert choice.text.startswith("abc")
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.tokens[:3] == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(p is not None and p <= 0 for p in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.top_logprobs is not None
    assert len(choice.logprobs.top_logprobs[-1]) == 3  # greedy: the chosen one is among the likeliest
    expected = direct("abc", max_tokens=6, temperature=0, logprobs=3).outputs[0]
    assert choice.logprobs.token_logprobs[3:] == pytest.approx([p.logprob for p in expected.logprobs], abs=1e-4)

    forced: Any = {"structured_outputs": {"choice": ["one two three"]}}
    stopped = client.completions.create(model=NAME, prompt="x", max_tokens=50, stop=[" three"], extra_body=forced)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("one two", "stop")
    assert stopped.choices[0].stop_reason == " three"  # type: ignore[attr-defined]


def test_chat_whole_and_streamed(client: OpenAI) -> None:
    params: dict[str, Any] = {
        **{"model": NAME, "messages": USER, "max_completion_tokens": 30, "seed": 11, "temperature": 0.7},
        **{"logprobs": True, "top_logprobs": 2},
    }
    made = client.chat.completions.create(**params)
    message = made.choices[0].message
    assert message.role == "assistant"
    assert message.content
    assert made.choices[0].logprobs is not None
    entries = made.choices[0].logprobs.content
    assert entries is not None
    assert made.usage is not None
    assert len(entries) == made.usage.completion_tokens
    assert b"".join(bytes(e.bytes or []) for e in entries).decode("utf-8", "replace") == message.content
    assert all(len(e.top_logprobs) == 2 for e in entries)

    text, streamed, roles, reasons = "", [], [], []
    for chunk in client.chat.completions.create(**params, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            streamed += (choice.logprobs.content or []) if choice.logprobs else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == message.content
    assert roles == ["assistant"]
    assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in entries], abs=1e-4)
    assert reasons == [made.choices[0].finish_reason]


def test_speculation_is_reported(client: OpenAI) -> None:
    """In vLLM's shape, in whole answers and in the last chunk of streams."""
    body: Any = {"ignore_eos": True}
    params: dict[str, Any] = {"model": NAME, "messages": USER, "max_tokens": 60, "temperature": 0}
    whole = client.chat.completions.create(**params, extra_body=body).model_extra["metrics"]  # type: ignore[index]
    last = list(client.chat.completions.create(**params, extra_body=body, stream=True))[-1]
    for found in (whole, last.model_extra["metrics"]):  # type: ignore[index]
        speculation = found["speculative_decoding"]
        assert set(speculation) == {
            *("mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps"),
            *("num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens"),
        }
        assert speculation["num_draft_tokens"] > 0
        assert sum(speculation["acceptance_histogram"]) == speculation["num_accepted_draft_tokens"]
    plain = client.chat.completions.create(**params, extra_body={**body, "draft": False})
    assert plain.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0  # type: ignore[index]


def test_response_formats(client: OpenAI) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "size": {"enum": [1, 2, 3]}},
        "required": ["ok", "size"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    made = client.chat.completions.create(model=NAME, messages=USER, max_tokens=200, response_format=wanted, seed=1)
    answer = json.loads(made.choices[0].message.content or "")
    assert set(answer) == {"ok", "size"}
    body: Any = {"structured_outputs": {"regex": "[0-9]{4}"}}
    digits = client.chat.completions.create(model=NAME, messages=USER, max_tokens=9, extra_body=body)
    assert (digits.choices[0].message.content or "").isdigit()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools_that_must_be_called(client: OpenAI, choice: Any) -> None:
    params: dict[str, Any] = {
        **{"model": NAME, "messages": USER, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False},
        **{"max_tokens": 200, "seed": 2},
    }
    made = client.chat.completions.create(**params).choices[0]
    assert made.finish_reason == "tool_calls"
    assert made.message.tool_calls is not None
    call: Any = made.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Graz", "Linz")

    names, arguments, reason = [], "", None
    for chunk in client.chat.completions.create(**params, stream=True):
        for piece in chunk.choices:
            for part in piece.delta.tool_calls or []:
                assert part.function is not None
                names += [part.function.name] if part.function.name else []
                arguments += part.function.arguments or ""
            reason = piece.finish_reason or reason
    assert (names, arguments, reason) == (["get_weather"], call.function.arguments, "tool_calls")


def test_tools_that_may_be_called_and_their_results(client: OpenAI) -> None:
    forced: Any = {"structured_outputs": {"choice": [f"Wait.\n{CALL}"]}}
    params: dict[str, Any] = {"model": NAME, "tools": [TOOL], "max_tokens": 120}
    made = client.chat.completions.create(messages=USER, extra_body=forced, **params).choices[0]
    assert made.message.content == "Wait."
    assert made.message.tool_calls is not None
    conversation: Any = [
        *USER,
        made.message.model_dump(),  # with every null that the client's own class has
        {"role": "tool", "tool_call_id": made.message.tool_calls[0].id, "content": "sunny"},
    ]
    answer = client.chat.completions.create(
        messages=conversation, extra_body={"max_tokens": 5}, **{**params, "max_tokens": 5}
    )
    assert answer.choices[0].finish_reason in ("length", "stop")
    silent: Any = {"structured_outputs": {"choice": [CALL]}}
    off = client.chat.completions.create(messages=USER, tool_choice="none", extra_body=silent, **params).choices[0]
    assert off.message.content == CALL  # nobody asked for calls
    assert off.message.tool_calls is None


def test_tools_in_llamas_form() -> None:
    llm = engine(MODEL)
    with served(llm, tool_call_parser="llama3_json") as server:
        params: dict[str, Any] = {"model": NAME, "messages": USER, "tools": [TOOL], "max_tokens": 120}
        with OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as plain:
            made = plain.chat.completions.create(**params, tool_choice="required").choices[0]
            forced: Any = {"structured_outputs": {"choice": ['{"weather": "sunny"}']}}
            text = plain.chat.completions.create(**params, extra_body=forced).choices[0]
        assert made.message.content is None
        assert made.message.tool_calls is not None
        call: Any = made.message.tool_calls[0]
        assert json.loads(call.function.arguments)["city"] in ("Graz", "Linz")
        assert (text.message.content, text.message.tool_calls) == ('{"weather": "sunny"}', None)
        server.assert_idle()
    llm.shutdown()


def test_models(client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_errors_are_the_clients_own(client: OpenAI, server: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="x")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError, match=r"top_p = 7") as refused:
        client.chat.completions.create(model=NAME, messages=USER, top_p=7, stream=True)
    assert refused.value.param == "top_p"
    with pytest.raises(openai.BadRequestError, match="max_model_len") as long:
        client.completions.create(model=NAME, prompt="x" * 2000)
    assert long.value.code == "context_length_exceeded"
    stranger = OpenAI(base_url=f"{server.url}/v1", api_key="sk-wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_langchain(server: Served) -> None:
    chat = ChatOpenAI(model=NAME, base_url=f"{server.url}/v1", api_key=KEY, max_tokens=12, seed=1, temperature=0.5)  # type: ignore[call-arg,arg-type]
    made = chat.invoke([HumanMessage("Hello")])
    chunks = list(chat.stream([HumanMessage("Hello")]))
    assert "".join(str(chunk.content) for chunk in chunks) == made.content
    assert made.usage_metadata is not None
    assert made.usage_metadata["output_tokens"] <= 12
    with_tools = ChatOpenAI(model=NAME, base_url=f"{server.url}/v1", api_key=KEY, max_tokens=200).bind_tools(  # type: ignore[call-arg,arg-type]
        [TOOL], tool_choice="required", parallel_tool_calls=False
    )
    called: Any = with_tools.invoke([HumanMessage("Weather?")])
    assert called.tool_calls[0]["name"] == "get_weather"
    gathered: AIMessageChunk | None = None
    for chunk in with_tools.stream(
        [HumanMessage("Weather?"), called, ToolMessage("sunny", tool_call_id=called.tool_calls[0]["id"])]
    ):
        assert isinstance(chunk, AIMessageChunk)
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered is not None
    assert gathered.tool_calls[0]["args"]["city"] in ("Graz", "Linz")


def test_curl(server: Served) -> None:
    body = {"model": NAME, "prompt": "Hi", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    done = subprocess.run(
        [
            *("curl", "-sS", "-N", "-i", f"{server.url}/v1/completions", "-H", f"Authorization: Bearer {KEY}"),
            *("-H", "Content-Type: application/json", "-H", "X-Request-Id: mine-1", "-d", json.dumps(body)),
        ],
        capture_output=True,
        check=True,
        timeout=60,
    )
    head, _, events = done.stdout.decode().partition("\r\n\r\n")
    assert "200 OK" in head
    assert "x-request-id: mine-1" in head.lower()
    assert "content-type: text/event-stream" in head.lower()
    lines = [line for line in events.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] <= 5
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
