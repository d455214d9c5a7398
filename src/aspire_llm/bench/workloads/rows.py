"""Datasets of whole prompts, one a row: which rows are taken, and which are left out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aspire_llm.bench.datasets import DEFAULT_REQUESTS, Lengths, Sample, Selection
from aspire_llm.engine.inputs import InputProcessor
from aspire_llm.errors import UserError


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt as a file has it.

    messages: a conversation; text: a prompt as it is, or (`ask`) a question that becomes a user's message where the model
    has a chat template. unusable: why the row cannot be asked, where it cannot.
    """

    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    ask: bool = False
    answers: tuple[str, ...] = ()
    task: str | None = None
    unusable: str | None = None


@dataclass(frozen=True, slots=True)
class RowDataset:
    """Rows are looked at in an order that the seed gives, until `count` fit; chosen ones keep the order of the file.

    lengths: fewest and most tokens of the prompts to take; None: any that fit.
    """

    name: str
    rows: Sequence[Row]
    format: str = "openai"
    lengths: Lengths | None = None

    def select(self, inputs: InputProcessor, count: int | None, room: int, seed: int) -> Selection:
        wanted = count or min(DEFAULT_REQUESTS, len(self.rows))
        if wanted > len(self.rows):
            raise UserError(f"requests = {count}: dataset {self.name} has {len(self.rows)}")
        chosen: dict[int, Sample] = {}
        skipped: Counter[str] = Counter()
        for index in random.Random(seed).sample(range(len(self.rows)), len(self.rows)):
            row = self.rows[index]
            if row.unusable is not None:
                skipped[row.unusable] += 1
                continue
            sample = row_sample(row, inputs)
            reason = self._unfit(len(sample.token_ids), room)
            if reason is not None:
                skipped[reason] += 1
                continue
            chosen[index] = sample
            if len(chosen) == wanted:
                break
        if not chosen or (count is not None and len(chosen) < count):
            why = "; ".join(f"{n} {reason}" for reason, n in skipped.items())
            raise UserError(f"requests = {wanted}: dataset {self.name} has {len(chosen)} that fit ({why})")
        return Selection([chosen[index] for index in sorted(chosen)], dict(skipped))

    def _unfit(self, tokens: int, room: int) -> str | None:
        if self.lengths is not None and not self.lengths[0] <= tokens <= self.lengths[1]:
            return f"rows not of {self.lengths[0]}-{self.lengths[1]} tokens"
        return f"rows too long for the context ({room} tokens beside the output)" if tokens > room else None


def row_sample(row: Row, inputs: InputProcessor) -> Sample:
    """Raises UserError for a conversation that the model's chat template refuses."""
    messages = row.messages
    if messages is None and row.ask and has_chat_template(inputs):
        messages = [{"role": "user", "content": row.text}]
    if messages is not None:
        return Sample(inputs.chat_token_ids(messages), None, messages, row.answers, row.task)
    assert row.text is not None
    return Sample(inputs.token_ids(row.text), row.text, None, row.answers, row.task)


def has_chat_template(inputs: InputProcessor) -> bool:
    return inputs.tokenizer is not None and getattr(inputs.tokenizer, "chat_template", None) is not None
