"""Where a step's time goes, on the host and on the device, by kind of step: replayed drafting of a dummy model on one GPU.

Usage: python benchmarks/step_profile.py SECONDS [SHAPE [BATCHxCONTEXT,…]]

For each cell: median device time of steps by how many drafts and verifications they hold, under `aspire` and in lock-step;
the host's time by part (plan, launch, wait for the result, apply); and kernels of six draft steps, of a step with few
verifications, and of plain steps, from the profiler.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from common import GPU, Deadline, Report, cached_prompts, fill, kv_memory, other_policy, say
from shapes import SHAPES, model_folder, refresh_layer
from table import BUDGET, drawn_trace, replay

from aspire_llm import LLM, SamplingParams
from aspire_llm.engine.engine import Step
from aspire_llm.engine.garbage import keep_collections_short
from aspire_llm.request import Request, RowKind

OUTPUT = 1200
SHOWN = 28  # kernels


def timed(parts: dict[str, list[float]], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            parts[name].append(1e3 * (time.perf_counter() - began))

    return wrapper


class Run:
    """Requests that decode until they are dropped."""

    def __init__(self, llm: LLM, prompts: list[list[int]]) -> None:
        self.engine = llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        self.requests: list[Request] = [
            llm.inputs.requests(prompt, params.model_copy(update={"seed": i}))[0] for i, prompt in enumerate(prompts)
        ]
        for request in self.requests:
            self.engine.add(request)
        while any(request.first_token is None for request in self.requests):
            self.engine.step()

    def drop(self) -> None:
        for request in self.requests:
            self.engine.abort(request)
        while self.engine.has_work:
            self.engine.step()


def kinds(step: Step) -> tuple[int, int]:
    """Drafts and verifications of drafts in the step."""
    assert step.plan is not None
    rows = step.plan.rows
    return sum(r.kind is RowKind.DRAFT for r in rows), sum(r.kind is RowKind.VERIFY and r.num_tokens > 1 for r in rows)


def by_kind(run: Run, steps: int) -> dict[str, Any]:
    """Median milliseconds of steps by what they hold; and of the host by part."""
    engine = run.engine
    parts: dict[str, list[float]] = defaultdict(list)
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    walls: list[float] = []
    tokens = 0
    for owner, method in (
        (engine.scheduler, "plan"),
        (engine.runner, "launch"),
        (engine, "_fetch"),
        (engine.scheduler, "apply"),
    ):
        setattr(owner, method, timed(parts, method.strip("_"), getattr(owner, method)))
    began = time.perf_counter()
    for _ in range(steps):
        entered = time.perf_counter()
        step = engine.step()
        walls.append(1e3 * (time.perf_counter() - entered))
        if step.result is not None:
            found[kinds(step)].append(1e3 * step.result.seconds)
            tokens += sum(p.num_new_tokens for p in step.progress)
    seconds = time.perf_counter() - began
    for owner, method in (
        (engine.scheduler, "plan"),
        (engine.runner, "launch"),
        (engine, "_fetch"),
        (engine.scheduler, "apply"),
    ):
        delattr(owner, method)
    return {
        "tokens_per_s": tokens / seconds,
        "step_ms": 1e3 * seconds / steps,
        "longest_ms": sorted(walls)[-5:],
        "host_ms": {name: [median(of), sum(of) / len(of), max(of)] for name, of in parts.items()},
        "device_ms": {f"{d} drafts, {v} verifications": [median(of), len(of)] for (d, v), of in sorted(found.items())},
    }


def kernels(run: Run, begin: Callable[[Step], bool], steps: int) -> list[tuple[float, float, str]]:
    """Microseconds a step, launches a step and name of each kernel of `steps` steps after the first for which `begin` holds."""
    for _ in range(200):
        step = run.engine.step()
        if step.plan is not None and begin(step):
            break
    if not GPU:
        return []
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run.engine.step()
        torch.cuda.synchronize()
    return [
        (e.self_device_time_total / steps, e.count / steps, e.key)
        for e in sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    ]


def shown(name: str, rows: list[tuple[float, float, str]]) -> None:
    say(f"   {name}: {sum(r[0] for r in rows):.0f} us in {sum(r[1] for r in rows):.0f} kernels a step")
    for time_us, count, key in rows[:SHOWN]:
        say(f"   {time_us:9.1f} us {count:7.1f} x {key[:90]}")


def main() -> None:
    given = [*sys.argv[1:], *[""] * 3]
    deadline = Deadline(float(given[0] or 200))
    shape = given[1] or "qwen3-8b"
    cells = [(int(b), int(n)) for b, _, n in (c.partition("x") for c in (given[2] or "32x16384,6x90000").split(","))]
    report = Report(f"steps-{shape}")
    sizes = SHAPES[shape]
    per_token = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"] * (2 if GPU else 4)
    options: dict[str, Any] = {
        "load_format": "dummy", "max_model_len": max(n for _, n in cells) + OUTPUT + 64, "profile": "none",
        "max_num_seqs": max(b for b, _ in cells), "kv_cache_memory": kv_memory(per_token, cells, OUTPUT),
        "max_num_batched_tokens": 2048,
    }  # fmt: skip
    began = time.perf_counter()
    # a drafting engine alone: what a user starts
    aspire = LLM(model_folder(shape), method="aspire", budget=BUDGET, refresh_layers=(refresh_layer(shape),), **options)
    report.data["start_up_s"] = time.perf_counter() - began
    say(f"start-up of aspire alone {report.data['start_up_s']:.1f} s")
    llms = {
        "aspire": aspire,
        "lockstep 6": other_policy(aspire, "lockstep", 6),
        "plain": other_policy(aspire, "autoregressive"),
    }
    fill(aspire)
    keep_collections_short()
    for batch, length in cells:
        cell = report.data.setdefault("cells", {}).setdefault(f"{batch}x{length}", {})
        for name, llm in llms.items():
            if deadline.left < 10:
                say(f"no time for {batch}x{length} {name}")
                continue
            with report.part(f"{batch}x{length} {name}"):
                aspire.reset_prefix_cache()
                prompts = cached_prompts(aspire, batch, length, batch)
                replay(llm, drawn_trace("refreshed", batch, 0))
                run = Run(llm, prompts)
                try:
                    row = cell[name] = by_kind(run, 90 if GPU else 20)
                    host = ", ".join(f"{k} {mid:.2f} (most {most:.1f})" for k, (mid, _, most) in row["host_ms"].items())
                    say(
                        f"{batch}x{length} {name}: {row['tokens_per_s']:.0f} tok/s, step {row['step_ms']:.2f} ms (longest {row['longest_ms'][-1]:.0f}); host {host}"
                    )
                    cost = llm.engine.cost
                    if cost is not None:
                        terms = [
                            cost.fixed,
                            cost.per_token,
                            cost.per_kv,
                            cost.per_check,
                            cost.free_tokens,
                            cost.verify_step,
                        ]
                        row["cost"] = terms
                        row["within_10_percent"] = cost.share_within()
                        say(
                            f"   cost {1e3 * terms[0]:.2f} ms, {1e6 * terms[1]:.1f} us a token beyond {terms[4]:.0f}, "
                            f"{1e9 * terms[2]:.1f} ns a KV token, {1e9 * terms[3]:.1f} more checked, {1e3 * terms[5]:.2f} ms once; "
                            f"{100 * cost.share_within():.0f} % within 10 %"
                        )
                    often = sorted(row["device_ms"].items(), key=lambda of: -of[1][1])[:8]
                    for what, (ms, count) in often:
                        say(f"   {ms:7.2f} ms  {what} ({count} steps)")
                    if name == "plain":
                        cell["kernels, plain"] = kernels(run, lambda _: True, 4)
                        shown("plain", cell["kernels, plain"])
                    elif name == "aspire":
                        cell["kernels, mixed"] = kernels(run, lambda _: True, 8)
                        shown("aspire's mixed steps", cell["kernels, mixed"])
                    else:  # the first draft step after a verification: three more are drafts for certain, one step late
                        cell["kernels, drafts"] = kernels(run, lambda step, whole=batch: kinds(step)[0] == whole, 3)
                        shown("draft steps", cell["kernels, drafts"])
                finally:
                    run.drop()
    report.write()


if __name__ == "__main__":
    main()
