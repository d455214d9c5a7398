"""The report as one HTML page that needs nothing else, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

from aspire_llm.bench.report.parts import REPLAYED, WIDTHS, Picture, Report, Section, Table, marked

FIELDS = ("machine", "versions", "commit", "command", "started")


def html(report: Report) -> str:
    style = resources.files("aspire_llm.bench.report").joinpath("report.css").read_text(encoding="utf-8")
    title = escape(report.title)
    sections = "\n".join(_section(number, section) for number, section in enumerate(report.sections, 1))
    contents = "".join(
        f'<li><a href="#s{number}">{escape(marked(section.title, section.replayed))}</a></li>'
        for number, section in enumerate(report.sections, 1)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1><nav aria-label="Results"><ol>{contents}</ol></nav></header>
<main>
{sections}
</main>
<footer>
<h2>Where the numbers come from</h2>
{_provenance(report)}
</footer>
</body>
</html>
"""


def _section(number: int, section: Section) -> str:
    notes = "".join(f"<p>{escape(note)}</p>" for note in section.notes)
    pictures = "\n".join(_picture(picture) for picture in section.pictures)
    tables = "\n".join(_table(table) for table in section.tables)
    heading = f'<h2 id="s{number}">{escape(section.title)}{_badge(section.replayed)}</h2>'
    return f"<section>\n{heading}\n{notes}\n{pictures}\n{tables}\n</section>"


def _badge(replayed: bool) -> str:
    return f' <span class="badge">{REPLAYED}</span>' if replayed else ""


def _picture(picture: Picture) -> str:
    alternative = f"{marked(picture.title, picture.replayed)}. {picture.alternative}"
    drawn = "".join(picture.draw(width).svg(alternative, name) for name, width in WIDTHS.items())
    legend = "".join(
        f'<li><svg width="14" height="14" aria-hidden="true"><rect width="14" height="14" class="{style}"/></svg> '
        f"{escape(meaning)}</li>"
        for style, meaning in picture.legend
    )
    listed = f'<ul class="legend">{legend}</ul>' if legend else ""
    caption = f"<figcaption>{escape(picture.title)}{_badge(picture.replayed)}</figcaption>"
    return f"<figure>{caption}{drawn}{listed}</figure>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in table.rows
    )
    caption = f"<caption>{escape(table.title)}{_badge(table.replayed)}</caption>"
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    # a wide table scrolls within its frame, which the keyboard reaches too
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(marked(table.title, table.replayed), quote=True)}">'
        f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}"
    )


def _provenance(report: Report) -> str:
    parts = []
    for of in report.provenance:
        facts = "".join(f"<dt>{name}</dt><dd>{escape(getattr(of, name))}</dd>" for name in FIELDS)
        parts.append(f"<h3>{escape(of.file)}</h3><dl>{facts}</dl>")
    return "\n".join(parts)


def markdown(report: Report) -> str:
    """The tables, with the notes."""
    lines = [f"# {_plain(report.title)}", ""]
    for section in report.sections:
        lines += [f"## {_plain(marked(section.title, section.replayed))}", ""]
        lines += [line for note in section.notes for line in (f"{_plain(note)}", "")]
        for table in section.tables:
            lines += [*_markdown_table(table), ""]
    lines += ["## Where the numbers come from", ""]
    for of in report.provenance:
        lines.append(f"- {_plain(of.file)}: " + "; ".join(f"{name} {_plain(getattr(of, name))}" for name in FIELDS))
    return "\n".join(lines) + "\n"


def _markdown_table(table: Table) -> Iterator[str]:
    yield f"**{_plain(marked(table.title, table.replayed))}**"
    yield ""
    yield _row(table.columns)
    yield "| --- |" + " ---: |" * (len(table.columns) - 1)
    for row in table.rows:
        yield _row(row)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in cells) + " |"


def _plain(text: str) -> str:
    """Names in results may hold anything: nothing of it may become markup."""
    return escape(" ".join(text.split()), quote=False).replace("*", "\\*").replace("_", "\\_").replace("`", "\\`")
