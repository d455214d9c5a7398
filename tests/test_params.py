"""SamplingParams: vLLM's names and defaults; wrong values are refused in one line that names parameter, value and range."""

from __future__ import annotations

import pytest

from aspire_llm.errors import UserError
from aspire_llm.request import SamplingParams, StructuredOutputsParams

WRONG = [
    ("n", 0, "[1, inf)"),
    ("temperature", -0.5, "[0.0, inf)"),
    ("temperature", float("nan"), "finite"),
    ("temperature", float("inf"), "finite"),
    ("temperature", "hot", "number"),
    ("top_p", 0.0, "(0.0, 1.0]"),
    ("top_p", 1.5, "(0.0, 1.0]"),
    ("top_k", -2, "[-1, inf)"),
    ("top_k", 1.5, "integer"),
    ("min_p", 1.01, "[0.0, 1.0]"),
    ("seed", 2**63, "[-9223372036854775808, 9223372036854775807]"),
    ("max_tokens", 0, "[1, inf)"),
    ("min_tokens", -1, "[0, inf)"),
    ("stop", "", "not empty"),
    ("stop_token_ids", [-1], "greater than or equal to 0"),
    ("logprobs", -2, "[-1, inf)"),
    ("prompt_logprobs", -2, "[-1, inf)"),
    ("presence_penalty", 2.1, "[-2.0, 2.0]"),
    ("frequency_penalty", -2.1, "[-2.0, 2.0]"),
    ("repetition_penalty", 0.0, "(0.0, inf)"),
    ("logit_bias", {3: 101.0}, "[-100, 100]"),
    ("logit_bias", {"x": 1.0}, "integer"),
    ("bad_words", [""], "not empty"),
    ("allowed_token_ids", [], "not empty"),
    ("logits_processors", [3], "callable"),
    ("structured_outputs", {"json": "{}", "regex": "a"}, "exactly one"),
    ("structured_outputs", {}, "exactly one"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_wrong_values_name_parameter_value_and_range(name: str, value: object, allowed: str) -> None:
    with pytest.raises(UserError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert caught.value.parameter == name
    assert name in message
    assert allowed in message
    assert "\n" not in message
    if isinstance(value, int | float | str) and value != "":
        assert str(value) in message


def test_unknown_parameters_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'temprature'.*temperature.*top_p"):
        SamplingParams(temprature=1.0)
    with pytest.raises(UserError, match=r"'backtracking'.*regex"):
        StructuredOutputsParams(regex="a", backtracking=True)


def test_parameters_that_contradict() -> None:
    with pytest.raises(UserError, match=r"min_tokens = 9.*max_tokens \(4\)"):
        SamplingParams(min_tokens=9, max_tokens=4)
    with pytest.raises(UserError, match=r"n = 2.*temperature 0"):
        SamplingParams(n=2, temperature=0)


def test_defaults_and_none_are_those_of_vllm() -> None:
    names = [
        "seed", "stop", "stop_token_ids", "logprobs", "logit_bias", "bad_words", "allowed_token_ids", "top_p", "top_k",
        "structured_outputs", "logits_processors",
    ]  # fmt: skip
    params = SamplingParams(**dict.fromkeys(names))
    assert params == SamplingParams()
    assert (params.temperature, params.max_tokens, params.top_p, params.n, params.draft) == (1.0, 16, 1.0, 1, True)
    assert SamplingParams(max_tokens=None).max_tokens > 10**9
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.01).greedy


def test_forms_that_users_pass() -> None:
    params = SamplingParams(stop="END", bad_words=["x", "y"], logit_bias={"12": 3}, stop_token_ids=[4, 5])
    assert params.stop == ("END",)
    assert params.bad_words == ("x", "y")
    assert params.logit_bias == {12: 3.0}
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    nested = SamplingParams(structured_outputs={"json": {"type": "object"}})
    assert nested.structured_outputs == StructuredOutputsParams(json={"type": "object"})


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        SamplingParams().temperature = 0.5  # type: ignore[misc]
