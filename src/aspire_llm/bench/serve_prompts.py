"""Request bodies from a dataset: conversations and texts as they are, pieces of texts as tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aspire_llm.bench.datasets import DEFAULT_REQUESTS, Dataset, Sample
from aspire_llm.bench.workloads.rows import RowDataset
from aspire_llm.engine.inputs import InputProcessor
from aspire_llm.errors import UserError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDPOINTS = (COMPLETIONS, CHAT)
ANY_LENGTH = 1 << 40  # where the server does not tell its context


@dataclass(frozen=True, slots=True)
class Prompts:
    endpoint: str
    contents: list[Mapping[str, Any]]  # {"prompt": …} or {"messages": …}
    skipped: dict[str, int]  # rows left out, by reason


def choose_prompts(
    dataset: Dataset,
    inputs: InputProcessor | None,
    count: int | None,
    *,
    endpoint: str | None = None,
    room: int | None = None,
    seed: int = 0,
) -> Prompts:
    """`count` prompts, the same for the same seed. Without a tokenizer (inputs None) only rows can be sent, unmeasured.

    endpoint: None for chat where the dataset has conversations, else completions. room: the most tokens of a prompt.
    Raises UserError.
    """
    if inputs is not None:
        selection = dataset.select(inputs, count, room if room is not None else ANY_LENGTH, seed)
        samples, skipped = selection.samples, selection.skipped
    else:
        samples, skipped = rows_as_they_are(dataset, count, seed)
    chosen = endpoint or (CHAT if any(sample.messages for sample in samples) else COMPLETIONS)
    contents = [_content(sample, chosen, inputs) for sample in samples]
    return Prompts(chosen, contents, dict(skipped))


def rows_as_they_are(dataset: Dataset, count: int | None, seed: int) -> tuple[list[Sample], Counter[str]]:
    """Rows by their text, no token being counted. Raises UserError for a dataset that is made of tokens."""
    if not isinstance(dataset, RowDataset) or dataset.lengths is not None:
        raise UserError(
            f"dataset {dataset.name!r}: prompts are measured in tokens; name the model's tokenizer by --tokenizer"
        )
    skipped: Counter[str] = Counter()
    samples = []
    wanted = count or min(DEFAULT_REQUESTS, len(dataset.rows))
    for index in random.Random(seed).sample(range(len(dataset.rows)), len(dataset.rows)):
        row = dataset.rows[index]
        if row.unusable is not None:
            skipped[row.unusable] += 1
            continue
        messages = row.messages
        if messages is None and row.ask:
            messages = [{"role": "user", "content": row.text}]
        samples.append(Sample([], row.text if messages is None else None, messages))
        if len(samples) == wanted:
            return samples, skipped
    why = "; ".join(f"{n} {reason}" for reason, n in skipped.items())
    raise UserError(
        f"requests = {wanted}: dataset {dataset.name} has {len(samples)} that can be sent"
        + (f" ({why})" if why else "")
    )


def _content(sample: Sample, endpoint: str, inputs: InputProcessor | None) -> Mapping[str, Any]:
    if endpoint == CHAT:
        if sample.messages is not None:
            return {"messages": list(sample.messages)}
        text = sample.text if sample.text is not None else _decoded(sample.token_ids, inputs)
        return {"messages": [{"role": "user", "content": text}]}
    if sample.text is not None:
        return {"prompt": sample.text}
    if not sample.token_ids:
        raise UserError(
            f"--endpoint {COMPLETIONS}: the dataset has conversations, which need --endpoint {CHAT} or a --tokenizer"
        )
    return {"prompt": list(sample.token_ids)}


def _decoded(token_ids: Sequence[int], inputs: InputProcessor | None) -> str:
    assert inputs is not None
    assert inputs.tokenizer is not None
    return str(inputs.tokenizer.decode(list(token_ids), skip_special_tokens=True))
