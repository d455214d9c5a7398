"""Structured output: which tokens a grammar allows next, at every drafted and verified position.

llguidance rather than xgrammar: it computes masks lazily, so a new schema costs milliseconds instead of a compilation over
the vocabulary, and its matcher checks tokens without consuming them and rolls back any number; both can roll back.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from aspire_llm.errors import UserError
from aspire_llm.request import StructuredOutputsParams
from aspire_llm.sampling.detokenize import TokenBytes

_MAX_CACHED = 256  # compiled grammars kept


class Grammars:
    """Compiles grammars for one tokenizer. The first use takes about a second; share it.

    tokenizer: a fast transformers tokenizer or a tokenizers.Tokenizer; vocab_size: of the model (its padding is never
    allowed); eos_token_ids: what ends a finished output. The first use raises UserError without the extra `structured`.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._compiled: dict[str, Any] = {}
        self._lock = threading.Lock()  # requests are validated on other threads than the engine's

    @cached_property
    def _library(self) -> Any:
        try:
            import llguidance
        except ImportError:
            raise UserError(
                "structured_outputs needs llguidance: install the extra, pip install 'aspire-llm[structured]'",
                "structured_outputs",
            ) from None
        return llguidance

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        if not self._eos:
            raise UserError("structured_outputs needs a model with an end-of-text token", "structured_outputs")
        return _Vocabulary(TokenBytes(self._source), self._vocab_size, self._eos[0])

    @cached_property
    def _tokenizer(self) -> Any:
        return self._library.LLTokenizer(self._library.TokenizerWrapper(self._vocabulary), eos_token=self._eos)

    def matcher(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """A matcher at the beginning of an output. Raises UserError saying what is wrong with the grammar."""
        with self._lock:
            return self._matcher(params)

    def _matcher(self, params: StructuredOutputsParams) -> GrammarMatcher:
        kind, grammar = self._translate(params)
        start = self._compiled.get(grammar)
        if start is None:
            start = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
            if start.is_error():
                raise _wrong(kind, start.get_error())
            while len(self._compiled) >= _MAX_CACHED:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[grammar] = start
        return GrammarMatcher(start.deep_copy(), self._vocab_size, len(self._vocabulary.tokens), self._eos)

    def _translate(self, params: StructuredOutputsParams) -> tuple[str, str]:
        """The kind that was asked for, and llguidance's form of it."""
        matcher = self._library.LLMatcher
        options = {"whitespace_flexible": not params.disable_any_whitespace}
        if params.json_schema is not None or params.json_object:
            schema = params.json_schema if params.json_schema is not None else {"type": "object"}
            try:
                return "json", str(matcher.grammar_from_json_schema(schema, overrides=options))
            except (ValueError, TypeError) as error:
                raise _wrong("json", error) from None
        if params.regex is not None:
            return "regex", str(matcher.grammar_from_regex(params.regex))
        if params.choice is not None:
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice)
            return "choice", str(matcher.grammar_from_lark(f"start: {choices}"))
        try:
            return "grammar", str(self._library.grammar_from("grammar", params.grammar or ""))
        except ValueError as error:
            raise _wrong("grammar", error) from None


class _Vocabulary:
    """What llguidance asks of a tokenizer. It gets our bytes: its own reading takes the decoders that transformers makes
    from GGUF files (byte-level with byte fallback) for SentencePiece, and then no token has a blank."""

    bos_token_id = None

    def __init__(self, table: TokenBytes, vocab_size: int, eos_token_id: int) -> None:
        size = min(vocab_size, table.size)
        self.eos_token_id = eos_token_id
        self.tokens = [table[token_id] for token_id in range(size)]
        self.special_token_ids = [token_id for token_id in range(size) if table.is_special(token_id)]
        self._table = table

    def __call__(self, text: bytes | str) -> list[int]:
        return self._table.encode(text if isinstance(text, str) else text.decode(errors="replace"))


class GrammarMatcher:
    """Where one request's output stands in its grammar. It follows whatever prefix it is asked about."""

    def __init__(self, matcher: Any, vocab_size: int, known: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._known = known  # token ids from here on are the model's padding
        self._eos = list(eos_token_ids)
        self._consumed: list[int] = []

    def allowed(self, output_token_ids: Sequence[int], drafts: Sequence[int] = ()) -> Tensor:
        """bool [1 + drafts, vocabulary]: which tokens may follow the output, and the output with each further draft.

        After a draft that the grammar forbids, and after the end of the text, only the end of text is allowed.
        """
        masks = torch.zeros(1 + len(drafts), self._vocab_size, dtype=torch.bool)
        tokens = [*output_token_ids, *drafts]
        for i in range(1 + len(drafts)):
            if self._advance(tokens[: len(output_token_ids) + i]) and not self._matcher.is_stopped():
                bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
                unpacked = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
                known = min(self._known, unpacked.numel())
                masks[i, :known] = unpacked.flatten()[:known].bool()
            else:
                masks[i:, self._eos] = True
                break
        return masks

    def _advance(self, tokens: Sequence[int]) -> bool:
        """Roll back what differs from these tokens and consume the rest. False if the grammar forbids them."""
        common = 0
        for ours, theirs in zip(self._consumed, tokens, strict=False):
            if ours != theirs:
                break
            common += 1
        if (surplus := len(self._consumed) - common) > 0:
            if not self._matcher.rollback(surplus):
                raise RuntimeError(f"the grammar could not be rolled back: {self._matcher.get_error()}")
            del self._consumed[common:]
        rest = list(tokens[common:])
        taken = 0 if not rest or self._matcher.is_stopped() else self._matcher.try_consume_tokens(rest)
        self._consumed += rest[:taken]
        return bool(taken == len(rest))


def _wrong(kind: str, error: object) -> UserError:
    message = " ".join(str(error).split())
    return UserError(f"structured_outputs.{kind} cannot be used: {message}", "structured_outputs")
