"""Tool calls: what is read does not depend on how the text was cut, nothing is lost, and what is required comes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire_llm.errors import UserError
from aspire_llm.serving.protocol import ChatRequest
from aspire_llm.serving.tools import Call, Event, Format, ToolCalls, ToolParser, find_format, make_parser

NAMES = ["get_weather", "add"]
WEATHER = '{"name": "get_weather", "arguments": {"city": "Graz"}}'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Graz"}}'
CALL = Call("get_weather", '{"city": "Graz"}')
ADD = Call("add", '{"a": 1, "b": [2, {"c": "}"}]}')


def read(parser: ToolParser, pieces: list[str]) -> list[Event]:
    """All events, neighbouring texts joined."""
    events: list[Event] = []
    for piece in [*pieces, None]:
        for event in parser.finish() if piece is None else parser.push(piece):
            if isinstance(event, str):
                assert event, "an empty text is no event"
            if events and isinstance(event, str) and isinstance(events[-1], str):
                events[-1] += event
            else:
                events.append(event)
    return events


def cuts(text: str, sizes: list[int]) -> list[str]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    return [*pieces, text[start:]]


HERMES_CASES: list[tuple[str, list[Event]]] = [
    ("", []),
    ("Hello, world. ", ["Hello, world. "]),
    (f"<tool_call>\n{WEATHER}\n</tool_call>", [CALL]),
    (f"Let me see.\n\n<tool_call>{WEATHER}</tool_call>\n", ["Let me see.", CALL]),
    (
        f'<tool_call>{WEATHER}</tool_call>\n<tool_call>{{"name": "add", "arguments": {ADD.arguments}}}</tool_call>',
        [CALL, ADD],
    ),
    (f"<tool_call>{WEATHER}</tool_call> done", [CALL, " done"]),
    (f"<tool_call>{WEATHER}", [CALL]),  # the end of the text closes it
    ("a < b and <tool_cal is no tag", ["a < b and <tool_cal is no tag"]),
    ("x <tool_call>not json</tool_call> y", ["x <tool_call>not json</tool_call> y"]),
    ('<tool_call>{"name": 3}', ['<tool_call>{"name": 3}']),
    (
        '<tool_call>{"name": "f", "arguments": NaN}</tool_call>',
        ['<tool_call>{"name": "f", "arguments": NaN}</tool_call>'],
    ),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("f", '{"a": 1}')]),
    ("<tool_call><tool_call></tool_call>", ["<tool_call><tool_call></tool_call>"]),
    ("<tool_call>" + "[" * 5000, ["<tool_call>" + "[" * 5000]),
    ("ends in <tool_ca", ["ends in <tool_ca"]),
]
LLAMA_CASES: list[tuple[str, list[Event]]] = [
    ("", []),
    ("Hello {world}.", ["Hello {world}."]),
    (LLAMA, [CALL]),
    (f"<|python_tag|>{LLAMA}", [CALL]),
    (f'  {LLAMA}; {{"name": "add", "parameters": {ADD.arguments}}}\n', [CALL, ADD]),
    (f"{LLAMA} and more", [CALL, "and more"]),
    ('{"name": "unknown", "parameters": {}}', ['{"name": "unknown", "parameters": {}}']),
    ('{"answer": {"x": 1}} tail', ['{"answer": {"x": 1}} tail']),
    ("{not json}", ["{not json}"]),
    ("<|python_", ["<|python_"]),
    ("{" * 3000, ["{" * 3000]),
]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [("hermes", *case) for case in HERMES_CASES] + [("llama3_json", *case) for case in LLAMA_CASES],
)
def test_calls_are_read(form: Format, text: str, expected: list[Event]) -> None:
    assert read(make_parser(form, NAMES), [text]) == expected
    for size in (1, 2, 3, 5, 7, 11):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        if len(text) < 1000 or size > 5:
            assert read(make_parser(form, NAMES), pieces) == expected, size


# What Qwen2.5-Coder-0.5B-Instruct wrote (greedy, its own template, tools get_weather and search_files): it leaves the tags out.
QWEN_BARE = '{"name": "get_weather", "arguments": {"city": "Graz", "unit": "celsius"}}'
QWEN_CALL = Call("get_weather", '{"city": "Graz", "unit": "celsius"}')
QWEN_FENCED = """```json
{
  "name": "search_files",
  "arguments": {
    "pattern": "def main\\\\(.*\\\\)",
    "folder": "/src"
  }
}
```"""


def test_recorded_outputs_of_a_small_qwen() -> None:
    """Without tags a call is text in Hermes' form, as it stands; Llama's form reads the bare one. A fenced one is text."""
    names = ["get_weather", "search_files"]
    for size in (1, 4, 1000):
        for form, text, expected in (
            ("hermes", QWEN_BARE, [QWEN_BARE]),
            ("llama3_json", QWEN_BARE, [QWEN_CALL]),
            ("hermes", QWEN_FENCED, [QWEN_FENCED]),
            ("llama3_json", QWEN_FENCED, [QWEN_FENCED]),
            (
                "hermes",
                f"<tool_call>\n{QWEN_BARE}\n</tool_call>",
                [Call("get_weather", QWEN_BARE[QWEN_BARE.index('{"city') : -1])],
            ),
        ):
            pieces = [text[i : i + size] for i in range(0, len(text), size)]
            assert read(make_parser(form, names), pieces) == expected, (form, text)  # type: ignore[arg-type]


TOKENS = [
    "<tool_call>",
    "</tool_call>",
    WEATHER,
    LLAMA,
    "<",
    "tool",
    " ",
    "\n",
    "{",
    "}",
    ";",
    "x",
    '"',
    "<|python_tag|>",
]


@given(
    st.sampled_from(["hermes", "llama3_json"]),
    st.lists(st.sampled_from(TOKENS) | st.text(max_size=5), max_size=8).map("".join),
    st.lists(st.integers(0, 9), max_size=60),
)
def test_the_cut_does_not_matter(form: Format, text: str, sizes: list[int]) -> None:
    whole = read(make_parser(form, NAMES), [text])
    assert read(make_parser(form, NAMES), cuts(text, sizes)) == whole
    if not any(isinstance(event, Call) for event in whole):
        assert "".join(map(str, whole)) == text  # nothing is lost


def request(**changes: object) -> ChatRequest:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    other = {"type": "function", "function": {"name": "add"}}
    return ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "?"}], "tools": [tool, other], **changes}
    )


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_a_required_call_is_a_grammar(form: Format) -> None:
    for choice in ("auto", "none"):
        assert ToolCalls(request(tool_choice=choice), form, "tools").structured_outputs() is None
    assert ToolCalls(request(tool_choice="none"), form, "tools").parser() is None
    required = ToolCalls(request(tool_choice="required"), form, "tools").structured_outputs()
    named = ToolCalls(
        request(tool_choice={"type": "function", "function": {"name": "add"}}), form, "tools"
    ).structured_outputs()
    assert required is not None
    assert named is not None
    assert "get_weather" in required.model_dump_json()
    assert "get_weather" not in named.model_dump_json()


def test_one_call_where_no_more_are_wanted() -> None:
    calls = ToolCalls(request(parallel_tool_calls=False), "hermes", "tools")
    parser = calls.parser()
    assert parser is not None
    assert read(parser, [f"<tool_call>{WEATHER}</tool_call>" * 3 + "end"]) == [CALL, "end"]


def test_models_without_tools_say_so() -> None:
    with pytest.raises(UserError, match="no place for tools"):
        ToolCalls(request(), "hermes", "{{ messages }}")
    with pytest.raises(UserError, match="tool_call_parser"):
        ToolCalls(request(), None, "{{ tools }}")


def test_formats_are_found() -> None:
    assert find_format("… <tool_call></tool_call> …") == "hermes"
    assert find_format('Respond in the format {"name": function name, "parameters": …}') == "llama3_json"
    assert find_format("{{ messages }}") is None
    assert json.loads(CALL.arguments) == {"city": "Graz"}
