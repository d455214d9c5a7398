"""An OpenAI server under load: latencies, throughput, goodput, speculation.

A client of any server with /v1/completions or /v1/chat/completions; answers are streamed. Requests arrive as a Poisson
process (--request-rate), or so many are always under way (--max-concurrency), or both. Every request is counted, those
that failed by what became of them.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aspire_llm.cli.numbers import whole_number
from aspire_llm.cli.output_file import OutputFile
from aspire_llm.cli.progress import ProgressBars
from aspire_llm.cli.provenance import now
from aspire_llm.cli.workload import add_dataset_options, dataset_of
from aspire_llm.errors import UserError

if TYPE_CHECKING:
    from aspire_llm.engine.inputs import InputProcessor

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
DEFAULT_TIMEOUT = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", metavar="URL", help="of the server (default http://127.0.0.1:8000)")
    parser.add_argument("--model", metavar="NAME", help="as the server calls it (default: the only one it serves)")
    parser.add_argument("--endpoint", metavar="PATH", help=f"{' or '.join(ENDPOINTS)} (default: as the dataset has it)")
    parser.add_argument(
        "--request-rate", metavar="X", help="requests a second, Poisson; inf: all at once (default inf)"
    )
    parser.add_argument("--max-concurrency", metavar="N", help="requests under way at once (default: any number)")
    parser.add_argument("--num-prompts", metavar="N", help="requests to send (default 8)")
    add_dataset_options(parser, "shipped tasks")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="a model whose tokenizer measures prompts (needed to cut texts)"
    )
    parser.add_argument("--max-tokens", metavar="N", help="most tokens of output (default 128)")
    parser.add_argument("--temperature", metavar="X", help="0: greedy (default 0)")
    parser.add_argument("--ignore-eos", action="store_true", help="always --max-tokens tokens of output (an extension)")
    parser.add_argument("--seed", metavar="N", help="of the choice of prompts and of the arrivals (default 0)")
    parser.add_argument("--num-warmups", metavar="N", help="requests sent before, unmeasured (default 1)")
    parser.add_argument(
        "--request-timeout", metavar="X", help=f"seconds for a whole request (default {DEFAULT_TIMEOUT:g})"
    )
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token; stays out of the results")
    parser.add_argument("--goodput", metavar="A:MS,…", help="targets for ttft, tpot, e2el, such as ttft:500,tpot:50")
    parser.add_argument("--json", metavar="FILE", help="write the results, with every request's")


def run(args: argparse.Namespace) -> None:
    started = now()
    rate = _number("--request-rate", args.request_rate) if args.request_rate not in (None, "inf") else None
    concurrency = whole_number("--max-concurrency", args.max_concurrency, 1) if args.max_concurrency else None
    count = whole_number("--num-prompts", args.num_prompts, 1) if args.num_prompts is not None else None
    seed = whole_number("--seed", args.seed or "0", 0)
    timeout = _number("--request-timeout", args.request_timeout) if args.request_timeout else DEFAULT_TIMEOUT
    temperature = _number("--temperature", args.temperature, zero=True) if args.temperature else 0.0
    if args.endpoint is not None and args.endpoint not in ENDPOINTS:
        raise UserError(f"--endpoint {args.endpoint}: must be {' or '.join(ENDPOINTS)}")
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise UserError("bench serve needs httpx: pip install 'aspire-llm[bench]'") from None
    with OutputFile(args.json, "--json") as out, ProgressBars("requests") as bars:
        bars.show("starting", 0, 0)
        from aspire_llm.bench.serve import ServeRun, run_serve
        from aspire_llm.bench.serve_figures import parse_goodput, serve_notes, serve_tables
        from aspire_llm.bench.serve_load import Load

        serve_run = ServeRun(
            base_url=args.base_url or "http://127.0.0.1:8000",
            model=args.model,
            dataset=dataset_of(args, None),
            load=Load(rate, concurrency, timeout, seed),
            inputs=_inputs(args.tokenizer) if args.tokenizer is not None else None,
            endpoint=args.endpoint,
            count=count,
            max_tokens=whole_number("--max-tokens", args.max_tokens or "128", 1),
            temperature=temperature,
            ignore_eos=args.ignore_eos,
            seed=seed,
            warm_ups=whole_number("--num-warmups", args.num_warmups or "1", 0),
            api_key=args.api_key,
            goodput=parse_goodput(args.goodput) if args.goodput is not None else None,
        )
        report = asyncio.run(run_serve(serve_run, command_line(sys.argv[1:]), started, bars.show))
        bars.stop()
        bars.print(*serve_tables(report), *serve_notes(report))
        out.write_json(report)
    if "ok" not in report["outcomes"]:
        became = ", ".join(f"{n} {kind}" for kind, n in report["outcomes"].items())
        raise UserError(f"no request succeeded: {became}")


def command_line(arguments: Sequence[str]) -> str:
    """As it was typed, without the key."""
    shown = list(arguments)
    for i, argument in enumerate(shown):
        if argument == "--api-key" and i + 1 < len(shown):
            shown[i + 1] = "***"
        elif argument.startswith("--api-key="):
            shown[i] = "--api-key=***"
    return shlex.join(["aspire-llm", *shown])


def _inputs(tokenizer: str) -> InputProcessor:
    from aspire_llm.engine.inputs import InputProcessor
    from aspire_llm.models.load import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    return InputProcessor(loaded.tokenizer, loaded.config.vocab_size, loaded.eos_token_ids, 0)


def _number(option: str, text: str, *, zero: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (value >= 0 if zero else value > 0) or value == float("inf"):
        raise UserError(f"{option} {text}: must be a number, {'0 or more' if zero else 'more than 0'}")
    return value
