"""Acceptance by draft position, with the context renewed at every draft and without.

Two contexts of the same budget draft from the same positions: `refreshed`, with the layers that an engine with these options
would use, and `verified`, which stays as the last verification left it.
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
    add_workload_options(parser, MODEL_OPTIONS | CONTEXT_OPTIONS - {"context"})
    add_draft_options(parser, starts=24, stride=4)


def run(args: argparse.Namespace) -> None:
    where = places(args)
    with OutputFile(args.out, "--out") as picture, OutputFile(args.json, "--json") as out, ProgressBars() as bars:
        bars.show("loading", 0, 0)
        from rich.table import Table

        from aspire_llm.analysis import plots, reports
        from aspire_llm.analysis.recorder import Method

        if args.out is not None:
            plots.require_matplotlib()
        workload = load_workload(args, where.num_output)
        refreshed = method_of(workload)
        stale = Method("verified", refreshed.budget)
        recorder = prefilled(workload, where.num_output, bars)
        drafts = {"refreshed": record(recorder, refreshed, where, bars), "stale": record(recorder, stale, where, bars)}
        report = {
            "model": workload.config.model,
            "dataset": workload.dataset,
            "methods": {"refreshed": reports.method_json(refreshed), "stale": reports.method_json(stale)},
            **reports.staleness(drafts),
        }
        table = Table(
            "draft position", *drafts, title=f"acceptance, if all before were right ({report['num_drafts']} drafts)"
        )
        by_name = [report["contexts"][name]["conditional"] for name in drafts]
        for position, *values in zip(report["draft_position"], *by_name, strict=True):
            table.add_row(str(position), *("-" if value is None else f"{value:.3f}" for value in values))
        bars.stop()
        bars.print(table)
        for name in drafts:
            bars.print(f"accepted length, {name}: {report['contexts'][name]['mean_accepted_length']:.2f}")
        if args.out is not None:
            picture.write_bytes(plots.plot_staleness(report))
        out.write_json(report)
