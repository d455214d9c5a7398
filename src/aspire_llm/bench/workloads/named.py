"""Workloads by name, as the command line calls them."""

from __future__ import annotations

from pathlib import Path

from aspire_llm.bench.datasets import Dataset, Lengths
from aspire_llm.bench.presets import default_dataset
from aspire_llm.bench.workloads.formats import FORMATS, read_rows
from aspire_llm.bench.workloads.needles import DEFAULT_NEEDLES, NeedleDataset
from aspire_llm.bench.workloads.random_tokens import RandomDataset
from aspire_llm.bench.workloads.text import read_text_dataset
from aspire_llm.errors import UserError

MADE = ("needles", "random", "text")  # need no file; "text" is a part of the Jargon File that the package ships
ROW_SUFFIXES = (".jsonl", ".json")


def open_dataset(
    name: str, format_name: str | None = None, lengths: Lengths | None = None, needles: int | None = None
) -> Dataset:
    """name: one of `MADE`, a file or a folder. format_name: of a file; None: by its ending and its first row.
    lengths: fewest and most tokens of a prompt. Raises UserError."""
    if format_name is not None and format_name not in (*FORMATS, "text"):
        raise UserError(f"dataset format {format_name!r} is unknown; known: {', '.join((*FORMATS, 'text'))}")
    if format_name is not None and name in MADE:
        raise UserError(f"dataset format {format_name!r} does nothing with dataset {name!r}, which is made on the spot")
    if needles is not None and name != "needles":
        raise UserError(f"needles = {needles} does nothing with dataset {name!r}; use dataset needles")
    if name == "needles":
        return NeedleDataset(lengths, needles or DEFAULT_NEEDLES)
    if name == "random":
        return RandomDataset(lengths)
    if name == "text":
        return default_dataset(lengths)
    if format_name in FORMATS or (format_name is None and Path(name).suffix.lower() in ROW_SUFFIXES):
        return read_rows(name, format_name, lengths)
    return read_text_dataset(name, lengths)
