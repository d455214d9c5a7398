"""The engine on one H200, in one run: exactness, step times at the Qwen3-8B shape, idle time, replayed speed-up.

Usage: python benchmarks/engine.py PART... with parts exact, plain, methods, overhead; JSON goes to $OUT (or the folder here).
Dummy weights; K/V of the prompts are random numbers put into the cache by hand, since their values do not change the work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from common import cached_prompts, fill

from aspire_llm import LLM, SamplingParams, __version__
from aspire_llm.bench.replay import ReplaySampler
from aspire_llm.policy.trace import shipped_traces
from aspire_llm.request import RowKind

OUT = Path(os.environ.get("OUT") or Path(__file__).parent / "results" / "h200")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "small": {
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "tie_word_embeddings": True,
    },
}  # fmt: skip
CELLS = [(64, 8192), (32, 16384), (16, 32768), (6, 90000)]
VLLM_TOKENS_PER_S = {(64, 8192): 2652, (32, 16384): 1424, (16, 32768): 694, (6, 90000): 197}  # FINDINGS, vLLM 0.26.0
TRACE = "qwen2.5-coder-0.5b_28k_code"


def model_folder(shape: str) -> str:
    folder = Path(tempfile.gettempdir()) / f"aspire-{shape}"
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1, **SHAPES[shape],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def facts(command: str) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {"aspire-llm": __version__, "torch": torch.__version__},
        "commit": commit or os.environ.get("COMMIT", ""),
        "command": command,
    }


def coefficients(llm: LLM) -> list[float]:
    cost = llm.engine.cost
    return [cost.fixed, cost.per_token, cost.per_kv] if cost is not None else []


def decode(llm: LLM, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Steady decoding: steps without prompt rows."""
    steps: list[dict[str, Any]] = []
    last = [time.perf_counter()]

    def on_step(step: Any) -> None:
        now = time.perf_counter()
        if (
            step.plan is not None
            and step.result is not None
            and all(r.kind is not RowKind.PREFILL for r in step.plan.rows)
        ):
            drafts = sum(r.kind is RowKind.DRAFT for r in step.plan.rows)
            new = sum(p.num_new_tokens for p in step.progress)
            steps.append(
                {"wall": now - last[0], "device": step.result.seconds, "tokens": step.plan.num_tokens, "drafts": drafts,
                 "rows": len(step.plan.rows), "new": new, "kv": step.result.mean_kv_tokens, "cost": coefficients(llm)}
            )  # fmt: skip
        last[0] = now

    outputs = llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), on_step=on_step
    )
    full = [s for s in steps[3:] if s["rows"] >= 0.75 * len(prompts)]  # while (nearly) everybody runs
    wall = sum(s["wall"] for s in full)
    device = sum(s["device"] for s in full)
    histogram = [0] * 16
    for output in outputs:
        for i, n in enumerate(output.metrics.speculative_decoding["acceptance_histogram"]):
            histogram[i] += n
    drafted = sum(o.metrics.speculative_decoding["num_draft_tokens"] for o in outputs)
    cycles = sum(o.metrics.speculative_decoding["num_spec_steps"] for o in outputs)
    accepted = sum(o.metrics.speculative_decoding["num_accepted_draft_tokens"] for o in outputs)
    walls = sorted(s["wall"] for s in full)
    return {
        "tokens_per_s": sum(s["new"] for s in full) / wall,
        "step_ms": 1e3 * wall / len(full),
        "median_step_ms": 1e3 * walls[len(walls) // 2],
        "device_ms": 1e3 * device / len(full),
        "idle_share": 1 - device / wall,
        "steps": len(full),
        "accepted_by_position": histogram,
        "mean_accepted_length": 1 + accepted / cycles if cycles else 1.0,
        "mean_draft_length": drafted / cycles if cycles else 0.0,
        "tokens_a_step": sum(s["tokens"] for s in full) / len(full),
        "all_steps": steps if os.environ.get("STEPS") else [],
        "outputs": [o.outputs[0].token_ids for o in outputs],
    }


def exact(report: dict[str, Any]) -> None:
    """Greedy tokens of every method against plain decoding, small random model in bf16, graphs and eager."""
    folder = model_folder("small")
    options: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "kv_cache_memory": "2G",
    }
    base = LLM(folder, method="plain", **options)
    generator = torch.Generator(device=base.model.decoder.device).manual_seed(0)
    for name, view in base.model.decoder.checkpoint_views().items():
        if "norm" not in name:
            view.normal_(0.0, 0.06, generator=generator)
    g = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(2, 1024, (n,), generator=g).tolist()
        for n in (1, 20, 63, 64, 65, 200, 700, 1500, 33, 900, 128, 1000)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)

    def tokens(**changes: Any) -> tuple[list[list[int]], list[Any]]:
        llm = LLM(folder, loaded=base.model, **{**options, **changes})
        outputs = llm.generate(prompts, params)
        return [o.outputs[0].token_ids for o in outputs], outputs

    plain, _ = tokens(method="plain")
    scored = LLM(folder, loaded=base.model, **{**options, "method": "plain"}).generate(
        prompts, params.model_copy(update={"logprobs": 2})
    )
    gaps = [[entry.top[0][1] - entry.top[1][1] for entry in o.outputs[0].logprobs or ()] for o in scored]
    ordered = sorted(gap for request in gaps for gap in request)
    report["median_margin"] = ordered[len(ordered) // 2]
    print(f"margin between the two best log-probabilities: median {report['median_margin']:.3f}", flush=True)
    rows: dict[str, Any] = {}
    for name, changes in {
        "plain, eager": {"method": "plain", "enforce_eager": True},
        "plain, reference": {"method": "plain", "attention_backend": "reference", "enforce_eager": True},
        "aspire": {"method": "aspire", "budget": 256},
        "aspire, staggered": {"method": "aspire", "budget": 256, "policy": "staggered"},
        "aspire, eager": {"method": "aspire", "budget": 256, "policy": "staggered", "enforce_eager": True},
        "vegas": {"method": "vegas", "budget": 256},
        "magicdec-snapkv": {"method": "magicdec-snapkv", "budget": 256},
        "magicdec-window": {"method": "magicdec-window", "budget": 256},
    }.items():
        ours, outputs = tokens(**changes)
        same = [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(x))
            for x, y in zip(ours, plain, strict=False)
        ]
        spec = [o.metrics.speculative_decoding for o in outputs]
        margins = [round(gaps[i][at], 4) for i, at in enumerate(same) if at < len(gaps[i])]
        rows[name] = {
            "margins_where_they_part": margins,
            "requests_equal": sum(x == y for x, y in zip(ours, plain, strict=False)), "of": len(plain), "first_difference": same,
            "drafted": sum(s["num_draft_tokens"] for s in spec), "accepted": sum(s["num_accepted_draft_tokens"] for s in spec),
        }  # fmt: skip
        print(
            f"exact {name:20} equal {rows[name]['requests_equal']}/{len(plain)} drafted {rows[name]['drafted']} accepted {rows[name]['accepted']} {same}",
            flush=True,
        )
    report["exact"] = rows


