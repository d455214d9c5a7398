"""What a benchmark decodes: prompts from a text file, a JSONL file, or texts that the package ships.

A dataset is read (and refused, with a UserError) before a model is loaded; its prompts become token ids afterwards.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from aspire_llm.config import read_text
from aspire_llm.engine.inputs import InputProcessor
from aspire_llm.errors import UserError

DEFAULT_LONGEST = 6000  # tokens of a prompt cut from a text, where the model's context allows it
DEFAULT_REQUESTS = 8


class Dataset(Protocol):
    def prompts(self, inputs: InputProcessor, count: int | None, room: int, seed: int) -> list[list[int]]:
        """Token ids of `count` prompts (None: as many as the dataset is made for), the same for the same seed.

        room: the most tokens a prompt may have. Raises UserError where the dataset does not have that many, or a prompt is
        longer.
        """
        ...


@dataclass(frozen=True, slots=True)
class TextDataset:
    """Pieces of one text, of different lengths, from different places: the model continues them.

    lengths: fewest and most tokens of a piece; None: the most is `DEFAULT_LONGEST` or what fits, the fewest 2/3 of it.
    """

    name: str
    text: str
    lengths: tuple[int, int] | None = None

    def prompts(self, inputs: InputProcessor, count: int | None, room: int, seed: int) -> list[list[int]]:
        count = count or DEFAULT_REQUESTS
        tokens = inputs.token_ids(self.text)
        if self.lengths is None:
            longest = min(DEFAULT_LONGEST, room, len(tokens))
            shortest = max(1, longest * 2 // 3)
        else:
            shortest, longest = self.lengths
            if longest > room:
                raise UserError(
                    f"prompt tokens {longest}: the model's context leaves room for {room} beside the output"
                )
            if longest > len(tokens):
                raise UserError(
                    f"dataset {self.name} has {len(tokens)} tokens; prompts of {longest} need a longer text"
                )
        rng = random.Random(seed)
        steps = max(1, count - 1)
        sizes = [shortest + (longest - shortest) * i // steps for i in range(count)]
        rng.shuffle(sizes)
        # what a tokenizer puts at the beginning of every text (a BOS token, or nothing)
        begin = list(inputs.tokenizer("")["input_ids"]) if inputs.tokenizer is not None else []
        pieces = []
        for i, size in enumerate(sizes):
            last_start = len(tokens) - size
            low, high = last_start * i // count, last_start * (i + 1) // count  # one zone of the text each
            start = rng.randint(low, high)
            piece = tokens[start : start + size]
            pieces.append((begin + piece)[:size] if start else piece)
        return pieces


@dataclass(frozen=True, slots=True)
class RowDataset:
    """Prompts or conversations, one a row: {"prompt": text} or {"messages": [{"role", "content"}, …]}."""

    name: str
    rows: Sequence[Mapping[str, Any]]

    def prompts(self, inputs: InputProcessor, count: int | None, room: int, seed: int) -> list[list[int]]:
        count = count or min(DEFAULT_REQUESTS, len(self.rows))
        if count > len(self.rows):
            raise UserError(f"requests = {count}: dataset {self.name} has {len(self.rows)}")
        chosen = sorted(random.Random(seed).sample(range(len(self.rows)), count))
        prompts = []
        for index in chosen:
            row = self.rows[index]
            ids = inputs.chat_token_ids(row["messages"]) if "messages" in row else inputs.token_ids(row["prompt"])
            if len(ids) > room:
                raise UserError(
                    f"row {index + 1} of dataset {self.name} has {len(ids)} tokens; "
                    f"the context leaves room for {room} beside the output"
                )
            prompts.append(ids)
        return prompts


def read_dataset(path: str, lengths: tuple[int, int] | None = None) -> Dataset:
    """A .jsonl file's rows, or any other file as text. Raises UserError naming the file (and line) at fault."""
    text = read_text(path, "dataset")
    if not text.strip():
        raise UserError(f"dataset {path!r} is empty")
    if Path(path).suffix.lower() != ".jsonl":
        return TextDataset(path, text, lengths)
    if lengths is not None:
        raise UserError("prompt lengths do nothing with a JSONL dataset, whose rows are whole prompts")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return RowDataset(path, [_row(line, f"line {number} of dataset {path!r}") for number, line in lines])


def shipped_text(name: str) -> str:
    """The text `name` in data/texts: see the README there."""
    return resources.files("aspire_llm").joinpath("data", "texts", name).read_text(encoding="utf-8")


def _row(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg}") from None
    if isinstance(row, dict):
        if isinstance(row.get("prompt"), str):
            if not row["prompt"]:
                raise UserError(f"{where} has an empty prompt")
            return {"prompt": row["prompt"]}
        messages = row.get("messages")
        if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
            return {"messages": messages}
    raise UserError(f'{where} must have "prompt" (text) or "messages" (a list of {{"role", "content"}})')


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    )
