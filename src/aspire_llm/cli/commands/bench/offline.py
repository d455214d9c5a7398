"""Throughput of a batch of requests under several methods.

All methods decode the same prompts with one model and one KV cache; plain decoding always runs, as the reference. Decoding
is greedy. Prompts come from --dataset, from --preset demo, or from the shipped text. With several --seeds and --repeats the
methods take turns, and speeds are medians with 95 % intervals. --replay and --replay-lengths let a trace decide which drafts
are accepted, for models whose weights are not at hand (--load-format dummy).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from aspire_llm.cli.numbers import whole_number as whole_number
from aspire_llm.cli.numbers import whole_numbers
from aspire_llm.cli.options import add_engine_options, comma_list, engine_options
from aspire_llm.cli.output_file import OutputFile
from aspire_llm.cli.progress import ProgressBars
from aspire_llm.cli.provenance import command_line, now
from aspire_llm.cli.workload import add_dataset_options, dataset_of
from aspire_llm.errors import UserError

if TYPE_CHECKING:
    from aspire_llm.bench.replay_source import ReplaySource

PRESETS = ("demo",)
DEFAULT_METHODS = ("plain", "vegas", "aspire-ema", "aspire")
DEFAULT_MAX_TOKENS = 128
MOST_AT_ONCE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", metavar="NAME", help="demo: 8 tasks on public-domain texts of 4,000 to 6,000 tokens"
    )
    parser.add_argument(
        "--method",
        metavar="A,B,…",
        help=f"methods to compare, and hindsight, the upper bound (default {','.join(DEFAULT_METHODS)})",
    )
    add_dataset_options(parser, "the shipped text")
    parser.add_argument("--requests", metavar="N", help="requests decoded together (default 8)")
    parser.add_argument("--max-tokens", metavar="N", help=f"most tokens of output (default {DEFAULT_MAX_TOKENS})")
    parser.add_argument("--ignore-eos", action="store_true", help="always --max-tokens tokens of output")
    parser.add_argument("--repeats", metavar="N", help="measure each method so often a seed, in turn (default 1)")
    parser.add_argument(
        "--seeds", metavar="N,N,…", help="each chooses other prompts, and other replayed fates (default 0)"
    )
    parser.add_argument(
        "--replay", metavar="TRACE", help="drafts are accepted as in this trace file, or shipped trace (by name)"
    )
    parser.add_argument(
        "--replay-method", metavar="NAME", help="drafting context in the trace (default: the project's own)"
    )
    parser.add_argument(
        "--replay-lengths",
        metavar="MEAN,MIN,MAX",
        help="drafts are accepted so that requests' mean accepted lengths have this mean and bounds, say 11.5,2.56,20",
    )
    parser.add_argument("--json", metavar="FILE", help="write the results, with every request's and every step's")
    add_engine_options(parser, exclude=("method", "seed", "context", "policy", "draft_sampling"))


def run(args: argparse.Namespace) -> None:
    started = now()
    if args.preset is not None and args.preset not in PRESETS:
        raise UserError(f"--preset {args.preset!r} is unknown; known: {', '.join(PRESETS)}")
    for option, given in (
        ("--dataset", args.dataset),
        ("--dataset-format", args.dataset_format),
        ("--prompt-tokens", args.prompt_tokens),
        ("--needles", args.needles),
    ):
        if args.preset is not None and given is not None:
            raise UserError(f"--preset {args.preset} brings its own prompts; {option} does nothing with it")
    requests = whole_number("--requests", args.requests, 1) if args.requests is not None else None
    repeats = whole_number("--repeats", args.repeats or "1", 1)
    seeds = whole_numbers("--seeds", args.seeds or "0", 0)
    max_tokens = whole_number("--max-tokens", args.max_tokens or str(DEFAULT_MAX_TOKENS), 1)
    methods = comma_list(args.method) if args.method is not None else DEFAULT_METHODS
    if not methods:
        raise UserError(f"--method {args.method!r} names no method")
    options = {"max_num_seqs": min(requests or 8, MOST_AT_ONCE), **engine_options(args)}
    with OutputFile(args.json, "--json") as out, ProgressBars() as bars:
        bars.show("starting", 0, 0)
        # torch is imported from here on
        from aspire_llm.bench.methods import method_configs
        from aspire_llm.bench.offline import REFERENCE, Plan, run_offline
        from aspire_llm.bench.offline_report import offline_notes, offline_report, offline_table
        from aspire_llm.bench.presets import demo_dataset
        from aspire_llm.request import SamplingParams

        replay = replay_of(args)
        configs = method_configs((REFERENCE, *methods), options)
        dataset = demo_dataset() if args.preset == "demo" else dataset_of(args, "text")
        # a replayed run is as long as asked for: its tokens, and so its ends, mean nothing
        ignore_eos = args.ignore_eos or replay is not None
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        plan = Plan(params, requests, seeds, repeats, replay)
        report = offline_report(run_offline(configs, dataset, plan, on_progress=bars.show), command_line(), started)
        bars.stop()
        bars.print(offline_table(report), *offline_notes(report))
        out.write_json(report)


def replay_of(args: argparse.Namespace) -> ReplaySource | None:
    """Raises UserError."""
    from aspire_llm.bench.replay_source import lengths_source, recorded_source

    if args.replay is not None and args.replay_lengths is not None:
        raise UserError("--replay and --replay-lengths exclude each other")
    if args.replay_method is not None and args.replay is None:
        raise UserError(f"--replay-method {args.replay_method} does nothing without --replay")
    if args.replay is not None:
        return recorded_source(args.replay, args.replay_method)
    return lengths_source(args.replay_lengths) if args.replay_lengths is not None else None
