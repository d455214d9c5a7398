"""The text of one request: detokenised as tokens come, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from aspire_llm.request import SamplingParams
from aspire_llm.sampling.detokenize import IncrementalDetokenizer, StopStrings, TokenBytes


class StopAwareText:
    """Implements `request.TextStream` over an incremental detokeniser and a matcher of stop strings.

    Without stop strings nobody needs the text before it is read, so tokens wait until then and are decoded together.
    """

    def __init__(self, table: TokenBytes, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(table, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._waiting: list[int] = []  # tokens not decoded yet
        self.seeks_stops = bool(params.stop)
        self._include_stop_token = params.include_stop_str_in_output
        self._parts: list[str] = []
        self._text: str | None = ""
        self._new: list[str] = []

    @property
    def text(self) -> str:
        self._decode()
        if self._text is None:
            self._text = "".join(self._parts)
            self._parts = [self._text]  # read after every step: joined once
        return self._text

    def new_text(self) -> str:
        self._decode()
        new = "".join(self._new)
        self._new.clear()
        return new

    def extend(self, token_ids: Sequence[int]) -> None:
        self._waiting.extend(token_ids)

    def push(self, token_id: int, *, ends: bool, may_stop: bool) -> str | None:
        self._decode()
        if ends and not self._include_stop_token:
            return None
        self._emit(self._stops.push(self._detokenizer.push(token_id), armed=may_stop))
        return self._stops.matched

    def finish(self) -> None:
        self._decode()
        if self._stops.matched is None:
            self._emit(self._stops.push(self._detokenizer.flush(), armed=False))
            self._emit(self._stops.flush())

    def _decode(self) -> None:
        if self._waiting:
            self._emit(self._detokenizer.extend(self._waiting))
            self._waiting.clear()

    def _emit(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._new.append(text)
            self._text = None