def big(report: dict[str, Any], parts: list[str]) -> None:
    folder = model_folder("qwen3-8b")
    options: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": 91000,
        "max_num_seqs": 64,
        "enable_prefix_caching": True,
    }
    began = time.perf_counter()
    base = LLM(folder, method="plain", **options)
    report["plain_start_up_s"] = time.perf_counter() - began
    print(f"start-up plain {report['plain_start_up_s']:.1f} s, pages {base.cache.pages.num_pages}", flush=True)
    cells = (
        [tuple(map(int, c.split("x"))) for c in os.environ["CELLS"].split(",")] if os.environ.get("CELLS") else CELLS
    )
    report["cells"] = {}
    traces = shipped_traces("refreshed_16")
    aspire = None
    if "methods" in parts:
        began = time.perf_counter()
        aspire = LLM(
            folder, loaded=base.model, cache=base.cache, method="aspire", budget=512, refresh_layers=(24,), **options
        )
        report["aspire_start_up_s"] = time.perf_counter() - began
        cost = aspire.engine.cost
        assert cost is not None
        print(
            f"start-up aspire {report['aspire_start_up_s']:.1f} s; cost: fixed {cost.fixed * 1e3:.2f} ms, token {cost.per_token * 1e6:.2f} us (free {cost.free_tokens}), kv {cost.per_kv * 1e9:.2f} ns",
            flush=True,
        )
        report["cost"] = {
            "fixed": cost.fixed,
            "per_token": cost.per_token,
            "per_kv": cost.per_kv,
            "free_tokens": cost.free_tokens,
        }
        staggered = LLM(
            folder, loaded=base.model, cache=base.cache, method="aspire", policy="staggered", draft_tokens=8, budget=512,
            refresh_layers=(24,), **options,
        )  # fmt: skip
        staggered.engine.runner.sampler = ReplaySampler(
            traces[TRACE], staggered.config.max_num_seqs, base.model.decoder.device
        )  # type: ignore[assignment]
        aspire.engine.runner.sampler = ReplaySampler(
            traces[TRACE], aspire.config.max_num_seqs, base.model.decoder.device
        )  # type: ignore[assignment]
    fill(base)  # last: calibration leaves zeros behind
    for batch, length in cells:
        base.reset_prefix_cache()
        prompts = cached_prompts(base, batch, length, batch)
        cell: dict[str, Any] = {}
        decode(base, prompts, 8)
        cell["plain"] = decode(base, prompts, 48)
        if aspire is not None:
            decode(aspire, prompts, 24)
            cell["aspire (replayed)"] = decode(aspire, prompts, 160)
            cell["staggered 8 (replayed)"] = decode(staggered, prompts, 160)
            if "profile" in parts:
                profile(aspire, prompts)
        vllm = VLLM_TOKENS_PER_S[batch, length]
        if aspire is not None and aspire.engine.cost is not None:
            now = aspire.engine.cost
            cell["cost_after"] = {
                "fixed": now.fixed,
                "per_token": now.per_token,
                "per_kv": now.per_kv,
                "within_10%": now.share_within(0.1),
            }
            print(f"   cost now {cell['cost_after']}", flush=True)
        for name, row in cell.items():
            if "outputs" not in row:
                continue
            row.pop("outputs")
            row["over_vllm_of_findings"] = row["tokens_per_s"] / vllm
            print(
                f"{batch}x{length} {name:18} {row['tokens_per_s']:8.0f} tok/s ({row['over_vllm_of_findings']:.2f}x vLLM)  step {row['step_ms']:.2f} ms (median {row['median_step_ms']:.2f}, device {row['device_ms']:.2f}, idle {row['idle_share']:.1%})  accepted length {row['mean_accepted_length']:.2f}, draft {row['mean_draft_length']:.1f}, tokens a step {row['tokens_a_step']:.1f}",
                flush=True,
            )
        report["cells"][f"{batch}x{length}"] = cell


