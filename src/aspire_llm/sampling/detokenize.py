"""Text from tokens, one at a time: no broken characters, and the same text however the tokens arrive.

Every token stands for fixed bytes; the text of a request is the UTF-8 decoding of its tokens' bytes. The only state is an
unfinished character, so nothing depends on how many tokens come at once. (tokenizers' DecodeStream re-decodes a window
instead: it raises on some byte-fallback sequences, withholds a lone U+FFFD, and has no flush.)
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from typing import Any

from aspire_llm.errors import UserError


class TokenBytes:
    """The bytes that each token adds to a text. One for each tokenizer, shared by its requests.

    tokenizer: a fast transformers tokenizer or a tokenizers.Tokenizer: byte-level BPE (Llama 3, Qwen, SmolLM, …),
    SentencePiece with byte fallback (Llama 2, Mistral, …), or another whose tokens decode one by one.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(backend, "to_str") or not hasattr(backend, "id_to_token"):
            raise UserError(f"tokenizer of type {type(tokenizer).__name__}: must be a fast (tokenizers) tokenizer")
        self._backend = backend
        kinds = set(_decoder_kinds(json.loads(backend.to_str())["decoder"]))
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._alphabet = byte_level_alphabet()
        self._added = {
            index: (token.content, token.special) for index, token in backend.get_added_tokens_decoder().items()
        }
        self._anchor = self._find_anchor()
        self._cache: dict[int, bytes] = {}

    @property
    def size(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens around it."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._added and bool(self._added[token_id][1])

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token; none for ids beyond the tokenizer's (a padded vocabulary)."""
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._bytes(token_id)
        return found

    def _bytes(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return str(self._added[token_id][0]).encode()
        if self._byte_level:
            if all(character in self._alphabet for character in piece):
                return bytes(self._alphabet[character] for character in piece)
            return str(piece).encode()
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        # After another token, so that rules for the beginning of a text (a stripped blank) do not apply.
        before = self._backend.decode([self._anchor], skip_special_tokens=False)
        both = self._backend.decode([self._anchor, token_id], skip_special_tokens=False)
        return str(both).removeprefix(before).encode()

    def _find_anchor(self) -> int:
        """A token that decodes to ordinary text."""
        for token_id in range(self._backend.get_vocab_size()):
            if token_id not in self._added and self._backend.decode([token_id]).strip("\ufffd \n"):
                return token_id
        return 0


def _decoder_kinds(decoder: dict[str, Any] | None) -> Iterable[str]:
    if decoder is None:
        return
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _decoder_kinds(part)


def byte_level_alphabet() -> dict[str, int]:
    """character -> byte of GPT-2's byte-level BPE: printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(shifted)}


class IncrementalDetokenizer:
    """The text of one request: what `push` and `flush` return, joined. Implements request.Detokenizer.

    The text continues the prompt, so a leading blank of the first token is kept (as in vLLM).
    """

    def __init__(self, table: TokenBytes, skip_special_tokens: bool = True) -> None:
        self._table = table
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is certain now; bytes of an unfinished character are held back."""
        if self._skip_special and self._table.is_special(token_id):
            return ""
        return self._decoder.decode(self._table[token_id])

    def extend(self, token_ids: Iterable[int]) -> str:
        """As `push` of one after the other."""
        table = self._table
        shown = [t for t in token_ids if not table.is_special(t)] if self._skip_special else token_ids
        return self._decoder.decode(b"".join([table[t] for t in shown]))

    def flush(self) -> str:
        """The rest, at the end of the request: U+FFFD for a character that was never finished."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the earliest stop string in a text that comes in pieces, and withholds what may still become one.

    Earliest: the one whose last character comes first; of several that end there, the longest. So the result does not
    depend on how the text is cut. With `include` the stop string stays in the text; else the text ends before it.
    """

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include
        self._reach = max((len(stop) for stop in self._stops), default=1) - 1  # how far back a match may begin
        self._seen = ""  # the last characters pushed
        self._held = 0  # how many of them are not released
        self.matched: str | None = None

    def push(self, delta: str, armed: bool = True) -> str:
        """Text that may be released, up to the stop string once one is found (then `matched` is set; nothing follows).

        armed=False: a stop string that ends in this delta does not count (min_tokens not reached).
        """
        if self.matched is not None:
            return ""
        text = self._seen + delta
        released = len(self._seen) - self._held
        if armed and (found := self._find(text, len(self._seen))):
            begin, end, self.matched = found
            self._held = 0
            return text[released : end if self._include else begin]
        self._held = 0 if self._include else self._possible(text[released:])
        safe = text[released : len(text) - self._held]
        self._seen = text[max(0, len(text) - self._reach) :] if self._reach else ""
        return safe

    def flush(self) -> str:
        """What was withheld, at the end of a text in which no stop string was found."""
        rest = self._seen[len(self._seen) - self._held :] if self._held else ""
        self._held = 0
        return rest

    def _find(self, text: str, fresh: int) -> tuple[int, int, str] | None:
        """(begin, end, stop) of the earliest match that ends after character `fresh`."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            begin = text.find(stop, max(0, fresh - len(stop) + 1))
            if begin >= 0 and (best is None or (begin + len(stop), begin) < (best[1], best[0])):
                best = (begin, begin + len(stop), stop)
        return best

    def _possible(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        for length in range(min(len(text), self._reach), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) and len(stop) > length for stop in self._stops):
                return length
        return 0
