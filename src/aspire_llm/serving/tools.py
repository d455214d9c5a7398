"""Tool calls in a model's text: how they are asked for, and how they are read back while the text is still coming.

Parsers hold back what may still become part of a call and hand out each call whole, so that what comes out, put together,
does not depend on how the text was cut. A call that is not well-formed is text: nothing is ever lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from aspire_llm.errors import UserError
from aspire_llm.request import StructuredOutputsParams
from aspire_llm.serving.protocol import ChatRequest, NamedToolChoice, Tool

Format = Literal["hermes", "llama3_json"]
# how models are taught to write calls; left free, a weak one may write blanks without end
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
BETWEEN = " \n\t\r;"  # calls of Llama


@dataclass(frozen=True, slots=True)
class Call:
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


Event = str | Call  # text for the reader, or a call


class ToolParser(Protocol):
    def push(self, text: str) -> list[Event]:
        """What a further piece of text has made certain."""
        ...

    def finish(self) -> list[Event]:
        """The text has ended."""
        ...


def find_format(template: str) -> Format | None:
    """How a model writes calls, as far as its chat template shows."""
    if "<tool_call>" in template:
        return "hermes"
    if "python_tag" in template or ('"parameters"' in template and '"name"' in template):
        return "llama3_json"
    return None


def make_parser(form: Format, names: Collection[str]) -> ToolParser:
    return HermesParser() if form == "hermes" else LlamaParser(names)


class HermesParser:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, between and after text: Qwen, Hermes and many others."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held = ""  # not decided yet: blanks and a beginning of OPEN outside a call, all of it inside
        self._blanks = ""  # before the call that is open; they go with it unless it turns out to be text
        self._inside = self._called = False

    def push(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while True:
            if self._inside:
                start = max(0, len(self._held) - len(text) - len(self.CLOSE))  # the rest has been searched before
                end = self._held.find(self.CLOSE, start)
                if end < 0:
                    return events
                events += self._read(self._held[:end], closed=True)
                self._held = self._held[end + len(self.CLOSE) :]
                self._inside = False
                text = self._held
            else:
                before, opened, after = self._held.partition(self.OPEN)
                if opened:
                    said = before.rstrip()
                    self._blanks = before[len(said) :]
                    if said:
                        events.append(said)
                    self._held, self._inside, text = after, True, after
                    continue
                certain = self._certain(before)
                if certain:
                    events.append(self._held[:certain])
                    self._held = self._held[certain:]
                return events

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._inside:
            return self._read(held, closed=False)
        return [held] if held.strip() or (held and not self._called) else []

    def _certain(self, text: str) -> int:
        """How many characters can be no part of a call: all but a beginning of OPEN at the end, and blanks before it."""
        end = len(text)
        for size in range(min(len(self.OPEN) - 1, len(text)), 0, -1):
            if text.endswith(self.OPEN[:size]):
                end = len(text) - size
                break
        return len(text[:end].rstrip())

    def _read(self, body: str, *, closed: bool) -> list[Event]:
        call = _as_call(_parse(body), "arguments")
        if call is not None:
            self._called = True
            return [call]
        return [self._blanks + self.OPEN + body + (self.CLOSE if closed else "")]


class LlamaParser:
    """The whole text is `{"name": …, "parameters": {…}}`, or several of these with semicolons between: Llama 3."""

    TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        self._names = names  # any JSON might be an answer: it is a call if it names one of the tools
        self._held = ""
        self._is_text = self._called = False
        self._decoder = json.JSONDecoder(parse_constant=_refuse)

    def push(self, text: str) -> list[Event]:
        if self._is_text:
            return [text] if text else []
        self._held += text
        return self._calls() if "}" in text else self._text_so_far()

    def finish(self) -> list[Event]:
        events = self._calls()
        held, self._held = self._held, ""
        rest = held.lstrip(BETWEEN) if self._called else held
        return [*events, rest] if rest else events

    def _text_so_far(self) -> list[Event]:
        """What cannot be the beginning of a call."""
        body = self._body()
        if not body or body.startswith("{") or self.TAG.startswith(body):
            return []
        return self._all_text()

    def _calls(self) -> list[Event]:
        events: list[Event] = []
        while (body := self._body()).startswith("{"):
            try:
                value, end = self._decoder.raw_decode(body)
            except (ValueError, RecursionError):  # not complete yet, or no JSON
                return events
            call = _as_call(value, "parameters") or _as_call(value, "arguments")
            if call is None or call.name not in self._names:
                return events + self._all_text()
            events.append(call)
            self._called = True
            self._held = body[end:]
        return events + self._text_so_far()

    def _body(self) -> str:
        held = self._held.lstrip(BETWEEN) if self._called else self._held.lstrip()
        return held.removeprefix(self.TAG).lstrip()

    def _all_text(self) -> list[Event]:
        self._is_text = True
        held, self._held = self._held, ""
        return [held.lstrip(BETWEEN) if self._called else held]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _as_call(value: Any, arguments: str) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    given = value.get(arguments)
    if isinstance(given, str):  # some models write the arguments as a string of JSON
        given = _parse(given)
    return Call(value["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None


class ToolCalls:
    """The tools of one chat request: what its template is given, what the output is held to, how it is read."""

    def __init__(self, request: ChatRequest, form: Format | None, template: str) -> None:
        """Raises UserError where the model has no way to call tools."""
        choice = request.tool_choice if request.tool_choice is not None else "auto"
        self._tools: list[Tool] = [] if choice == "none" else list(request.tools or ())
        self._most = None if request.parallel_tool_calls else 1
        self._form = form
        self._choice = choice
        if not self._tools:
            return
        if not re.search(r"\btools\b", template):
            raise UserError("tools: this model's chat template has no place for tools", "tools")
        if form is None:
            raise UserError(
                "tools: set tool_call_parser; the chat template does not show how calls are written", "tools"
            )

    @property
    def wanted(self) -> bool:
        return bool(self._tools)

    def for_template(self) -> list[dict[str, Any]] | None:
        return [tool.model_dump(exclude_none=True) for tool in self._tools] or None

    def parser(self) -> ToolParser | None:
        """A parser for one continuation; None where no call can come."""
        if not self._tools or self._form is None:
            return None
        parser = make_parser(self._form, [tool.function.name for tool in self._tools])
        return Limited(parser, self._most) if self._most is not None else parser

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """What holds the output to a call, where one is required."""
        if not self._tools or self._choice in ("auto", "none"):
            return None
        chosen = self._tools
        if isinstance(self._choice, NamedToolChoice):
            chosen = [tool for tool in self._tools if tool.function.name == self._choice.function.name]
        key = "arguments" if self._form == "hermes" else "parameters"
        schema: dict[str, Any] = {"anyOf": [_call_schema(tool, key) for tool in chosen], "x-guidance": SPACING}
        if self._form == "llama3_json":
            return StructuredOutputsParams(json=schema, disable_any_whitespace=True)
        more = "" if self._most == 1 or isinstance(self._choice, NamedToolChoice) else ' ("\\n" call)*'
        opening, closing = f'"{HermesParser.OPEN}\\n"', f'"\\n{HermesParser.CLOSE}"'
        lark = f"start: call{more}\ncall: {opening} body {closing}\nbody: %json {json.dumps(schema)}\n"
        return StructuredOutputsParams(grammar=lark)


def _call_schema(tool: Tool, arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            arguments: tool.function.parameters or {"type": "object"},
        },
        "required": ["name", arguments],
        "additionalProperties": False,
    }


class Limited:
    """At most so many calls (parallel_tool_calls = false); further ones are dropped."""

    def __init__(self, parser: ToolParser, most: int) -> None:
        self._parser = parser
        self._left = most

    def push(self, text: str) -> list[Event]:
        return self._kept(self._parser.push(text))

    def finish(self) -> list[Event]:
        return self._kept(self._parser.finish())

    def _kept(self, events: Sequence[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            if isinstance(event, Call):
                if not self._left:
                    continue
                self._left -= 1
            kept.append(event)
        return kept
