"""/v1/responses through the official client: text, streams, calls and their results, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from serving_server import NAME, Served, engine, served, served_model

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Graz", "Linz"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    llm = engine(served_model())
    with served(llm) as made:
        yield made
        made.assert_idle()
    llm.shutdown()


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_an_answer_is_that_of_a_chat(client: OpenAI) -> None:
    params: dict[str, Any] = {"model": NAME, "temperature": 0}
    made = client.responses.create(input="hi", instructions="Be short.", max_output_tokens=30, **params)
    messages: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(messages=messages, max_tokens=30, **params)
    assert made.output_text == chat.choices[0].message.content
    assert (made.status, made.object) == ("incomplete", "response")
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage is not None
    assert chat.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (chat.usage.prompt_tokens, 30)
    assert made.output[0].type == "message"
    assert made.to_dict()["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0  # type: ignore[index]
    # the conversation goes on with what came back
    again: Any = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in made.output)]
    again.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "more"}]})
    assert client.responses.create(input=again, max_output_tokens=2, **params).usage is not None


def test_a_stream_tells_the_same(client: OpenAI) -> None:
    params: dict[str, Any] = {"model": NAME, "input": "hi", "temperature": 0, "max_output_tokens": 30}
    whole = client.responses.create(**params)
    events = list(client.responses.create(stream=True, **params))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:4] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added")
    ]
    assert kinds[-4:] == [
        *("response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete")
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert len(kinds) > 12
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 30


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_calls(client: OpenAI, choice: Any) -> None:
    params: dict[str, Any] = {"model": NAME, "input": "Weather?", "tools": [TOOL], "tool_choice": choice}
    params |= {"parallel_tool_calls": False, "temperature": 0, "max_output_tokens": 200}
    [call] = client.responses.create(**params).output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("get_weather", "completed")
    assert call.arguments in ('{"city": "Graz"}', '{"city": "Linz"}')
    events = list(client.responses.create(stream=True, **params))
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [e.arguments for e in done] == [call.arguments]
    assert events[-1].type == "response.completed"
    conversation: Any = [{"role": "user", "content": "Weather?"}, call.to_dict()]
    conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    answer = client.responses.create(model=NAME, input=conversation, tools=[TOOL], max_output_tokens=5)
    assert answer.usage is not None


def test_output_that_is_held_to_a_schema(client: OpenAI) -> None:
    schema = {"enum": ["red", "green"]}  # no place for blanks, of which a random model may write without end
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    made = client.responses.create(model=NAME, input="hi", text=form, max_output_tokens=100, temperature=0)
    assert made.output_text in ('"red"', '"green"')
    assert made.status == "completed"
    with client.responses.stream(model=NAME, input="hi", text=form, max_output_tokens=100, temperature=0) as stream:
        assert stream.get_final_response().output_text == made.output_text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"input": []}, "input"),
        ({"input": [{"content": "x"}]}, "input"),
    ],
    ids=str,
)
def test_what_has_no_effect_is_refused(server: Served, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": "hi", **body}, timeout=30)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    with pytest.raises(openai.NotFoundError), OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        client.responses.create(model="other", input="x")
