"""Many engine steps with requests that come, go, are aborted, preempted and broken by a fault: does anything grow?

Usage: python benchmarks/soak.py SECONDS [--steps 10000] [--requests 16]

A small random model, a KV cache for about half of what the running requests want (so that they are preempted), greedy and
sampled requests, shared prefixes, log-probabilities now and then. In two steps the sampler asks for more memory than there is:
the requests of that step must end with an error and the engine go on. Printed: the curve of allocated GPU memory, resident
host memory and free pages; last line: what grew after the first fifth.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import psutil
import torch
from common import GPU, Deadline, Report, say
from shapes import SHAPES, model_folder

from aspire_llm import LLM, SamplingParams
from aspire_llm.engine.columns import Ints
from aspire_llm.request import Request
from aspire_llm.sampling.batch import SampleBatch, SampleOutput

SAMPLE_EVERY = 50  # steps
PAGE = 64
ALLOWED = {"gpu_bytes": 4 << 20, "rss_bytes": 32 << 20}  # growth that is noise


class FaultySampler:
    """The real sampler, but for steps in which it wants more memory than any machine has."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.fail_next = False
        self.faults = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def runs_by_row(self, slots: Ints) -> bool:
        return not self.fail_next and bool(self._inner.runs_by_row(slots))

    def run(self, batch: SampleBatch) -> SampleOutput:
        if self.fail_next:
            self.fail_next = False
            self.faults += 1
            torch.empty(1 << 50, dtype=torch.uint8, device=batch.logits.device)
        output: SampleOutput = self._inner.run(batch)
        return output


def some_request(
    rng: random.Random, vocabulary: int, longest: int, prefixes: list[list[int]]
) -> tuple[list[int], SamplingParams]:
    prompt = [*rng.choice(prefixes), *rng.choices(range(2, vocabulary), k=rng.randint(1, longest // 5))]
    sampled = rng.random() < 0.4
    params = SamplingParams(
        temperature=0.8 if sampled else 0.0,
        top_p=0.9 if sampled else 1.0,
        seed=rng.randrange(1 << 30),
        max_tokens=rng.randint(1, longest // 3),
        ignore_eos=True,
        logprobs=2 if rng.random() < 0.1 else None,
    )
    return prompt, params


def soak(given: argparse.Namespace, report: Report) -> None:
    deadline = Deadline(given.seconds)
    rng = random.Random(0)
    shape = "small" if GPU else "tiny"
    longest = 1400 if GPU else 300
    numbers = SHAPES[shape]
    page_bytes = (
        2
        * numbers["num_hidden_layers"]
        * numbers["num_key_value_heads"]
        * numbers["head_dim"]
        * (2 if GPU else 4)
        * PAGE
    )
    wanted = given.requests * longest // 2
    llm = LLM(
        model_folder(shape), load_format="dummy", method="aspire", policy="staggered", draft_tokens=6, budget=64, max_model_len=longest,
        max_num_seqs=given.requests, max_num_batched_tokens=512, kv_cache_memory=max(wanted // 2, longest + PAGE) // PAGE * page_bytes,
    )  # fmt: skip
    generator = torch.Generator(device=llm.model.decoder.device).manual_seed(0)
    for name, view in llm.model.decoder.checkpoint_views().items():
        if "norm" not in name:
            view.normal_(0.0, 0.06, generator=generator)
    engine = llm.engine
    sampler = FaultySampler(engine.runner.sampler)
    engine.runner.sampler = sampler  # type: ignore[assignment]
    prefixes = [[], *([rng.randrange(2, numbers["vocab_size"]) for _ in range(n)] for n in (70, 150, longest // 4))]
    fault_steps = {given.steps // 4, given.steps // 2}
    live: list[Request] = []
    counts = dict.fromkeys(("added", "length", "stop", "error", "abort"), 0)
    errors: set[str] = set()
    curve: list[dict[str, Any]] = []
    process = psutil.Process()
    started = time.perf_counter()
    done = 0
    for done in range(1, given.steps + 1):
        while len(live) < given.requests + given.requests // 2:
            prompt, params = some_request(rng, numbers["vocab_size"], longest, prefixes)
            request = llm.inputs.requests(prompt, params)[0]
            engine.add(request)
            live.append(request)
            counts["added"] += 1
        if rng.random() < 0.02:
            engine.abort(rng.choice(live))
        if done in fault_steps:
            sampler.fail_next = True
        llm.metrics.on_step(engine.step())
        if done % 8 == 0:
            for request in [r for r in live if r.finished]:
                counts[str(request.finish_reason)] += 1
                if request.error:
                    errors.add(request.error[:100])
                live.remove(request)
        if done % SAMPLE_EVERY == 0:
            if GPU:
                torch.cuda.synchronize()
            curve.append(
                {
                    "step": done, "gpu_bytes": torch.cuda.memory_allocated() if GPU else 0,
                    "gpu_reserved_bytes": torch.cuda.memory_reserved() if GPU else 0, "rss_bytes": process.memory_info().rss,
                    "free_pages": llm.cache.pages.num_free, "running": len(engine.scheduler.running),
                    "preemptions": engine.scheduler.num_preemptions,
                }
            )  # fmt: skip
            if deadline.left < 3:
                say(f"stopped by the time limit after {done} steps")
                break
        if done % 1000 == 0:
            engine.check()
    seconds = time.perf_counter() - started
    for request in live:
        engine.abort(request)
    while engine.has_work:
        engine.step()
    engine.check()  # idle: every page is free again
    fifth = max(1, len(curve) // 5)
    early, late = curve[fifth : 2 * fifth], curve[-fifth:]
    growth = {key: max(c[key] for c in late) - max(c[key] for c in early or late) for key in ALLOWED}
    report.data |= {
        "settings": vars(given), "model": shape, "steps": done, "seconds_stepping": seconds, "pages": llm.cache.pages.num_pages,
        "requests": counts, "faults": sampler.faults, "errors": sorted(errors), "preemptions": engine.scheduler.num_preemptions,
        "curve": curve, "growth": growth, "allowed": ALLOWED,
        "steady": all(growth[key] <= most for key, most in ALLOWED.items()),
    }  # fmt: skip
    say(
        f"{'step':>7} {'GPU MiB':>9} {'reserved':>9} {'RSS MiB':>9} {'free pages':>11} {'running':>8} {'preempted':>10}"
    )
    for c in curve[:: max(1, len(curve) // 12)] + curve[-1:]:
        say(
            f"{c['step']:7} {c['gpu_bytes'] / 2**20:9.2f} {c['gpu_reserved_bytes'] / 2**20:9.1f} {c['rss_bytes'] / 2**20:9.1f} "
            f"{c['free_pages']:11} {c['running']:8} {c['preemptions']:10}"
        )
    say(f"{done} steps in {seconds:.1f} s; requests {counts}; {sampler.faults} faults: {sorted(errors)}")
    say(f"growth after the first fifth: {growth} bytes; steady: {report.data['steady']}; pages all free when idle")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=16)
    report = Report("soak")
    with report.part("soak"):
        soak(parser.parse_args(), report)


if __name__ == "__main__":
    main()
