"""Where a request ends: the same place, with the same text, however many tokens come at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aspire_llm.engine.text import StopAwareText
from aspire_llm.request import Request, SamplingParams
from aspire_llm.sampling.detokenize import TokenBytes
from aspire_llm.scheduler.stopping import Stop, extend_output


def table() -> TokenBytes:
    """A token for every byte, so that characters of several bytes come in pieces; before them two special ones."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: 2 + i for i, character in enumerate(bytes_)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<special>"])
    return TokenBytes(tokenizer)


TABLE = table()
NAMED = {TABLE[token]: token for token in range(TABLE.size)}
LETTERS = [NAMED[bytes([byte])] for byte in "aé€b".encode()]  # some of them are parts of a character
ENDS, MARK = NAMED[b"<eos>"], NAMED[b"<special>"]


def request(params: SamplingParams) -> Request:
    made = Request(
        request_id="0", key=0, prompt_token_ids=[2], params=params, seed=0, arrival=0.0,
        eos_token_ids=frozenset({ENDS}), stream=StopAwareText(TABLE, params),
    )  # fmt: skip
    made.output_limit = params.max_tokens
    return made


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([*LETTERS, *LETTERS, MARK, ENDS]), min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 9), min_size=30, max_size=30),
    stop=st.sampled_from([(), (), ("ab",), ("é", "bb")]),
    stop_token_ids=st.sampled_from([(), (), (LETTERS[0],), (MARK, LETTERS[-1])]),
    ignore_eos=st.booleans(),
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.integers(0, 5),
    max_tokens=st.integers(5, 30),
    read=st.booleans(),
)
def test_a_request_ends_at_the_same_place_however_its_tokens_come(
    tokens: list[int],
    cuts: list[int],
    stop: tuple[str, ...],
    stop_token_ids: tuple[int, ...],
    ignore_eos: bool,
    include: bool,
    skip: bool,
    min_tokens: int,
    max_tokens: int,
    read: bool,
) -> None:
    params = SamplingParams(
        max_tokens=max_tokens, min_tokens=min_tokens, stop=stop, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos,
        include_stop_str_in_output=include, skip_special_tokens=skip,
    )  # fmt: skip
    one_by_one, together = request(params), request(params)
    ended: Stop | None = None
    for token in tokens:
        kept, ended = extend_output(one_by_one, [token])
        assert kept == 1
        if ended is not None:
            break
    at, came, told = 0, None, ""
    for cut in cuts:
        part = tuple(tokens[at : at + cut])
        kept, came = extend_output(together, part)
        at += cut
        assert kept == len(part) or came is not None
        assert together.stream is not None
        if read:
            told += together.stream.new_text()
        if came is not None or at >= len(tokens):
            break
    assert together.output_token_ids == one_by_one.output_token_ids
    assert came == ended
    assert one_by_one.stream is not None
    one_by_one.stream.finish()
    together.stream.finish()
    assert together.stream.text == one_by_one.stream.text
    assert told + together.stream.new_text() == together.stream.text


def test_text_is_what_its_bytes_are() -> None:
    params = SamplingParams(max_tokens=99)
    one = request(params)
    extend_output(one, [*LETTERS, MARK, *LETTERS[:3]])
    assert one.stream is not None
    assert one.stream.text == "aé€baé"
    extend_output(one, LETTERS[3:4])
    assert one.stream.text == "aé€baé"  # half of a character
    one.stream.finish()
    assert one.stream.text == "aé€baé�"
