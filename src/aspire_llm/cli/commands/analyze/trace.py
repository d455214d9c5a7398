"""Record acceptance traces of a model: what is drafted from every position of its plain output, and how far it holds.

`analyze simulate --trace FILE` replays them under any policy. The format is described in `aspire_llm/policy/trace.py`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from aspire_llm.cli.options import comma_list
from aspire_llm.cli.output_file import OutputFile
from aspire_llm.cli.progress import ProgressBars
from aspire_llm.cli.workload import (
    CONTEXT_OPTIONS,
    MODEL_OPTIONS,
    add_draft_options,
    add_workload_options,
    load_workload,
    method_of,
    penultimate,
    places,
    prefilled,
    record,
)
from aspire_llm.config import selector_names
from aspire_llm.errors import UserError

DEFAULT_METHODS = ("window", "verified", "penultimate", "refreshed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE.npz", required=True, help="the trace file")
    parser.add_argument("--json", metavar="FILE", help="write the accepted length of each method")
    parser.add_argument(
        "--methods",
        metavar="A,B,…",
        help=f"contexts to draft with: {', '.join(selector_names())}, and penultimate (refreshed, by the penultimate layer) "
        f"(default {','.join(DEFAULT_METHODS)})",
    )
    add_workload_options(parser, MODEL_OPTIONS | CONTEXT_OPTIONS - {"context"})
    add_draft_options(parser, starts=96, stride=1)


def run(args: argparse.Namespace) -> None:
    where = places(args)
    chosen = comma_list(args.methods) if args.methods is not None else DEFAULT_METHODS
    known = (*selector_names(), "penultimate")
    for name in chosen:
        if name not in known:
            raise UserError(f"--methods: {name!r} is unknown; known: {', '.join(known)}")
    if not chosen:
        raise UserError("--methods names none")
    with OutputFile(args.out, "--out") as trace, OutputFile(args.json, "--json") as out, ProgressBars() as bars:
        bars.show("loading", 0, 0)
        from aspire_llm.analysis import reports
        from aspire_llm.analysis.recorder import Method
        from aspire_llm.policy.trace import write_traces

        workload = load_workload(args, where.num_output)
        engines = method_of(workload)
        named: dict[str, Method] = {}
        for name in chosen:
            if name == "refreshed":
                named[engines.name] = engines
            elif name == "penultimate":
                last = penultimate(workload.model)
                named["refreshed_penultimate"] = Method("refreshed", engines.budget, last, engines.verified_share)
            else:
                named[name] = Method(name, engines.budget)  # type: ignore[arg-type]
        recorder = prefilled(workload, where.num_output, bars)
        whole = [r for r in range(len(workload.prompts)) if recorder.has_start(r, where.starts[-1], where.draft_tokens)]
        if not whole:
            longest = max(map(len, recorder.continuations))
            raise UserError(
                f"{len(where.starts)} starts and drafts of {where.draft_tokens} need {where.num_output} tokens of output; "
                f"the longest answer has {longest}: take fewer --starts or another dataset"
            )
        drafts = {name: record(recorder, method, where, bars) for name, method in named.items()}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.npz"
            write_traces(
                str(path),
                where.starts[0],
                where.stride,
                {name: d.accepted[whole] for name, d in drafts.items()},
                {name: d.confidence[whole] for name, d in drafts.items()},
                {name: d.match[whole] for name, d in drafts.items()},
            )
            content = path.read_bytes()
        summary = reports.trace_summary(drafts)
        report = {
            "model": workload.config.model,
            "dataset": workload.dataset,
            "prompt_tokens": [len(workload.prompts[r]) for r in whole],
            "first_start": where.starts[0],
            "stride": where.stride,
            "settings": {name: reports.method_json(method) for name, method in named.items()},
            "methods": summary,
        }
        bars.stop()
        dropped = len(workload.prompts) - len(whole)
        if dropped:
            bars.print(
                f"{dropped} of {len(workload.prompts)} requests left out: their answers end before {where.num_output} tokens"
            )
        for name, row in summary.items():
            bars.print(f"{name}: accepted length {row['mean_accepted_length']:.2f}")
        trace.write_bytes(content)
        out.write_json(report)
