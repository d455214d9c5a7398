"""Text from tokens: deltas join to the final text whatever the chunks; no broken characters; stop strings."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from aspire_llm.errors import UserError
from aspire_llm.sampling.detokenize import IncrementalDetokenizer, StopStrings, TokenBytes

TEXTS = [
    "Hello, world! It's 3.14 o'clock.\n\n\tTabs  and   blanks ",
    "Grüße aus Köln, naïve façade — “quoted” …",
    "日本語のテキストと中文字符，한국어도 있습니다。",
    "Привет мир, γειά σου κόσμε, שלום עולם, مرحبا بالعالم, नमस्ते दुनिया, สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flags 🇯🇵🇩🇪 and 🤷🏽‍♀️ done 🎉",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ∑∫√ e\u0301 combining, \u200bzero width, literal \ufffd here\ufffd",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator(TEXTS[:3] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama 2's kind: words begin with ▁, characters outside the vocabulary are bytes."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁Hello",
        "▁world",
        "Hello",
        "w",
    ]
    pieces += sorted(set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!'") - set(pieces))
    merges = [("▁", "w")]
    pieces.append("▁w")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return byte_level() if request.param == "byte-level" else sentencepiece()


def deltas(table: TokenBytes, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    stream = IncrementalDetokenizer(table, skip_special_tokens)
    return [*(stream.push(token) for token in ids), stream.flush()]


def check(table: TokenBytes, tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = deltas(table, ids)
    whole = "".join(pieces)
    # The text continues a prompt, so a blank that SentencePiece's decoder strips from a beginning is kept.
    assert whole in (tokenizer.decode(ids), " " + tokenizer.decode(ids))
    assert whole.strip() == text.strip()
    for i, piece in enumerate(pieces):  # a prefix of the final text at every moment
        assert whole.startswith("".join(pieces[:i]) + piece)
    assert whole.count("\ufffd") == text.count("\ufffd")


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    check(TokenBytes(tokenizer), tokenizer, text)


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_any_text(text: str) -> None:
    check(TOKENIZER_TABLE, TOKENIZER, text)


TOKENIZER = byte_level()
TOKENIZER_TABLE = TokenBytes(TOKENIZER)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 5)))
def test_any_tokens_decode_as_the_tokenizer_does(ids: list[int]) -> None:
    """Also byte sequences that are no text."""
    assert "".join(deltas(TOKENIZER_TABLE, ids)) == TOKENIZER.decode([i for i in ids if TOKENIZER.id_to_token(i)])


def test_unfinished_characters_are_held_back_and_flushed() -> None:
    tokenizer = sentencepiece()
    table = TokenBytes(tokenizer)
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é🎉".encode()]
    assert deltas(table, ids) == ["", "é", "", "", "", "🎉", ""]
    assert deltas(table, ids[:-1])[-2:] == ["", "\ufffd"]
    assert deltas(table, [*ids[2:4], tokenizer.token_to_id("a")]) == ["", "", "\ufffda", ""]


def test_blanks_between_words_survive_special_tokens() -> None:
    tokenizer = sentencepiece()
    table = TokenBytes(tokenizer)
    hello, world, end = (tokenizer.token_to_id(piece) for piece in ("▁Hello", "▁world", "</s>"))
    assert "".join(deltas(table, [hello, end, world])) == " Hello world"
    assert "".join(deltas(table, [hello, end, world], skip_special_tokens=False)) == " Hello</s> world"
    assert table[10**6] == b""  # the model's padding


def test_added_tokens_that_are_not_special_stay() -> None:
    ids = [TOKENIZER.token_to_id("<think>"), TOKENIZER.token_to_id("<|end|>")]
    assert "".join(deltas(TOKENIZER_TABLE, ids)) == "<think>"
    assert "".join(deltas(TOKENIZER_TABLE, ids, skip_special_tokens=False)) == "<think><|end|>"


def test_tokenizers_of_other_kinds() -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    assert "".join(deltas(TokenBytes(words), [1, 2, 1])) == " one two one"
    with pytest.raises(UserError, match="object"):
        TokenBytes(object())


# ---- stop strings


def first_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The oracle: look at every end in turn."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def feed(stops: StopStrings, text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cuts), len(text)]
    return [*(stops.push(text[a:b]) for a, b in pairwise(edges)), stops.flush()]


@settings(max_examples=400, deadline=None)
@given(
    st.text("ab\n", max_size=14),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_earliest_stop_however_the_text_is_cut(
    text: str, stops: list[str], include: bool, chance: random.Random
) -> None:
    wanted, reason = first_stop(text, stops, include)
    for size in (1, 2, 3, 5, 99):
        cuts = list(range(size, len(text), size)) if size < 99 else [chance.randint(0, len(text)) for _ in range(4)]
        matcher = StopStrings(stops, include)
        assert "".join(feed(matcher, text, cuts)) == wanted
        assert matcher.matched == reason


def test_nothing_is_released_that_may_become_a_stop_string() -> None:
    matcher = StopStrings(["END", "\n\n"])
    assert [matcher.push(piece) for piece in ("a E", "N", "x\n", "b\n", "\nrest", "more")] == [
        "a ",
        "",
        "ENx",
        "\nb",
        "",
        "",
    ]
    assert matcher.matched == "\n\n"
    assert matcher.flush() == ""


def test_text_before_min_tokens_does_not_stop_but_may_begin_a_stop() -> None:
    matcher = StopStrings(["ab"])
    assert [matcher.push("ab a", armed=False), matcher.push("b!")] == ["ab ", ""]
    assert matcher.matched == "ab"


@pytest.mark.model
def test_smollm2_on_real_text_rechunked() -> None:
    from aspire_llm.models.load import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m").tokenizer
    table = TokenBytes(tokenizer)
    for text in [*TEXTS, " ".join(TEXTS)]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert whole == text
        pieces = deltas(table, ids)
        for k in range(1, 7):  # what a client sees when k tokens come at once
            chunks = ["".join(pieces[i : i + k]) for i in range(0, len(pieces), k)]
            assert "".join(chunks) == whole
            stopped = [StopStrings(["and", "的"]) for _ in range(2)]
            joined = "".join([*(stopped[0].push(chunk) for chunk in chunks), stopped[0].flush()])
            assert (joined, stopped[0].matched) == first_stop(whole, ["and", "的"], False)
