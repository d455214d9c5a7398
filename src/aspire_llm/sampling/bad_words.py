"""Bad words as token sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aspire_llm.errors import UserError


def bad_words_token_ids(words: Iterable[str], encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
    """The sequences to ban: each word as it begins a text and, where that is another single spelling, after a blank.

    encode: text to token ids without special tokens. The rule is vLLM's: the form with a blank is banned too if it begins
    with another token and is as long, so that "cat" bans "cat" and " cat" but a blank of its own is never banned.
    UserError for a word that has no tokens.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(encode(word.lstrip()))
        blank = tuple(encode(" " + word.lstrip()))
        if not bare:
            raise UserError(f"bad_words has {word!r}: must be text that has tokens", "bad_words")
        sequences.append(bare)
        if blank[0] != bare[0] and len(blank) == len(bare):
            sequences.append(blank)
    return tuple(dict.fromkeys(sequences))
