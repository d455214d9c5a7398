"""Needles in a haystack, made on the spot: facts of one form strewn over a long text, one of which is asked for.

After RULER's multi-key task (Hsieh et al., 2024): the others are distractors, so that a model must find the one that is asked
for. What copies from far away is what tells drafting contexts apart.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from aspire_llm.bench.datasets import DEFAULT_REQUESTS, Lengths, Sample, Selection, shipped_text, spread_lengths
from aspire_llm.bench.workloads.rows import Row, row_sample
from aspire_llm.engine.inputs import InputProcessor
from aspire_llm.errors import UserError

HAYSTACK = "jargon_lexicon.txt"
DEFAULT_LENGTH = 4096
DEFAULT_NEEDLES = 8
DIGITS = 7
COLOURS = (
    "amber",
    "azure",
    "black",
    "bronze",
    "copper",
    "crimson",
    "golden",
    "green",
    "indigo",
    "ivory",
    "purple",
    "silver",
)
THINGS = (
    "anchor",
    "basket",
    "candle",
    "engine",
    "falcon",
    "garden",
    "hammer",
    "island",
    "ladder",
    "mirror",
    "planet",
    "violin",
)


@dataclass(frozen=True, slots=True)
class Needle:
    key: str
    value: str

    @property
    def sentence(self) -> str:
        return f"The secret number of the {self.key} is {self.value}."


@dataclass(frozen=True, slots=True)
class NeedleDataset:
    """lengths: fewest and most tokens of a prompt; each is as long as it can be without another sentence of the haystack.
    needles: facts in each prompt, the one asked for included."""

    lengths: Lengths | None = None
    needles: int = DEFAULT_NEEDLES

    @property
    def name(self) -> str:
        return "needles"

    @property
    def format(self) -> str:
        return "needles"

    def select(self, inputs: InputProcessor, count: int | None, room: int, seed: int) -> Selection:
        most = len(COLOURS) * len(THINGS)
        if not 1 <= self.needles <= most:
            raise UserError(f"needles {self.needles}: allowed are 1 to {most}", "needles")
        lengths = self.lengths or (min(DEFAULT_LENGTH, room), min(DEFAULT_LENGTH, room))
        if lengths[1] > room:
            raise UserError(f"prompt tokens {lengths[1]}: the model's context leaves room for {room} beside the output")
        sentences = haystack_sentences()
        sizes = spread_lengths(lengths, count or DEFAULT_REQUESTS)
        return Selection([self._sample(inputs, sentences, size, f"{seed} {i}") for i, size in enumerate(sizes)])

    def _sample(self, inputs: InputProcessor, sentences: list[str], size: int, seed: str) -> Sample:
        rng = random.Random(seed)
        needles = make_needles(self.needles, rng)
        places = [rng.random() for _ in needles]  # where in the text, 0 to 1
        asked = rng.choice(needles)
        begin = rng.randrange(len(sentences))

        def sample(num_sentences: int) -> Sample:
            hay = [sentences[(begin + i) % len(sentences)] for i in range(num_sentences)]
            return row_sample(needle_row(hay, needles, places, asked), inputs)

        shortest = sample(0)
        if len(shortest.token_ids) > size:
            raise UserError(
                f"prompt tokens {size}: {self.needles} needles and the question alone are {len(shortest.token_ids)} tokens"
            )
        # the most sentences that fit: first a bound, by doubling, then halving what is left
        low, high = 0, 1
        best = shortest
        while len((longer := sample(high)).token_ids) <= size:
            low, high, best = high, 2 * high, longer
        while high - low > 1:
            middle = (low + high) // 2
            tried = sample(middle)
            if len(tried.token_ids) <= size:
                low, best = middle, tried
            else:
                high = middle
        return best


def make_needles(count: int, rng: random.Random) -> list[Needle]:
    """Different keys, different values."""
    keys = rng.sample([f"{colour} {thing}" for colour in COLOURS for thing in THINGS], count)
    values = rng.sample(range(10 ** (DIGITS - 1), 10**DIGITS), count)
    return [Needle(key, str(value)) for key, value in zip(keys, values, strict=True)]


def needle_row(hay: list[str], needles: list[Needle], places: list[float], asked: Needle) -> Row:
    """places: of each needle in the hay, 0 (before it) to 1 (after it)."""
    strewn: list[tuple[float, str]] = [(float(i), sentence) for i, sentence in enumerate(hay)]
    strewn += [(place * len(hay) - 0.5, needle.sentence) for place, needle in zip(places, needles, strict=True)]
    text = " ".join(sentence for _, sentence in sorted(strewn, key=lambda part: part[0]))
    question = f"What is the secret number of the {asked.key}? Answer with the number only."
    return Row(
        text=f"Secret numbers are hidden in the following text. You will be asked for one of them.\n\n{text}\n\n{question}",
        ask=True,
        answers=(asked.value,),
        task="needles",
    )


def haystack_sentences() -> list[str]:
    """Sentences of a text that the package ships."""
    text = " ".join(shipped_text(HAYSTACK).split())
    return [sentence for sentence in re.split(r"(?<=[.!?]) ", text) if 20 <= len(sentence) <= 300]
