"""Structured output: always valid, the same with and without drafts, rolled back with rejected drafts."""

from __future__ import annotations

import builtins
import json
import re

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from aspire_llm.errors import UserError
from aspire_llm.request import SamplingParams, StructuredOutputsParams
from aspire_llm.sampling.detokenize import IncrementalDetokenizer, TokenBytes
from aspire_llm.sampling.sampler import Sampler
from aspire_llm.sampling.structured import Grammars
from sampling_chain import Chain
from test_detokenize import byte_level

pytest.importorskip("llguidance")

PADDING = 7  # entries of the model's vocabulary that the tokenizer lacks
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
CASES = {
    "json": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "json text": StructuredOutputsParams(json=json.dumps(SCHEMA), disable_any_whitespace=True),
    "regex": StructuredOutputsParams(regex=r"[a-c]{2,5}-(é|日本)\d"),
    "choice": StructuredOutputsParams(choice=['say "yes"', "no\n", "naïve 🎉"]),
    "lark": StructuredOutputsParams(grammar='start: "(" inner ")"\ninner: /[xy]{1,3}/ | "(" inner ")"\n'),
    "gbnf": StructuredOutputsParams(grammar='root ::= "a" ("b" | "c") "d"?\n'),
}


def valid(case: str, text: str) -> bool:
    if case.startswith("json"):
        value = json.loads(text)
        return set(value) == {"ok", "n"} and isinstance(value["ok"], bool) and 0 <= value["n"] <= 99
    if case == "choice":
        return text in ['say "yes"', "no\n", "naïve 🎉"]
    if case == "lark":
        while text.startswith("((") and text.endswith("))"):
            text = text[1:-1]
        return re.fullmatch(r"\([xy]{1,3}\)", text) is not None
    return re.fullmatch({"regex": r"[a-c]{2,5}-(é|日本)\d", "gbnf": r"a[bc]d?"}[case], text) is not None


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def eos(tokenizer: Tokenizer) -> int:
    return int(tokenizer.token_to_id("<|end|>"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer, eos: int) -> Grammars:
    return Grammars(tokenizer, tokenizer.get_vocab_size() + PADDING, {eos})


def generate(
    grammars: Grammars, tokenizer: Tokenizer, eos: int, case: str, mode: str, drafts: int, temperature: float = 1.0
):
    """Texts of 8 requests of a model that knows nothing of the grammar but likes to end."""
    vocabulary = tokenizer.get_vocab_size() + PADDING
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(vocabulary, vocabulary, generator=generator) * 2
    target[:, eos] += 4
    draft = target + torch.randn(vocabulary, vocabulary, generator=generator)
    sampler = Sampler(8, vocabulary, "cpu", mode, grammars=grammars)
    for slot in range(8):
        params = SamplingParams(temperature=temperature, structured_outputs=CASES[case] if slot else None)
        sampler.admit(slot, params, slot, [1], [eos])

    def script(chain: Chain, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Some drafts are overwritten by others, most of them forbidden."""
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            if (slot + position) % 5 == 0:
                chain.history[slot, position] = (slot * 31 + position * 17) % vocabulary

    chain = Chain(
        sampler, target, draft, [[1]] * 8, num_tokens=60, draft_lengths=np.full(8, drafts), block=10**9,
        script=script if mode != "rejection" else None,
    )  # fmt: skip
    tokens = chain.run()
    assert chain.errors == {}
    table = TokenBytes(tokenizer)
    texts = []
    for request in range(1, 8):
        ids = tokens[request].tolist()
        ids = ids[: ids.index(eos)]
        stream = IncrementalDetokenizer(table)
        texts.append("".join([*(stream.push(token) for token in ids), stream.flush()]))
    return texts, tokens, chain


@pytest.mark.parametrize("case", CASES)
def test_valid_and_the_same_with_drafts(grammars: Grammars, tokenizer: Tokenizer, eos: int, case: str) -> None:
    plain, plain_tokens, _ = generate(grammars, tokenizer, eos, case, "coupled", 0)
    assert all(valid(case, text) for text in plain), plain
    assert len(set(plain)) > 1
    for mode in ("coupled", "greedy"):
        _, tokens, chain = generate(grammars, tokenizer, eos, case, mode, 4)
        assert torch.equal(plain_tokens, tokens)
        assert 0 < chain.accepted < chain.drafted
    texts, _, chain = generate(grammars, tokenizer, eos, case, "rejection", 4)
    assert all(valid(case, text) for text in texts), texts
    assert 0 < chain.accepted < chain.drafted


def test_greedy_requests_too(grammars: Grammars, tokenizer: Tokenizer, eos: int) -> None:
    plain, tokens, _ = generate(grammars, tokenizer, eos, "regex", "coupled", 0, temperature=0.0)
    assert all(valid("regex", text) for text in plain)
    assert torch.equal(tokens, generate(grammars, tokenizer, eos, "regex", "coupled", 5, temperature=0.0)[1])


def test_any_prefix_can_follow_any_other(grammars: Grammars, tokenizer: Tokenizer, eos: int) -> None:
    """Masks depend on the prefix alone, not on what the matcher was asked before."""
    chance = np.random.default_rng(0)
    walked = grammars.matcher(CASES["regex"])
    texts = ["abc-é7", "ab-日本1", "cabb", "zz", "abc-x", ""]
    for _ in range(60):
        ids = tokenizer.encode(texts[chance.integers(len(texts))], add_special_tokens=False).ids
        ids += [eos] * int(chance.integers(3))
        cut = int(chance.integers(len(ids) + 1))
        fresh = grammars.matcher(CASES["regex"]).allowed(ids[:cut], ids[cut:])
        assert torch.equal(walked.allowed(ids[:cut], ids[cut:]), fresh)
        for i in range(len(ids) - cut + 1):
            one = grammars.matcher(CASES["regex"]).allowed(ids[: cut + i])
            assert torch.equal(one[0], fresh[i])


def test_masks_never_allow_padding_and_end_only_with_the_end(
    grammars: Grammars, tokenizer: Tokenizer, eos: int
) -> None:
    matcher = grammars.matcher(StructuredOutputsParams(json_object=True))
    assert not matcher.allowed([])[0, -PADDING:].any()
    finished = matcher.allowed([*tokenizer.encode("{}", add_special_tokens=False).ids, eos])
    assert finished[0].nonzero().flatten().tolist() == [eos]


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"regex": "(ab"}, "structured_outputs.regex.*unclosed group"),
        ({"json": '{"type":'}, "structured_outputs.json.*EOF"),
        ({"json": {"type": "colour"}}, "structured_outputs.json.*colour"),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar.*nothing"),
    ],
)
def test_grammars_that_do_not_compile(grammars: Grammars, params: dict, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        grammars.matcher(StructuredOutputsParams(**params))
    assert "\n" not in str(caught.value)


def test_without_the_library_the_extra_is_named(
    tokenizer: Tokenizer, eos: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *args, **kwargs):
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r"aspire-llm\[structured\]"):
        Grammars(tokenizer, 500, {eos}).matcher(CASES["regex"])


def test_an_engine_without_grammars_refuses() -> None:
    with pytest.raises(UserError, match="structured_outputs"):
        Sampler(1, 8).validate(SamplingParams(structured_outputs={"regex": "a"}))


@pytest.mark.model
def test_smollm2_allows_blanks() -> None:
    """llguidance's own reading of a tokenizer made from GGUF lost every blank."""
    from aspire_llm.models.load import load_tokenizer

    loaded = load_tokenizer("smollm2-135m")
    matcher = Grammars(loaded.tokenizer, 49152, loaded.eos_token_ids).matcher(StructuredOutputsParams(json=SCHEMA))
    text = '{"ok": true, "n": 7}'
    ids = loaded.tokenizer.encode(text, add_special_tokens=False)
    allowed = matcher.allowed([], ids)
    assert all(bool(allowed[i, token]) for i, token in enumerate(ids))
    assert allowed[-1].nonzero().flatten().tolist() == sorted(loaded.eos_token_ids)
