"""Reuse of attention: a layer's top positions against those of other layers, and against its own a few positions later.

From plain decoding alone. Recall is the share of a layer's top-k positions (sinks and recent ones left out) that the other
layer's, or the earlier, set holds.
"""

from __future__ import annotations

import argparse

from aspire_llm.cli.numbers import whole_number
from aspire_llm.cli.output_file import OutputFile
from aspire_llm.cli.progress import ProgressBars
from aspire_llm.cli.workload import add_workload_options, load_workload
from aspire_llm.errors import UserError

DEFAULT_TOP_K, DEFAULT_MAX_TOKENS = 256, 64
LAGS = (1, 2, 3, 4, 6, 8, 12, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE.png", help="write a plot")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--top-k", metavar="N", help=f"positions of a set (default {DEFAULT_TOP_K})")
    parser.add_argument(
        "--max-tokens", metavar="N", help=f"tokens decoded of each prompt (default {DEFAULT_MAX_TOKENS})"
    )
    add_workload_options(parser)


def run(args: argparse.Namespace) -> None:
    k = whole_number("--top-k", args.top_k or str(DEFAULT_TOP_K), 1)
    num_output = whole_number("--max-tokens", args.max_tokens or str(DEFAULT_MAX_TOKENS), 2)
    with OutputFile(args.out, "--out") as picture, OutputFile(args.json, "--json") as out, ProgressBars() as bars:
        bars.show("loading", 0, 0)
        from rich.table import Table

        from aspire_llm.analysis import plots, reports
        from aspire_llm.analysis.recall import ReuseTable, ScoreRecorder
        from aspire_llm.analysis.recorder import Recorder

        if args.out is not None:
            plots.require_matplotlib()
        workload = load_workload(args, num_output)
        shortest = min(map(len, workload.prompts))
        if 2 * k > shortest:
            raise UserError(
                f"--top-k {k}: the shortest prompt has {shortest} tokens; sets of at most half of it can be compared"
            )
        layers = [layer for layer, window in enumerate(workload.model.config.windows) if window is None]
        if not layers:
            raise UserError("every layer of this model has a sliding window: there is no attention to reuse", "model")
        recorder = Recorder(workload.model, workload.prompts, num_output)
        table = ReuseTable(layers, k, [lag for lag in LAGS if lag < num_output])
        most = sum(map(len, workload.prompts)) + len(workload.prompts) * (num_output - 1)
        recorder.decode(lambda n: bars.show("plain decoding", n, most), ScoreRecorder(layers, table))
        report = {"model": workload.config.model, "dataset": workload.dataset, **reports.reuse(table, k)}
        time, depth = report["over_time"], report["across_layers"]
        shown = Table("distance", "positions later", "layers away", title=f"recall of the top {k}")
        later = dict(zip(time["lag"], time["recall"], strict=True))
        away = dict(zip(depth["distance"], depth["recall"], strict=True))
        for distance in sorted({*later, *(d for d in away if d in LAGS)}):
            cells = (values.get(distance) for values in (later, away))
            shown.add_row(str(distance), *("-" if value is None else f"{value:.3f}" for value in cells))
        bars.stop()
        bars.print(shown)
        if args.out is not None:
            picture.write_bytes(plots.plot_recall(report))
        out.write_json(report)
