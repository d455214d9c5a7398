"""Ready-made benchmarks on shipped text."""

from __future__ import annotations

from dataclasses import dataclass

from aspire_llm.bench.datasets import Dataset, RowDataset, TextDataset, shipped_text

DEMO_METHODS = ("plain", "aspire")
DEFAULT_TEXT = "jargon_lexicon.txt"


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a shipped text and what is asked about it."""

    file: str
    begins: str  # the line it begins with
    ends: str | None  # the line it ends before; None: the end of the text
    task: str

    def text(self) -> str:
        text = "\n" + shipped_text(self.file)
        start = text.index(f"\n{self.begins}\n") + 1
        end = text.index(f"\n{self.ends}\n", start) if self.ends is not None else len(text)
        return text[start:end].strip()


# Each about 4,000 to 6,000 tokens.
DEMO = (
    Passage("kjv_ruth.txt", "Ruth 1", None, "Retell this story in plain modern English, from the beginning."),
)


def demo_dataset() -> Dataset:
    """Eight real tasks on long texts, as conversations."""
    rows = [
        {"messages": [{"role": "user", "content": f"{passage.text()}\n\n{passage.task}"}]} for passage in DEMO
    ]
    return RowDataset("demo", rows)


def default_dataset(lengths: tuple[int, int] | None) -> Dataset:
    return TextDataset(DEFAULT_TEXT, shipped_text(DEFAULT_TEXT), lengths)
