"""Ready-made benchmarks on shipped text."""

from __future__ import annotations

from dataclasses import dataclass

from aspire_llm.bench.datasets import Dataset, Lengths, shipped_text
from aspire_llm.bench.workloads.rows import Row, RowDataset
from aspire_llm.bench.workloads.text import TextDataset

FOLKLORE = "The Meaning of ‘Hack’"  # first line of jargon_folklore.txt
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


# A small model asked for a summary of 5,000 tokens soon repeats itself; asked to go on in the same vein it does so less.
CONTINUE = "Continue the text above in the same style, with new content."

# Each about 4,000 to 6,000 tokens, 37,000 in all.
DEMO = (
    Passage(
        "jargon_folklore.txt",
        FOLKLORE,
        "A Story About ‘Magic'",
        "Write a summary of the pranks and tales above, one paragraph each.",
    ),
    Passage("kjv_genesis.txt", "Genesis 37", "Genesis 42", CONTINUE),
    Passage("us_constitution.txt", "Article I", "Article III", CONTINUE),
    Passage("jargon_folklore.txt", "A Story About ‘Magic'", None, CONTINUE),
    Passage(
        "kjv_genesis.txt",
        "Genesis 24",
        "Genesis 27",
        "Copy out, word for word, what the servant said by the well in the text above.",
    ),
    Passage("jargon_introduction.txt", "Chapter 4. Jargon Construction", "Chapter 5. Hacker Writing Style", CONTINUE),
    Passage(
        "kjv_ecclesiastes.txt",
        "Ecclesiastes 1",
        "Ecclesiastes 7",
        "Copy out, word for word, the verses above that begin with: To every thing there is a season.",
    ),
    Passage("jargon_lexicon.txt", ":hacker: n.", ":hang: v.", CONTINUE),
)


def demo_dataset() -> Dataset:
    """Eight real tasks on long texts, as conversations."""
    rows = [Row(messages=[{"role": "user", "content": f"{passage.text()}\n\n{passage.task}"}]) for passage in DEMO]
    return RowDataset("demo", rows)


def default_dataset(lengths: Lengths | None) -> Dataset:
    return TextDataset(DEFAULT_TEXT, shipped_text(DEFAULT_TEXT), lengths)
