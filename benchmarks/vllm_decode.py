"""Plain decoding of vLLM at a model shape (dummy weights): tokens/s while the whole batch decodes, prefill excluded.

Usage: python benchmarks/vllm_decode.py SECONDS SHAPE BATCHxCONTEXT,… [REPEATS]
with vLLM importable and VLLM_USE_FLASHINFER_SAMPLER=0. Needs nothing of aspire-llm, so that both need not fit one process.

The prompts are random tokens, prefilled once (prefix cache). A step is the difference between generating LONG and SHORT
tokens, over their difference in tokens, so what happens once a call cancels; repeats give the interval.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from shapes import SHAPES, model_folder

SHORT, LONG = 16, 112
BANDWIDTH = 4.45e12  # bytes a second, read: measured on an H200

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    end = time.perf_counter() + float(sys.argv[1])
    shape = sys.argv[2]
    cells = [tuple(map(int, cell.split("x"))) for cell in sys.argv[3].split(",")]
    repeats = int(sys.argv[4]) if len(sys.argv) > 4 else 3
    out = Path(os.environ.get("OUT") or Path(__file__).parent / "results" / "h200")
    out.mkdir(parents=True, exist_ok=True)
    import torch
    import vllm  # type: ignore[import-not-found]
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    sizes = sorted({1, 2, 4, 8, 16, 32, 64} | {batch for batch, _ in cells})
    llm = LLM(
        model_folder(shape), load_format="dummy", skip_tokenizer_init=True, max_model_len=max(n for _, n in cells) + 256,
        gpu_memory_utilization=0.92, enable_prefix_caching=True, max_num_seqs=max(sizes), max_num_batched_tokens=16384,
        dtype="bfloat16", cudagraph_capture_sizes=sizes,
    )  # fmt: skip
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]), "machine": torch.cuda.get_device_name(),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__}, "shape": shape,
        "start_up_s": time.perf_counter() - began, "cells": {},
    }  # fmt: skip
    print(f"vllm {vllm.__version__} {shape}: start-up {report['start_up_s']:.1f} s", flush=True)
    numbers = SHAPES[shape]
    slowest = 0.0
    for batch, length in cells:
        if end - time.perf_counter() < slowest:
            print(f"no time for {batch}x{length}", flush=True)
            continue
        started = time.perf_counter()
        try:
            rng = random.Random(batch * length)
            prompts: Any = [{"prompt_token_ids": rng.choices(range(1000, 120000), k=length)} for _ in range(batch)]

            def generate(tokens: int, prompts: Any = prompts) -> float:
                params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
                at = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                return time.perf_counter() - at

            prefill = generate(1)
            generate(SHORT)
            steps = []
            for _ in range(repeats):
                short, long = generate(SHORT), generate(LONG)
                steps.append((long - short) / (LONG - SHORT))
            kv = (
                batch * length * numbers["num_hidden_layers"] * 4 * numbers["num_key_value_heads"] * numbers["head_dim"]
            )
            row = {
                "prefill_s": prefill, "step_ms": [1e3 * step for step in steps], "tokens_per_s": [batch / step for step in steps],
                "kv_floor_ms": 1e3 * kv / BANDWIDTH,
            }  # fmt: skip
            report["cells"][f"{batch}x{length}"] = row
            llm.reset_prefix_cache()
            step = median(steps)
            print(
                f"vllm {shape} {batch}x{length}: step {1e3 * step:.2f} ms ({1e3 * min(steps):.2f}-{1e3 * max(steps):.2f}), "
                f"{batch / step:.0f} tok/s; KV alone {row['kv_floor_ms']:.1f} ms; prefill {prefill:.1f} s",
                flush=True,
            )
        except Exception as error:  # the other cells may still run
            print(f"vllm {shape} {batch}x{length} failed: {error!r}", flush=True)
            report.setdefault("failed", {})[f"{batch}x{length}"] = repr(error)
        slowest = max(slowest, time.perf_counter() - started)
        (out / f"vllm-{shape}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
