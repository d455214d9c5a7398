"""Real text of any length: pieces of a file, of a folder of files, or of a text that the package ships."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from aspire_llm.bench.datasets import DEFAULT_REQUESTS, Lengths, Sample, Selection, spread_lengths
from aspire_llm.config import read_text
from aspire_llm.engine.inputs import InputProcessor
from aspire_llm.errors import UserError

DEFAULT_LONGEST = 6000  # tokens of a prompt cut from a text, where the model's context allows it


@dataclass(frozen=True, slots=True)
class TextDataset:
    """Pieces of one text, of different lengths, from different places: the model continues them.

    lengths: fewest and most tokens of a piece; None: the most is `DEFAULT_LONGEST` or what fits, the fewest 2/3 of it.
    skipped: files that were left out when the text was read, by reason.
    """

    name: str
    text: str
    lengths: Lengths | None = None
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def format(self) -> str:
        return "text"

    def select(self, inputs: InputProcessor, count: int | None, room: int, seed: int) -> Selection:
        count = count or DEFAULT_REQUESTS
        tokens = inputs.token_ids(self.text)
        longest = min(DEFAULT_LONGEST, room, len(tokens))
        lengths = self.lengths or (max(1, longest * 2 // 3), longest)
        if lengths[1] > room:
            raise UserError(f"prompt tokens {lengths[1]}: the model's context leaves room for {room} beside the output")
        if lengths[1] > len(tokens):
            raise UserError(f"dataset {self.name} has {len(tokens)} tokens; prompts of {lengths[1]} need a longer text")
        rng = random.Random(seed)
        sizes = spread_lengths(lengths, count)
        rng.shuffle(sizes)
        # what a tokenizer puts at the beginning of every text (a BOS token, or nothing)
        begin = list(inputs.tokenizer("")["input_ids"]) if inputs.tokenizer is not None else []
        pieces = []
        for i, size in enumerate(sizes):
            last_start = len(tokens) - size
            low, high = last_start * i // count, last_start * (i + 1) // count  # one zone of the text each
            start = rng.randint(low, high)
            piece = tokens[start : start + size]
            pieces.append(Sample((begin + piece)[:size] if start else piece))
        return Selection(pieces, dict(self.skipped))


def read_text_dataset(path: str, lengths: Lengths | None = None) -> TextDataset:
    """A file, or all text files below a folder in the order of their names. Raises UserError."""
    if not Path(path).is_dir():
        text = read_text(path, "dataset")
        if not text.strip():
            raise UserError(f"dataset {path!r} is empty")
        return TextDataset(path, text, lengths)
    parts, unreadable = [], 0
    for file in sorted(p for p in Path(path).rglob("*") if p.is_file() and not _hidden(p, path)):
        try:
            parts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            unreadable += 1
    text = "\n\n".join(part for part in parts if part.strip())
    if not text:
        raise UserError(f"dataset {path!r}: the folder has no text in it ({unreadable} files are not UTF-8 text)")
    return TextDataset(path, text, lengths, {"files that are not text": unreadable} if unreadable else {})


def _hidden(file: Path, folder: str) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)
