"""Every kernel of a decoding step against the roofline of its device.

Attention over a paged cache (drafts, verifications, prefill, mixes), scores, top-k, the cache's writes, element-wise steps,
products and the sampler, at a model's shape, with random numbers. The floor is what the device itself reads and computes a
second, measured in the same run. No model is loaded.
"""

from __future__ import annotations

import argparse
import re

from aspire_llm.cli.numbers import whole_number, whole_numbers
from aspire_llm.cli.options import comma_list
from aspire_llm.cli.output_file import OutputFile
from aspire_llm.cli.progress import ProgressBars
from aspire_llm.cli.provenance import command_line, now
from aspire_llm.errors import UserError

# on a GPU, and on a CPU, where everything is a thousand times smaller
DEFAULT_SHAPE = {"cuda": "qwen3-8b", "cpu": "smollm2-135m"}
DEFAULT_CELLS = {"cuda": "64x8192,32x16384,16x32768,6x90000", "cpu": "8x4096"}
DEFAULT_BUDGET = {"cuda": "512", "cpu": "256"}
DEFAULT_REPEATS = {"cuda": "11", "cpu": "7"}
DEFAULT_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", metavar="NAME", help="whose layers: qwen3-8b (default on a GPU), smollm2-135m (on a CPU), …"
    )
    parser.add_argument("--device", metavar="NAME", help="cuda or cpu (default: a GPU where there is one)")
    parser.add_argument("--dtype", metavar="NAME", help=f"{', '.join(DTYPES)} (default bfloat16; on a CPU float32)")
    parser.add_argument("--backend", metavar="NAME", help="triton (default on a GPU) or reference (on a CPU)")
    parser.add_argument("--cells", metavar="NxM,…", help="batches: requests x tokens of each")
    parser.add_argument("--budget", metavar="N", help="positions of a draft's context set")
    parser.add_argument("--verify-tokens", metavar="N,…", help="tokens of verifications (default 1,8,17)")
    parser.add_argument(
        "--tokens", metavar="N,…", help="tokens of products and element-wise steps (default 1,16,64,160)"
    )
    parser.add_argument("--block-size", metavar="N", help="positions of a page (default 64)")
    parser.add_argument("--groups", metavar="A,B,…", help="only these kernels: attention, mixes, scores, selection, …")
    parser.add_argument("--repeats", metavar="N", help="measurements of each kernel")
    parser.add_argument("--json", metavar="FILE", help="write the results")


def run(args: argparse.Namespace) -> None:
    started = now()
    with OutputFile(args.json, "--json") as out, ProgressBars() as bars:
        bars.show("starting", 0, 0)
        # torch is imported from here on
        import torch

        from aspire_llm.bench.kernels import GROUPS, KernelRun, run_kernels
        from aspire_llm.bench.kernels_report import kernels_notes, kernels_table
        from aspire_llm.bench.kernels_shape import find_shape

        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device not in DEFAULT_SHAPE:
            raise UserError(f"--device {device!r}: must be cuda or cpu")
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: there is no usable GPU here; cpu is")
        if args.backend not in (None, "triton", "reference"):
            raise UserError(f"--backend {args.backend!r}: must be triton or reference")
        by_triton = args.backend == "triton" or (args.backend is None and device == "cuda")
        dtype = args.dtype or DEFAULT_DTYPE[device]
        if dtype not in DTYPES:
            raise UserError(f"--dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
        name = args.shape or DEFAULT_SHAPE[device]
        kernel_run = KernelRun(
            backend="triton" if by_triton else "reference",
            shape_name=name,
            shape=find_shape(name, getattr(torch, dtype)),
            device=torch.device(device),
            cells=cells(args.cells or DEFAULT_CELLS[device]),
            budget=whole_number("--budget", args.budget or DEFAULT_BUDGET[device], 1),
            verify_tokens=whole_numbers("--verify-tokens", args.verify_tokens or "1,8,17", 1),
            token_counts=whole_numbers("--tokens", args.tokens or "1,16,64,160", 1),
            page_size=whole_number("--block-size", args.block_size or "64", 1),
            repeats=whole_number("--repeats", args.repeats or DEFAULT_REPEATS[device], 1),
            groups=comma_list(args.groups) if args.groups is not None else GROUPS,
        )
        report = run_kernels(kernel_run, command_line(), started, lambda case: bars.show(case, 0, 0))
        bars.stop()
        bars.print(kernels_table(report), *kernels_notes(report))
        out.write_json(report)


def cells(text: str) -> list[tuple[int, int]]:
    """ "64x8192,32x16384"."""
    found = []
    for part in comma_list(text):
        match = re.fullmatch(r"(\d+)x(\d+)", part)
        if match is None or not int(match[1]) or not int(match[2]):
            raise UserError(f"--cells {part}: must be NxM, requests times tokens, such as 32x16384")
        found.append((int(match[1]), int(match[2])))
    if not found:
        raise UserError(f"--cells {text!r} names no batch")
    return found
