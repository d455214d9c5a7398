"""What a benchmark decodes, behind one interface. The kinds of workloads are in `bench/workloads`.

A dataset is read (and refused, with a UserError) before a model is loaded; its prompts become token ids afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Protocol

from aspire_llm.engine.inputs import InputProcessor

DEFAULT_REQUESTS = 8

Lengths = tuple[int, int]  # fewest and most tokens of a prompt


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, and what is known of it.

    token_ids: after the chat template, where there is one. messages: the conversation, where it is one; text: the prompt,
    where it is plain text; neither: it exists as tokens only. answers: right ones; any of them will do.
    """

    token_ids: list[int]
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    answers: tuple[str, ...] = ()
    task: str | None = None  # of a collection of several, such as LongBench


@dataclass(frozen=True, slots=True)
class Selection:
    """Samples that were chosen, and how many were looked at and left out, by reason."""

    samples: list[Sample]
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def prompts(self) -> list[list[int]]:
        return [sample.token_ids for sample in self.samples]


class Dataset(Protocol):
    @property
    def name(self) -> str:
        """A path, or the name of a kind of workload."""
        ...

    @property
    def format(self) -> str:
        """What kind of workload it is: `text`, `needles`, `random`, or a format of rows."""
        ...

    def select(self, inputs: InputProcessor, count: int | None, room: int, seed: int) -> Selection:
        """`count` samples (None: as many as the dataset is made for), the same for the same seed.

        room: the most tokens a prompt may have. Raises UserError where the dataset does not have that many that fit, naming
        why the others do not.
        """
        ...


def shipped_text(name: str) -> str:
    """The text `name` in data/texts: see the README there."""
    return resources.files("aspire_llm").joinpath("data", "texts", name).read_text(encoding="utf-8")


def spread_lengths(lengths: Lengths, count: int) -> list[int]:
    """`count` lengths evenly spread from the fewest to the most."""
    low, high = lengths
    return [low + (high - low) * i // max(1, count - 1) for i in range(count)]
