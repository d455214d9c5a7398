"""Real weights on real text: every method against plain decoding of the same engine, speed and tokens both.

Usage: python benchmarks/real_text.py SECONDS [--model smollm2-135m] [--requests 256] [--prompt-tokens 7000] …

Prompts are pieces of prose, of a dictionary and of Python's library, in equal shares. They are prefilled once, by plain
decoding; all methods start from these cached prefixes. Greedy, no end of text. Speeds: `whole`, the decoding of the batch to
the last request's end; `steady`, while at least 90 % of the requests run. Tokens are compared request by request with plain
decoding's; where they first differ, the margin (how much likelier plain decoding held its likeliest token than the other one)
says why. In bfloat16 a margin of rounding size explains a difference; in float32, or deterministic, there is none.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from common import GPU, Deadline, Report, kv_memory, other_policy, say, shown, summary

from aspire_llm import LLM, SamplingParams
from aspire_llm.bench.datasets import shipped_text
from aspire_llm.bench.measure import free_all_but, prefill
from aspire_llm.config import METHODS
from aspire_llm.engine.engine import Step
from aspire_llm.engine.outputs import merged_stats
from aspire_llm.policy.factory import POLICY_SETTINGS
from aspire_llm.request import Request, RowKind, TokenLogprobs

PROSE = (
    "kjv_genesis.txt",
    "kjv_ecclesiastes.txt",
    "us_constitution.txt",
    "jargon_folklore.txt",
    "jargon_introduction.txt",
)
DICTIONARY = ("jargon_lexicon.txt",)
CODE = (
    "argparse",
    "inspect",
    "tarfile",
    "typing",
    "doctest",
    "subprocess",
    "zipfile",
    "pickle",
    "ast",
    "unittest/mock",
)
TASKS = {
    "prose": "Continue the text above in the same style, with new content.",
    "dictionary": "Write ten more entries in the style of those above, each about something else.",
    "code": "Write out the last function of the code above once more, with comments that explain every line.",
}
LIKELIEST = 5  # tokens of plain decoding, noted at every position
ROUNDING = 0.25  # log-probability: two units of bfloat16 in the last place of logits between 16 and 32
REPETITIVE = 0.3  # a distinct-token ratio below this is a loop, on which any drafter looks good
WARM_UP = 64  # tokens a request, of every method, before anything counts: kernels are loaded, policies have learned the text
CHARACTERS = 600_000  # of a kind: tokenizing takes time


@dataclass(frozen=True, slots=True)
class Decoded:
    """One method, once."""

    requests: list[Request]
    whole_tokens_per_s: float
    steady_tokens_per_s: float
    steady_steps: int
    steady_step_ms: float
    device_step_ms: float  # of these steps, on the device's own clock: what remains is its waiting for the host
    host_loop_ms: float  # a loop of Python that is always the same: how fast the host's processor is now
    longest_steps_ms: list[float]

    @property
    def tokens(self) -> list[list[int]]:
        return [request.output_token_ids for request in self.requests]


def texts(extra: Sequence[str]) -> dict[str, str]:
    """By kind. extra: files whose text joins the prose."""
    library = Path(sysconfig.get_path("stdlib"))
    code = [(library / f"{name}.py") for name in CODE]
    return {
        "prose": "\n\n".join([*(Path(f).read_text(encoding="utf-8") for f in extra), *map(shipped_text, PROSE)])[
            :CHARACTERS
        ],
        "dictionary": "\n\n".join(map(shipped_text, DICTIONARY))[:CHARACTERS],
        "code": "\n\n".join(f.read_text(encoding="utf-8") for f in code if f.is_file())[:CHARACTERS],
    }


def prompts_of(llm: LLM, kinds: dict[str, str], requests: int, length: int) -> list[list[int]]:
    """Conversations of one turn, `length` tokens each: a piece of text and what to do with it."""
    tokenizer = llm.get_tokenizer()

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    made: list[list[int]] = []
    for i, (kind, text) in enumerate(kinds.items()):
        count = requests // len(kinds) + (i < requests % len(kinds))
        if not count:
            continue
        turn = tokenizer.apply_chat_template(
            [{"role": "user", "content": "@@"}], tokenize=False, add_generation_prompt=True
        )
        head, tail = (ids(part) for part in turn.split("@@"))
        task = ids("\n\n" + TASKS[kind])
        size = length - len(head) - len(task) - len(tail)
        tokens = ids(text)
        if len(tokens) < size + count:
            raise RuntimeError(f"{kind} has {len(tokens)} tokens, too few for {count} pieces of {size}")
        starts = [(len(tokens) - size) * n // max(1, count - 1) for n in range(count)]
        made.extend([*head, *tokens[start : start + size], *task, *tail] for start in starts)
    return made


def host_loop_ms() -> float:
    began, total = time.perf_counter(), 0
    for i in range(100_000):
        total += i * i
    return 1e3 * (time.perf_counter() - began)


def decode(llm: LLM, prompts: Sequence[list[int]], tokens: int, logprobs: int | None = None) -> Decoded:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)
    groups = [llm.inputs.requests(prompt, params) for prompt in prompts]
    walls: list[tuple[float, int, int, float]] = []  # seconds, new tokens, requests running, seconds of the device
    loop = host_loop_ms()
    last = time.perf_counter()

    def on_step(step: Step) -> None:
        nonlocal last
        now = time.perf_counter()
        decoding = step.plan is not None and all(row.kind is not RowKind.PREFILL for row in step.plan.rows)
        if decoding and step.result is not None:
            new = sum(progress.num_new_tokens for progress in step.progress)
            walls.append((now - last, new, len(llm.engine.scheduler.running), step.result.seconds))
        last = now

    llm.run(groups, [None] * len(groups), on_step)
    requests = [group[0] for group in groups]
    failed = next((request.error for request in requests if request.error), None)
    if failed:
        raise RuntimeError(f"a request failed: {failed}")
    steady = [w for w in walls[3:] if w[2] >= 0.9 * len(prompts)] or walls
    seconds = sum(w[0] for w in steady)
    return Decoded(
        requests,
        sum(w[1] for w in walls) / sum(w[0] for w in walls),
        sum(w[1] for w in steady) / seconds,
        len(steady),
        1e3 * seconds / len(steady),
        1e3 * sum(w[3] for w in steady) / len(steady),
        (loop + host_loop_ms()) / 2,
        [round(1e3 * w[0], 1) for w in sorted(steady, reverse=True)[:5]],
    )


def differences(
    plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]], logprobs: Sequence[Sequence[TokenLogprobs]]
) -> list[dict[str, Any]]:
    """Where each request's tokens first differ from plain's, if they do: {"request", "at", "margin", "explained"}. margin: by
    how much plain held its own token for likelier; None where the other is not among the LIKELIEST it noted, or where one
    output is the shorter one. logprobs: plain's, with these."""
    found: list[dict[str, Any]] = []
    for i, (ours, theirs, known) in enumerate(zip(plain, other, logprobs, strict=True)):
        at = next(
            (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        if at == len(ours) == len(theirs):
            continue
        margin = None
        if at < len(ours) and at < len(theirs):
            noted = dict(known[at].top)
            if theirs[at] in noted:
                margin = round(max(noted.values()) - noted[theirs[at]], 5)
        found.append({"request": i, "at": at, "margin": margin, "explained": margin is not None and margin <= ROUNDING})
    return found


def distinct(tokens: Sequence[int]) -> float:
    return len(set(tokens)) / max(1, len(tokens))


def method_row(runs: Sequence[Decoded], plain: Sequence[Decoded], scored: Decoded) -> dict[str, Any]:
    known = [request.logprobs for request in scored.requests]
    stats = [request.stats for request in runs[0].requests]
    ratios = [distinct(tokens) for tokens in runs[0].tokens]
    varied = [s for s, ratio in zip(stats, ratios, strict=True) if ratio >= REPETITIVE]
    found = [differences(scored.tokens, run.tokens, known) for run in runs]
    margins = sorted(d["margin"] for d in found[0] if d["margin"] is not None)
    total = merged_stats(stats)
    pairs = list(zip(runs, plain, strict=False))
    return {
        "whole_tokens_per_s": summary([run.whole_tokens_per_s for run in runs]),
        "steady_tokens_per_s": summary([run.steady_tokens_per_s for run in runs]),
        "whole_speedup": summary([a.whole_tokens_per_s / b.whole_tokens_per_s for a, b in pairs]),
        "steady_speedup": summary([a.steady_tokens_per_s / b.steady_tokens_per_s for a, b in pairs]),
        "steady_step_ms": summary([run.steady_step_ms for run in runs]),
        "device_step_ms": summary([run.device_step_ms for run in runs]),
        "host_loop_ms": [round(run.host_loop_ms, 2) for run in runs],
        "longest_steps_ms": [run.longest_steps_ms for run in runs],
        "mean_accepted_length": total.mean_acceptance_length,
        "mean_draft_length": total.num_draft_tokens / total.num_drafts if total.num_drafts else 0.0,
        "mean_accepted_length_of_varied_outputs": merged_stats(varied).mean_acceptance_length if varied else None,
        "distinct_ratio": mean(ratios),
        "repetitive_requests": len(stats) - len(varied),
        "requests": len(stats),
        "equal_requests": len(stats) - len(found[0]),
        "explained": sum(d["explained"] for d in found[0]),
        "margins_where_they_differ": margins,
        "differences": found[0],
        "equal_requests_by_repeat": [len(stats) - len(f) for f in found],
    }


def show(method: str, row: dict[str, Any]) -> None:
    margins = row["margins_where_they_differ"]
    say(
        f"{method:16} steady {shown(row['steady_tokens_per_s'], 0):>24} tok/s {shown(row['steady_speedup']):>18}x"
        f"  whole {shown(row['whole_speedup']):>18}x  accepted {row['mean_accepted_length']:5.2f} draft {row['mean_draft_length']:5.2f}"
        f"  equal {row['equal_requests']}/{row['requests']}, explained {row['explained']}/{row['requests'] - row['equal_requests']}"
        + (f" (margins to {margins[-1]:.3f})" if margins else "")
        + f"  distinct {row['distinct_ratio']:.2f}, {row['repetitive_requests']} repetitive"
        + f"  step {shown(row['steady_step_ms'])} ms, device {shown(row['device_step_ms'])}"
        + f"  host's loop {min(row['host_loop_ms'])}-{max(row['host_loop_ms'])} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--name", default="smollm2", help="of the JSON file")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=7000)
    parser.add_argument("--output-tokens", type=int, default=192)
    parser.add_argument("--methods", default="aspire,vegas,aspire-ema,sparsespec")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--refresh-layer", type=int, help="of the aspire methods; default: the profile's")
    parser.add_argument("--budget", type=int, help="default: the profile's")
    parser.add_argument(
        "--max-verify-tokens", type=int, help="a step, of policies that bound them; default: the engine's"
    )
    parser.add_argument("--text", action="append", default=[], help="a file whose text joins the prose")
    parser.add_argument("--deterministic", action="store_true", help="every output must then equal plain decoding's")
    given = parser.parse_args()
    deadline = Deadline(given.seconds)
    report = Report(f"real-text-{given.name}")
    report.data["settings"] = vars(given)
    rows: dict[str, dict[str, Any]] = report.data.setdefault("methods", {})
    runs: dict[str, list[Decoded]] = {"plain": []}
    with report.part("all"):
        began = time.perf_counter()
        common: dict[str, Any] = {
            "max_num_seqs": given.requests,
            "max_model_len": given.prompt_tokens + given.output_tokens + 64,
        }
        if given.deterministic:
            common["deterministic"] = True
        if GPU:
            common["max_num_batched_tokens"] = 16384
        probe = LLM(
            given.model, method="plain", max_num_seqs=1, max_model_len=64, enforce_eager=True, deterministic=given.deterministic
        )
        bytes_per_token = probe.model.config.kv_bytes_per_token(probe.model.decoder.dtype)
        common["kv_cache_memory"] = kv_memory(
            bytes_per_token, [(given.requests, given.prompt_tokens)], given.output_tokens + 64
        )
        llms = {"plain": LLM(given.model, loaded=probe.model, method="plain", **common)}
        base = llms["plain"]
        of_context: dict[str | None, LLM] = {}
        for method in given.methods.split(","):
            preset = METHODS[method]
            extra: dict[str, Any] = {"budget": given.budget} if given.budget else {}
            if given.refresh_layer is not None and preset.context == "refreshed":
                extra["refresh_layers"] = (given.refresh_layer,)
            if given.max_verify_tokens and "max_verify_tokens" in POLICY_SETTINGS[preset.policy][0]:
                extra["max_verify_tokens"] = given.max_verify_tokens
            with report.part(f"start of {method}"):
                if preset.context in of_context:  # methods of one context set share its runner
                    llms[method] = other_policy(of_context[preset.context], preset.policy, preset.draft_tokens)
                else:
                    llms[method] = LLM(
                        given.model, loaded=base.model, cache=base.cache, method=method, **common, **extra
                    )
                    of_context[preset.context] = llms[method]
                runs[method] = []
        say(f"start-up {time.perf_counter() - began:.1f} s, {deadline.left:.0f} s left")
        prompts = prompts_of(base, texts(given.text), given.requests, given.prompt_tokens)
        params = SamplingParams(temperature=0.0, max_tokens=given.output_tokens, ignore_eos=True)
        seconds = prefill(base, prompts, params, lambda _: None)
        report.data["prefill_tokens_per_s"] = sum(map(len, prompts)) / seconds
        say(f"prefill of {sum(map(len, prompts))} tokens in {seconds:.1f} s, {deadline.left:.0f} s left")
        with report.part("plain with log-probabilities"):
            free_all_but(base.cache.pages, prompts)
            scored = decode(base, prompts, given.output_tokens, logprobs=LIKELIEST)
        report.data["example_output"] = base.get_tokenizer().decode(scored.tokens[0])
        for method, llm in list(llms.items()):
            with report.part(f"warm-up of {method}"):
                decode(llm, prompts, min(WARM_UP, given.output_tokens))
        slowest = 0.0
        for repeat in range(given.repeats):
            for method, llm in llms.items():
                if deadline.left < max(slowest, 2.0):
                    say(f"no time for {method}, repeat {repeat + 1}")
                    continue
                began = time.perf_counter()
                with report.part(f"{method}, repeat {repeat + 1}"):
                    free_all_but(base.cache.pages, prompts)
                    runs[method].append(decode(llm, prompts, given.output_tokens))
                slowest = max(slowest, 1.1 * (time.perf_counter() - began))
        for method, of_method in runs.items():
            if of_method:
                rows[method] = method_row(of_method, runs["plain"], scored)
        say(
            f"\n{given.model}, {given.requests} x {given.prompt_tokens} tokens, {given.output_tokens} new; medians and 95 % intervals"
        )
        for method, row in rows.items():
            show(method, row)
    report.write()


if __name__ == "__main__":
    main()
