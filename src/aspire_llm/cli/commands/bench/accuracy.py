"""Whether methods change what a model says: scores of their outputs, and the tokens that differ.

The first method is the reference; every method decodes the same prompts greedily. Prompts with known answers (needles, files
in the shape of LongBench, RULER or AIME) are scored by exact match, F1, ROUGE-L, and whether the answer is in the text.
"""

from __future__ import annotations

import argparse

from aspire_llm.cli.numbers import whole_number
from aspire_llm.cli.options import add_engine_options, comma_list, engine_options
from aspire_llm.cli.output_file import OutputFile
from aspire_llm.cli.progress import ProgressBars
from aspire_llm.cli.provenance import command_line, now
from aspire_llm.cli.workload import add_dataset_options, dataset_of
from aspire_llm.errors import UserError

DEFAULT_METHODS = ("plain", "aspire")
DEFAULT_REQUESTS = 8
DEFAULT_MAX_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method", metavar="A,B,…", help=f"methods to compare with the first (default {','.join(DEFAULT_METHODS)})"
    )
    add_dataset_options(parser, "needles")
    parser.add_argument("--requests", metavar="N", help=f"how many prompts (default {DEFAULT_REQUESTS})")
    parser.add_argument("--max-tokens", metavar="N", help=f"most tokens of output (default {DEFAULT_MAX_TOKENS})")
    parser.add_argument("--ignore-eos", action="store_true", help="always --max-tokens tokens of output")
    parser.add_argument("--seed", metavar="N", help="chooses the rows or places, and makes the needles (default 0)")
    parser.add_argument("--json", metavar="FILE", help="write scores, outputs and where they part")
    add_engine_options(parser, exclude=("method", "seed", "context", "policy", "draft_sampling"))


def run(args: argparse.Namespace) -> None:
    started = now()
    methods = comma_list(args.method) if args.method is not None else DEFAULT_METHODS
    if len(dict.fromkeys(methods)) < 2:
        raise UserError(f"--method {args.method}: at least two different methods are needed")
    requests = whole_number("--requests", args.requests or str(DEFAULT_REQUESTS), 1)
    max_tokens = whole_number("--max-tokens", args.max_tokens or str(DEFAULT_MAX_TOKENS), 1)
    seed = whole_number("--seed", args.seed or "0", 0)
    options = {"max_num_seqs": min(requests, 64), **engine_options(args)}
    with OutputFile(args.json, "--json") as out, ProgressBars() as bars:
        bars.show("starting", 0, 0)
        # torch is imported from here on
        from aspire_llm.bench import environment
        from aspire_llm.bench.accuracy import accuracy_notes, accuracy_report, accuracy_table, run_accuracy
        from aspire_llm.bench.methods import HINDSIGHT, method_configs
        from aspire_llm.request import SamplingParams

        if HINDSIGHT in methods:
            raise UserError(
                f"--method {args.method}: {HINDSIGHT} is told the output of plain decoding, so it shows nothing here"
            )
        configs = method_configs(methods, options)
        dataset = dataset_of(args, "needles")
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=args.ignore_eos)
        accuracy = run_accuracy(configs, dataset, params, requests=requests, seed=seed, on_progress=bars.show)
        report = accuracy_report(accuracy, environment.report(command_line(), started), seed, max_tokens)
        bars.stop()
        bars.print(accuracy_table(report), *accuracy_notes(report))
        out.write_json(report)
