"""Scores of an answer against right ones, in points (0 to 100), as LongBench defines them for English.

- F1 and exact match compare words after SQuAD's normalisation (Rajpurkar et al., 2016): lower case, no punctuation, no
  articles, single blanks.
- ROUGE-L (Lin, 2004) is the summary-level one that LongBench reports, of the texts as they are: words are split at blanks,
  sentences at full stops; recall and precision are the shares of the different words of the right answer and of the answer
  that lie on a longest common subsequence of any pair of sentences.
- `contains` is RULER's: the right answer stands in the text, in any case of letters.

Of several right answers the best score counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

Score = Callable[[str, str], float]  # (answer, right answer) -> points

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")  # LaTeX, with one more level of braces inside


def normalised(text: str) -> str:
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, right: str) -> float:
    return 100.0 * (normalised(answer) == normalised(right))


def f1(answer: str, right: str) -> float:
    """Harmonic mean of the shares of common words, repeated words counted as often as they come."""
    mine, theirs = normalised(answer).split(), normalised(right).split()
    common = sum((Counter(mine) & Counter(theirs)).values())
    if not common:
        return 0.0
    precision, recall = common / len(mine), common / len(theirs)
    return 100.0 * 2.0 * precision * recall / (precision + recall)


def rouge_l(answer: str, right: str) -> float:
    mine, theirs = sentences(answer), sentences(right)
    words, right_words = ({word for sentence in text for word in sentence} for text in (mine, theirs))
    on_subsequence: set[str] = set()
    for right_sentence in theirs:
        for sentence in mine:
            on_subsequence.update(common_subsequence(right_sentence, sentence))
    if not on_subsequence:
        return 0.0
    precision, recall = len(on_subsequence) / len(words), len(on_subsequence) / len(right_words)
    return 100.0 * 2.0 * precision * recall / (precision + recall)


def contains(answer: str, right: str) -> float:
    return 100.0 * (right.lower() in answer.lower())


SCORES: Mapping[str, Score] = {"exact_match": exact_match, "f1": f1, "rouge_l": rouge_l, "contains": contains}


def best_score(score: Score, answer: str, right: Sequence[str]) -> float:
    """right: at least one."""
    return max(score(answer, each) for each in right)


def stated_answer(text: str, task: str | None) -> str:
    """The part of an output that is the answer: of AIME's the last \\boxed{…}, where there is one; else all of it."""
    boxed = BOXED.findall(text) if task == "aime" else []
    return boxed[-1] if boxed else text


def sentences(text: str) -> list[list[str]]:
    """Words of each sentence."""
    return [words for part in text.split(".") if (words := part.split())]


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """A longest common subsequence."""
    longest = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]  # of the first i and j words
    for i, word in enumerate(first, 1):
        row, above = longest[i], longest[i - 1]
        for j, other in enumerate(second, 1):
            row[j] = above[j - 1] + 1 if word == other else max(above[j], row[j - 1])
    found = []
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            found.append(first[i - 1])
            i, j = i - 1, j - 1
        elif longest[i - 1][j] > longest[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]
