"""Accepted length between requests and within each: why every request needs its own draft length.

Drafts are made from many positions of each prompt's plain greedy continuation, with the drafting context that an engine
with these options would use.
"""

from __future__ import annotations

import argparse

from aspire_llm.cli.output_file import OutputFile
from aspire_llm.cli.progress import ProgressBars
from aspire_llm.cli.workload import (
    CONTEXT_OPTIONS,
    MODEL_OPTIONS,
    add_draft_options,
    add_workload_options,
    load_workload,
    method_of,
    places,
    prefilled,
    record,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE.png", help="write a plot")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    add_workload_options(parser, MODEL_OPTIONS | CONTEXT_OPTIONS)
    add_draft_options(parser, starts=32, stride=4)


def run(args: argparse.Namespace) -> None:
    where = places(args)
    with OutputFile(args.out, "--out") as picture, OutputFile(args.json, "--json") as out, ProgressBars() as bars:
        bars.show("loading", 0, 0)
        from rich.table import Table

        from aspire_llm.analysis import plots, reports

        if args.out is not None:
            plots.require_matplotlib()
        workload = load_workload(args, where.num_output)
        method = method_of(workload)
        recorder = prefilled(workload, where.num_output, bars)
        drafts = record(recorder, method, where, bars)
        report = {
            "model": workload.config.model,
            "dataset": workload.dataset,
            "method": reports.method_json(method),
            **reports.heterogeneity(drafts, workload.prompts),
        }
        table = Table("request", "prompt tokens", "starts", "accepted length", "std", "min", "max", title=method.name)
        for row in report["requests"]:
            cells = (
                row["request"],
                row["prompt_tokens"],
                len(row["starts"]),
                f"{row['mean']:.2f}",
                f"{row['std']:.2f}",
            )
            table.add_row(*map(str, (*cells, row["min"], row["max"])))
        bars.stop()
        bars.print(table, f"between requests: {report['between_requests']['ratio']:.1f}-fold")
        if args.out is not None:
            picture.write_bytes(plots.plot_heterogeneity(report))
        out.write_json(report)
