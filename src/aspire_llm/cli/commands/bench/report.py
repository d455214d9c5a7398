"""One page, or Markdown tables, from the results of the other benchmarks.

Takes the JSON files of bench offline, serve, kernels, accept and accuracy in any mixture. The page needs no other file and no
network; what was replayed is marked wherever it is shown.
"""

from __future__ import annotations

import argparse

from aspire_llm.cli.output_file import OutputFile
from aspire_llm.errors import UserError

DEFAULT_TITLE = "aspire-llm: benchmark results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", metavar="RESULTS", nargs="+", help="JSON files that benchmarks wrote")
    parser.add_argument("--out", metavar="FILE", help="write the page, as HTML")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables, as Markdown")
    parser.add_argument("--title", metavar="TEXT", help=f"of the page (default {DEFAULT_TITLE!r})")


def run(args: argparse.Namespace) -> None:
    if args.out is None and args.markdown is None:
        raise UserError("--out FILE or --markdown FILE is needed")
    with OutputFile(args.out, "--out") as page, OutputFile(args.markdown, "--markdown") as tables:
        from aspire_llm.bench.report.page import html, markdown
        from aspire_llm.bench.report.read import read_report

        report = read_report(args.results, args.title or DEFAULT_TITLE)
        page.write(html(report))
        tables.write(markdown(report))
