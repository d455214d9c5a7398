"""Random tokens of any length: for shapes without weights, where the text does not matter."""

from __future__ import annotations

import random
from dataclasses import dataclass

from aspire_llm.bench.datasets import DEFAULT_REQUESTS, Lengths, Sample, Selection, spread_lengths
from aspire_llm.engine.inputs import InputProcessor
from aspire_llm.errors import UserError

DEFAULT_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class RandomDataset:
    """Tokens drawn evenly from the vocabulary, those that end a text left out. No tokenizer is needed."""

    lengths: Lengths | None = None

    @property
    def name(self) -> str:
        return "random"

    @property
    def format(self) -> str:
        return "random"

    def select(self, inputs: InputProcessor, count: int | None, room: int, seed: int) -> Selection:
        lengths = self.lengths or (min(DEFAULT_LENGTH, room), min(DEFAULT_LENGTH, room))
        if lengths[1] > room:
            raise UserError(f"prompt tokens {lengths[1]}: the model's context leaves room for {room} beside the output")
        rng = random.Random(seed)
        tokens = [token for token in range(inputs.vocab_size) if token not in inputs.eos_token_ids]
        sizes = spread_lengths(lengths, count or DEFAULT_REQUESTS)
        return Selection([Sample(rng.choices(tokens, k=size)) for size in sizes])
