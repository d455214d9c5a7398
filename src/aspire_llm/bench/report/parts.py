"""What a report is made of: sections with tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aspire_llm.bench.report.svg import Drawing

REPLAYED = "replayed"
# every picture is drawn twice, and the style sheet shows the one that fits; px
WIDTHS = {"wide": 760.0, "narrow": 330.0}


@dataclass(frozen=True, slots=True)
class Table:
    """rows: cells of text, the first names the row. replayed: some of it was."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    replayed: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """draw: makes the picture for a width in px. alternative: what it says, in words."""

    title: str
    alternative: str
    draw: Callable[[float], Drawing]
    replayed: bool = False
    legend: Sequence[tuple[str, str]] = ()  # (colour, meaning)


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    replayed: bool
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a file's numbers come from; "not recorded" where the file does not say."""

    file: str
    machine: str
    versions: str
    commit: str
    command: str
    started: str


@dataclass(frozen=True, slots=True)
class Report:
    title: str
    sections: Sequence[Section] = field(default_factory=list)
    provenance: Sequence[Provenance] = field(default_factory=list)


def marked(words: str, replayed: bool) -> str:
    """A name that says so where it was replayed."""
    return f"{words} ({REPLAYED})" if replayed and REPLAYED not in words else words


def number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else f"{value:{form}}"


def with_interval(value: float | None, interval: Sequence[float] | None, form: str = ".3g", unit: str = "") -> str:
    """ "1.52 [1.48, 1.60]"."""
    if value is None:
        return "-"
    shown = f"{value:{form}}{unit}"
    return shown if not interval else f"{shown} [{interval[0]:{form}}, {interval[1]:{form}}]"


def yes_no(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"
