"""Replay acceptance traces under scheduling policies: tokens per second, and how near that comes to hindsight.

No model is needed. --cost is a JSON object with any of "fixed", "per_token", "per_kv" (seconds, or any unit of time),
"free_tokens", "per_check", "verify_step", "context_length", and "budget", "num_layers", "num_refresh_layers" together. A policy
of fixed draft length has it after a colon: staggered:8. Speed-ups are over plain decoding; intervals are of the share of
hindsight, 95 %, by bootstrap over the requests of a trace.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from aspire_llm.cli.numbers import whole_number
from aspire_llm.cli.options import comma_list
from aspire_llm.cli.output_file import OutputFile
from aspire_llm.errors import UserError

DEFAULT_POLICIES = ("ema", "confidence", "hindsight")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", metavar="FILE.npz", action="append", help="a trace file; may be repeated (default: the shipped ones)"
    )
    parser.add_argument(
        "--trace-method", metavar="NAME", help="drafting context in the traces (default: the project's own)"
    )
    parser.add_argument(
        "--cost", metavar="FILE", help="coefficients of a step's time (default: 16 requests at 28,000 tokens)"
    )
    parser.add_argument("--policy", metavar="A,B,…", help=f"policies to replay (default {','.join(DEFAULT_POLICIES)})")
    parser.add_argument("--batch-size", metavar="N", help="most requests at once (default 16)")
    parser.add_argument(
        "--arrival-rate", metavar="X", help="requests per unit of time, Poisson (default: always a full batch)"
    )
    parser.add_argument("--late", action="store_true", help="results reach the policy one step late, as on a GPU")
    parser.add_argument("--tokens", metavar="N", help="output tokens of each request (default 512)")
    parser.add_argument("--repeats", metavar="N", help="times each request of a trace is replayed (default 8)")
    parser.add_argument(
        "--max-verify-tokens", metavar="N", help="most tokens of verifications a step (default: no bound)"
    )
    parser.add_argument("--seed", metavar="N", help="of starts and arrivals (default 0)")
    parser.add_argument("--out", metavar="FILE.png", help="write a plot")
    parser.add_argument("--json", metavar="FILE", help="write the results")


def run(args: argparse.Namespace) -> None:
    from aspire_llm.policy.simulator import Replay, format_report, read_cost, simulate
    from aspire_llm.policy.trace import Trace, default_method, read_traces, shipped_traces

    policies = comma_list(args.policy) if args.policy is not None else DEFAULT_POLICIES
    if not policies:
        raise UserError(f"--policy {args.policy!r} names none")
    replay = Replay(
        batch_size=whole_number("--batch-size", args.batch_size or "16", 1),
        arrival_rate=None if args.arrival_rate is None else number("--arrival-rate", args.arrival_rate),
        late=args.late,
        tokens=whole_number("--tokens", args.tokens or "512", 1),
        repeats=whole_number("--repeats", args.repeats or "8", 1),
        seed=whole_number("--seed", args.seed or "0", 0),
    )
    bound = None if args.max_verify_tokens is None else whole_number("--max-verify-tokens", args.max_verify_tokens, 1)
    with OutputFile(args.out, "--out") as picture, OutputFile(args.json, "--json") as out:
        if args.out is not None:
            from aspire_llm.analysis.plots import plot_simulation, require_matplotlib

            require_matplotlib()
        cost = read_cost(args.cost) if args.cost is not None else None
        traces: dict[str, Trace] = {}
        if args.trace is None:
            traces = shipped_traces(args.trace_method)
        for path in args.trace or ():
            methods = read_traces(path)
            method = args.trace_method or default_method(methods)
            if method not in methods:
                raise UserError(f"--trace-method {method!r}: {path} has {', '.join(methods)}")
            name = Path(path).name.removesuffix(".npz")
            traces[name if name not in traces else path] = methods[method]
        report = simulate(traces, cost, policies, replay, max_verify_tokens=bound)
        print(format_report(report))
        if args.out is not None:
            picture.write_bytes(plot_simulation(report))
        out.write_json(report)


def number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{option} {text}: must be a number") from None
