"""Throughput of a batch of requests under several methods.

All methods decode the same prompts with one model and one KV cache; plain decoding always runs, as the reference. Decoding
is greedy. The prompts come from --dataset (a text file, cut into pieces of different lengths, or JSONL with "prompt" or
"messages" in each line), from --preset demo, or from the shipped text.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from typing import Any

from aspire_llm.cli.options import add_engine_options, comma_list, engine_options
from aspire_llm.cli.output_file import OutputFile
from aspire_llm.cli.progress import ProgressBars
from aspire_llm.errors import UserError

PRESETS = ("demo",)
DEFAULT_METHODS = ("plain", "vegas", "aspire-ema", "aspire")
DEFAULT_MAX_TOKENS = 128
MOST_AT_ONCE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", metavar="NAME", help="demo: 8 tasks on public-domain texts of 4,000 to 6,000 tokens"
    )
    parser.add_argument("--method", metavar="A,B,…", help=f"methods to compare (default {','.join(DEFAULT_METHODS)})")
    parser.add_argument("--dataset", metavar="FILE", help="where prompts come from: a text file or .jsonl")
    parser.add_argument("--prompt-tokens", metavar="N-M", help="lengths of the pieces that a text is cut into")
    parser.add_argument("--requests", metavar="N", help="requests decoded together (default 8)")
    parser.add_argument("--max-tokens", metavar="N", help=f"most tokens of output (default {DEFAULT_MAX_TOKENS})")
    parser.add_argument("--ignore-eos", action="store_true", help="always --max-tokens tokens of output")
    parser.add_argument("--repeats", metavar="N", help="measure each method so often, in turn (default 1)")
    parser.add_argument("--seed", metavar="N", help="chooses the places in the text, or the rows (default 0)")
    parser.add_argument("--json", metavar="FILE", help="write the results, with every request's")
    add_engine_options(parser, exclude=("method", "seed", "context", "policy", "draft_sampling"))


def run(args: argparse.Namespace) -> None:
    if args.preset is not None and args.preset not in PRESETS:
        raise UserError(f"--preset {args.preset!r} is unknown; known: {', '.join(PRESETS)}")
    if args.preset is not None and (args.dataset is not None or args.prompt_tokens is not None):
        other = "--dataset" if args.dataset is not None else "--prompt-tokens"
        raise UserError(f"--preset {args.preset} brings its own prompts; {other} does nothing with it")
    requests = whole_number("--requests", args.requests, 1) if args.requests is not None else None
    repeats = whole_number("--repeats", args.repeats or "1", 1)
    seed = whole_number("--seed", args.seed or "0", 0)
    max_tokens = whole_number("--max-tokens", args.max_tokens or str(DEFAULT_MAX_TOKENS), 1)
    methods = comma_list(args.method) if args.method is not None else DEFAULT_METHODS
    if not methods:
        raise UserError(f"--method {args.method!r} names no method")
    options = {"max_num_seqs": min(requests or 8, MOST_AT_ONCE), **engine_options(args)}
    lengths = length_range(args.prompt_tokens) if args.prompt_tokens is not None else None
    with OutputFile(args.json, "--json") as out, ProgressBars() as bars:
        bars.show("starting", 0, 0)
        # torch is imported from here on
        from aspire_llm.bench.datasets import read_dataset
        from aspire_llm.bench.offline import method_configs, run_offline
        from aspire_llm.bench.offline_report import offline_notes, offline_report, offline_table
        from aspire_llm.bench.presets import default_dataset, demo_dataset
        from aspire_llm.request import SamplingParams

        configs = method_configs(methods, options)
        if args.preset == "demo":
            dataset = demo_dataset()
        else:
            dataset = read_dataset(args.dataset, lengths) if args.dataset is not None else default_dataset(lengths)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=args.ignore_eos)
        offline = run_offline(
            configs, dataset, params, requests=requests, repeats=repeats, seed=seed, on_progress=bars.show
        )
        report = offline_report(offline, shlex.join(["aspire-llm", *sys.argv[1:]]))
        bars.stop()
        bars.print(offline_table(report), *offline_notes(offline))
        out.write_json(report)


def whole_number(option: str, text: str, least: int) -> int:
    try:
        value: Any = int(text)
    except ValueError:
        value = None
    if value is None or value < least:
        raise UserError(f"{option} {text}: must be a whole number, at least {least}")
    return int(value)


def length_range(text: str) -> tuple[int, int]:
    """ "4000-6000" or "4000"."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise UserError(f"--prompt-tokens {text}: must be N or N-M, with 1 <= N <= M")
    return int(match[1]), int(match[2] or match[1])
