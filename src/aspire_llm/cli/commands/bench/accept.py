"""How much of drafts is accepted: by method, budget, draft position and context length.

From many positions of a model's own plain output a draft is made and compared with what follows, for every method from the
very same positions. No policy takes part: drafts go on for --draft-tokens tokens whatever happens.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from aspire_llm.cli.numbers import whole_numbers
from aspire_llm.cli.options import comma_list
from aspire_llm.cli.output_file import OutputFile
from aspire_llm.cli.progress import ProgressBars
from aspire_llm.cli.provenance import command_line, now
from aspire_llm.cli.workload import (
    CONTEXT_OPTIONS,
    MODEL_OPTIONS,
    Workload,
    add_draft_options,
    add_workload_options,
    choose_prompts,
    dataset_of,
    method_of,
    penultimate,
    places,
    prefilled,
    record,
    requests_and_seed,
    skipped_note,
)
from aspire_llm.config import METHODS, make_config, selector_names
from aspire_llm.errors import UserError

if TYPE_CHECKING:
    from aspire_llm.analysis.recorder import Method

DEFAULT_METHODS = ("window", "verified", "penultimate", "refreshed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    drafting = [name for name, preset in METHODS.items() if preset.context is not None]
    parser.add_argument(
        "--methods",
        metavar="A,B,…",
        help=f"what drafts read: {', '.join(selector_names())}, penultimate (refreshed, by the penultimate layer), or a "
        f"method ({', '.join(drafting)}) (default {','.join(DEFAULT_METHODS)})",
    )
    parser.add_argument("--budgets", metavar="N,N,…", help="positions in a drafting context (default: the engine's)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers of every position and request")
    add_workload_options(parser, MODEL_OPTIONS | CONTEXT_OPTIONS - {"context", "budget"})
    add_draft_options(parser, starts=24, stride=4)
    for action in parser._actions:
        if action.dest == "prompt_tokens":
            action.help = (
                "lengths of prompts, such as 2K-4K; several, separated by commas, are measured one after the other"
            )


def run(args: argparse.Namespace) -> None:
    started = now()
    where = places(args)
    names = comma_list(args.methods) if args.methods is not None else DEFAULT_METHODS
    check_methods(names)
    given = whole_numbers("--budgets", args.budgets, 4) if args.budgets is not None else None
    lengths = comma_list(args.prompt_tokens) if args.prompt_tokens is not None else (None,)
    requests, seed = requests_and_seed(args)
    from aspire_llm.cli.options import engine_options

    config = make_config(**engine_options(args))
    with OutputFile(args.json, "--json") as out, ProgressBars() as bars:
        bars.show("loading", 0, 0)
        from aspire_llm.analysis.reports import method_json
        from aspire_llm.bench import environment
        from aspire_llm.bench.accept import accept_table, acceptance
        from aspire_llm.engine.build import load

        datasets = [dataset_of(argparse.Namespace(**{**vars(args), "prompt_tokens": text}), None) for text in lengths]
        model = load(config)
        # every workload before any is measured: what does not fit is said at once
        workloads = [choose_prompts(config, model, each, requests, seed, where.num_output) for each in datasets]
        rows: list[dict[str, Any]] = []
        left_out: list[dict[str, Any]] = []
        skipped: dict[str, int] = {}
        for workload in workloads:
            for reason, n in workload.selection.skipped.items():
                skipped[reason] = skipped.get(reason, 0) + n
            shortest, longest = min(map(len, workload.prompts)), max(map(len, workload.prompts))
            recorder = None
            for name, method in methods_of(names, given, workload):
                about = {"method": name, **method_json(method), "prompt_tokens": [shortest, longest]}
                if shortest <= method.budget:
                    left_out.append({**about, "reason": "the shortest prompt is not longer than the budget"})
                    continue
                recorder = recorder or prefilled(workload, where.num_output, bars)
                drafts = record(recorder, method, where, bars)
                rows.append({**about, **acceptance(drafts.accepted, drafts.measured, where.draft_tokens, seed)})
            del recorder  # its cache, before the next one's
        if not rows:
            raise UserError(
                f"budget {left_out[0]['budget']}: the shortest prompt has {left_out[0]['prompt_tokens'][0]} tokens, so "
                "nothing would be left out; take longer prompts or smaller --budgets"
            )
        report = {
            "kind": "accept",
            "replayed": False,
            "environment": environment.report(command_line(), started),
            "model": config.model,
            "workload": {
                "dataset": workloads[0].dataset,
                "format": workloads[0].format,
                "requests": requests,
                "seed": seed,
                "skipped": skipped,
            },
            "starts": len(where.starts),
            "first_start": where.starts[0],
            "stride": where.stride,
            "draft_tokens": where.draft_tokens,
            "rows": rows,
            "left_out": left_out,
        }
        bars.stop()
        bars.print(accept_table(rows, where.draft_tokens))
        if left_out:
            cells = ", ".join(f"{c['method']} {c['budget']} at {c['prompt_tokens'][0]} tokens" for c in left_out)
            bars.print(f"left out, since the budget is the whole prompt: {cells}")
        if skipped:
            bars.print(skipped_note(skipped))
        bars.print("Intervals: 95 %, bootstrap over requests.")
        out.write_json(report)


def check_methods(names: tuple[str, ...]) -> None:
    if not names:
        raise UserError("--methods names none")
    drafting = [name for name, preset in METHODS.items() if preset.context is not None]
    known = (*selector_names(), "penultimate", *drafting)
    for name in names:
        if name not in known:
            raise UserError(f"--methods: {name!r} is unknown; known: {', '.join(known)}")


def methods_of(names: tuple[str, ...], budgets: tuple[int, ...] | None, workload: Workload) -> list[tuple[str, Method]]:
    """Every method with every budget."""
    from dataclasses import replace

    from aspire_llm.analysis.recorder import Method

    own = method_of(workload)  # as an engine would refresh: by the profile's layers, else the penultimate
    made: list[tuple[str, Method]] = []
    for name in names:
        context = METHODS[name].context if name in METHODS else name
        for budget in budgets or (own.budget,):
            if context == "refreshed":
                method = replace(own, budget=budget)
            elif context == "penultimate":
                method = replace(own, budget=budget, refresh_layers=penultimate(workload.model))
            else:
                method = Method(context, budget)  # type: ignore[arg-type]
            made.append((name, method))
    return made