def profile(llm: LLM, prompts: list[list[int]]) -> None:
    """Where the device's time goes: kernels a step, and how much of the time any of them runs."""
    launches: list[float] = []
    runner = llm.engine.runner
    launch = runner.launch

    def timed(plan: Any) -> Any:
        began = time.perf_counter()
        launched = launch(plan)
        launches.append(time.perf_counter() - began)
        return launched

    runner.launch = timed  # type: ignore[method-assign]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        row = decode(llm, prompts, 40)
    runner.launch = launch  # type: ignore[method-assign]
    launches.sort()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    busy, until = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = spans[-1][1] - spans[0][0]
    steps = len(launches)
    print(
        f"   {steps} steps, median {row['median_step_ms']:.2f} ms; device busy {busy / whole:.1%} of {whole / 1e3:.1f} ms; "
        f"host launches a step in {1e3 * launches[steps // 2]:.2f} ms (median)"
    )
    for e in sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)[:40]:
        print(
            f"   {e.self_device_time_total / steps:8.1f} us a step {e.count / steps:7.1f} x {e.self_device_time_total / e.count:8.1f} us  {e.key[:100]}"
        )


def main() -> None:
    parts = sys.argv[1:] or ["exact", "plain", "methods"]
    report = facts("python benchmarks/engine.py " + " ".join(parts))
    OUT.mkdir(parents=True, exist_ok=True)
    for wanted, part in (("exact" in parts, exact), (bool({"plain", "methods"} & set(parts)), lambda r: big(r, parts))):
        if wanted:
            try:
                part(report)
            except Exception as error:  # the other part may still run: device time is dear
                traceback.print_exc()
                report["failed"] = repr(error)
        (OUT / f"engine-{'-'.join(parts)}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
