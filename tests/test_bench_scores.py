"""Scores as LongBench defines them, on cases worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire_llm.bench.scores import (
    SCORES,
    best_score,
    common_subsequence,
    contains,
    exact_match,
    f1,
    normalised,
    rouge_l,
    stated_answer,
)

WORDS = st.lists(st.sampled_from("abcde"), max_size=8)
TEXTS = st.lists(st.sampled_from(["one", "two", "three", "The", "a", "end.", "x,"]), max_size=12).map(" ".join)


def test_normalisation() -> None:
    assert normalised("  The cat's  hat, and a  Dog. An end!") == "cats hat and dog end"
    assert normalised("theatre") == "theatre"


@pytest.mark.parametrize(
    ("answer", "right", "points"),
    [
        ("The Cat.", "cat", 100.0),
        ("cat", "dog", 0.0),
        ("", "dog", 0.0),
        ("big cat", "cat", 2 / 3 * 100),  # precision 1/2, recall 1
        ("cat cat dog", "cat cat cat", 2 / 3 * 100),  # two in common of three each
    ],
)
def test_f1(answer: str, right: str, points: float) -> None:
    assert f1(answer, right) == pytest.approx(points)
    assert exact_match(answer, right) == (100.0 if points == 100.0 else 0.0)


@pytest.mark.parametrize(
    ("answer", "right", "points"),
    [
        ("police killed the gunman", "police kill the gunman", 75.0),  # three of four words each
        ("the gunman kill police", "police kill the gunman", 50.0),
        (
            "w1 w2 w6 w7. w1 w3 w8 w9 w5",
            "w1 w2 w3 w4 w5",
            100 * 2 * (4 / 8) * (4 / 5) / (4 / 8 + 4 / 5),
        ),  # Lin's union LCS
        ("a a a a", "a b", 2 / 3 * 100),  # different words count once: 1 of 1, 1 of 2
        ("...", "a b", 0.0),
        ("x", "y", 0.0),
    ],
)
def test_rouge_l(answer: str, right: str, points: float) -> None:
    assert rouge_l(answer, right) == pytest.approx(points)


def test_contains_and_best() -> None:
    assert contains("It is 1234567.", "1234567") == 100.0
    assert contains("It is PARIS.", "Paris") == 100.0
    assert contains("It is 123456.", "1234567") == 0.0
    assert best_score(f1, "a big cat", ["dog", "big cat", "cat"]) == 100.0


def test_stated_answer() -> None:
    assert stated_answer(r"so \boxed{3}, no: \boxed{\frac{1}{2}}.", "aime") == r"\frac{1}{2}"
    assert stated_answer("It is 3.", "aime") == "It is 3."
    assert stated_answer(r"\boxed{3}", None) == r"\boxed{3}"


@given(WORDS, WORDS)
def test_common_subsequence(first: list[str], second: list[str]) -> None:
    found = common_subsequence(first, second)

    def within(text: list[str]) -> bool:
        rest = iter(text)
        return all(word in rest for word in found)

    assert within(first)
    assert within(second)
    assert len(found) == longest(first, second)


def longest(first: list[str], second: list[str]) -> int:
    if not first or not second:
        return 0
    if first[0] == second[0]:
        return 1 + longest(first[1:], second[1:])
    return max(longest(first[1:], second), longest(first, second[1:]))


@given(TEXTS, TEXTS)
def test_scores_lie_between_0_and_100_and_equal_texts_have_100(answer: str, right: str) -> None:
    for name, score in SCORES.items():
        assert 0.0 <= score(answer, right) <= 100.0 + 1e-9
        if normalised(right) and name != "contains":
            assert score(right, right) == pytest.approx(100.0)
    assert f1(answer, right) == pytest.approx(f1(right, answer))
