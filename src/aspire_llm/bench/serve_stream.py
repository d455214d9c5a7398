"""A streamed answer of an OpenAI server: from bytes to what was said, and when."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

END = "[DONE]"
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal")  # of a chat chunk's delta


class EventDecoder:
    """Server-sent events out of bytes that are cut anywhere: the `data` of each event. Lines end at \\n, \\r or both, and at
    nothing else (a text may hold other separators)."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, more: bytes) -> list[str]:
        """Raises UnicodeDecodeError."""
        whole = self._rest + more
        # a \r at the very end may be half of a line's end
        held = b"\r" if whole.endswith(b"\r") else b""
        lines = whole.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode("utf-8"))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events


class StreamError(Exception):
    """What a stream says is no answer. kind: as in `Outcome`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(slots=True)
class Answer:
    """What has come so far. Times on the clock of `add`'s caller, in seconds."""

    text: str = ""
    text_times: list[float] = field(default_factory=list)  # of the chunks that had text
    finish_reason: str | None = None
    finished_at: float | None = None
    done: bool = False  # "[DONE]" has come
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    speculation: dict[str, Any] | None = None

    @property
    def complete(self) -> bool:
        return self.finish_reason is not None or self.done

    def add(self, data: str, now: float) -> None:
        """One event. Raises StreamError."""
        if data.strip() == END:
            self.done = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            raise StreamError("malformed", f"not JSON: {data[:80]!r}") from None
        if not isinstance(chunk, dict):
            raise StreamError("malformed", f"not an object: {data[:80]!r}")
        if chunk.get("error"):
            raise StreamError("error event", error_message(chunk))
        self._add_counts(chunk)
        choices = chunk.get("choices")
        if choices is not None and not isinstance(choices, list):
            raise StreamError("malformed", f"choices is no list: {data[:80]!r}")
        for choice in choices or []:
            if not isinstance(choice, dict):
                raise StreamError("malformed", f"a choice is no object: {data[:80]!r}")
            piece = text_of(choice)
            if piece:
                self.text += piece
                self.text_times.append(now)
            if isinstance(choice.get("finish_reason"), str):
                self.finish_reason = choice["finish_reason"]
                self.finished_at = now

    def _add_counts(self, chunk: Mapping[str, Any]) -> None:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
            self.completion_tokens = _count(usage.get("completion_tokens"), self.completion_tokens)
        metrics = chunk.get("metrics")
        if isinstance(metrics, dict) and isinstance(metrics.get("speculative_decoding"), dict):
            self.speculation = metrics["speculative_decoding"]


def text_of(choice: Mapping[str, Any]) -> str:
    """What a choice of a completion's or a chat's chunk says: text, reasoning, arguments of calls."""
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return ""
    said = [delta[name] for name in TEXT_FIELDS if isinstance(delta.get(name), str)]
    for call in delta.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            said += [function[name] for name in ("name", "arguments") if isinstance(function.get(name), str)]
    return "".join(said)


def error_message(body: Any) -> str:
    """Of OpenAI's error object, in a line."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:200]


def _count(value: object, before: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else before
