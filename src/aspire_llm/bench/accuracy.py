"""Whether methods change what a model says: outputs on the same prompts, token for token and by score.

The first method is the reference. Each decodes every prompt by itself: the prefix cache is emptied in between. Where two
outputs part, the margin says how near the choice was: the reference's log-probability of its own token there, less that of
the other's. Greedy outputs in float32 never part; in bfloat16 they may where the margin is within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from rich import box
from rich.table import Table

from aspire_llm.bench.datasets import Dataset, Sample, Selection
from aspire_llm.bench.scores import SCORES, best_score, stated_answer
from aspire_llm.bench.statistics import bootstrap_interval
from aspire_llm.config import EngineConfig
from aspire_llm.engine.engine import Step
from aspire_llm.engine.llm import LLM
from aspire_llm.errors import UserError
from aspire_llm.request import CompletionOutput, SamplingParams

TOP_LOGPROBS = 5  # at each position, among which the other method's token is looked for

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """outputs: of each method, one a sample."""

    model: str
    dtype: str
    device: str
    dataset: Dataset
    selection: Selection
    outputs: dict[str, list[CompletionOutput]]

    @property
    def reference(self) -> str:
        return next(iter(self.outputs))


@dataclass(frozen=True, slots=True)
class Parting:
    """Where an output parts from the reference's. position: of the first differing token; differing: tokens that differ
    from there on, missing and additional ones included; margin: None where the other token was not among the likeliest."""

    position: int
    differing: int
    margin: float | None


def run_accuracy(
    configs: Mapping[str, EngineConfig],
    dataset: Dataset,
    params: SamplingParams,
    *,
    requests: int | None,
    seed: int,
    on_progress: OnProgress,
) -> Accuracy:
    """Decode the same prompts under every method. params: greedy. Raises UserError."""
    on_progress("loading", 0, 0)
    base: LLM | None = None
    outputs: dict[str, list[CompletionOutput]] = {}
    selection = Selection([])
    params = params.model_copy(update={"logprobs": TOP_LOGPROBS})
    for method, config in configs.items():
        options = config.model_dump(exclude_unset=True)
        llm = LLM(**options) if base is None else LLM(loaded=base.model, cache=base.cache, **options)
        if base is None:
            base = llm
            context = llm.engine.scheduler.limits.max_model_len
            if params.max_tokens >= context:
                raise UserError(
                    f"max_tokens = {params.max_tokens}: the context of {context} leaves no room for a prompt"
                )
            selection = dataset.select(llm.inputs, requests, context - params.max_tokens, seed)
        llm.reset_prefix_cache()
        outputs[method] = decode(llm, selection.samples, params, method, on_progress)
    assert base is not None
    decoder = base.model.decoder
    dtype = str(decoder.dtype).removeprefix("torch.")
    return Accuracy(base.config.model, dtype, str(decoder.device), dataset, selection, outputs)


def decode(
    llm: LLM, samples: Sequence[Sample], params: SamplingParams, method: str, on_progress: OnProgress
) -> list[CompletionOutput]:
    most, done = len(samples) * params.max_tokens, 0

    def on_step(step: Step) -> None:
        nonlocal done
        done += sum(progress.num_new_tokens for progress in step.progress)
        on_progress(method, done, most)

    on_progress(method, 0, most)
    results = llm.generate([sample.token_ids for sample in samples], params, on_step=on_step)
    failed = next((result.error for result in results if result.error is not None), None)
    if failed is not None:
        raise UserError(f"method {method}: a request failed: {failed}")
    return [result.outputs[0] for result in results]


def parting(reference: CompletionOutput, other: CompletionOutput) -> Parting | None:
    """None where both say the same. Both have log-probabilities."""
    mine, theirs = reference.token_ids, other.token_ids
    if mine == theirs:
        return None
    pairs = list(zip(mine, theirs, strict=False))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    differing = sum(a != b for a, b in pairs) + abs(len(mine) - len(theirs))
    margin = None
    if position < len(pairs):
        assert reference.logprobs is not None
        at = reference.logprobs[position]
        found = dict(at.top).get(theirs[position])
        margin = at.logprob - found if found is not None else None
    return Parting(position, differing, margin)


def accuracy_report(accuracy: Accuracy, environment: dict[str, Any], seed: int, max_tokens: int) -> dict[str, Any]:
    """The JSON; scores in points. Its schema is in docs/benchmarks.md."""
    samples = accuracy.selection.samples
    answered = [i for i, sample in enumerate(samples) if sample.answers]
    scores = {
        method: {
            name: [
                best_score(score, stated_answer(outputs[i].text, samples[i].task), samples[i].answers) for i in answered
            ]
            for name, score in SCORES.items()
        }
        for method, outputs in accuracy.outputs.items()
    }
    reference = accuracy.outputs[accuracy.reference]
    return {
        "kind": "accuracy",
        "replayed": False,
        "environment": environment,
        "model": accuracy.model,
        "dtype": accuracy.dtype,
        "device": accuracy.device,
        "workload": {
            "dataset": accuracy.dataset.name,
            "format": accuracy.dataset.format,
            "requests": len(samples),
            "with_answers": len(answered),
            "prompt_tokens": [len(sample.token_ids) for sample in samples],
            "max_tokens": max_tokens,
            "seed": seed,
            "skipped": dict(accuracy.selection.skipped),
        },
        "reference": accuracy.reference,
        "methods": {
            method: {
                "scores": {
                    name: score_report(values, scores[accuracy.reference][name]) if answered else None
                    for name, values in scores[method].items()
                },
                **parting_report([parting(a, b) for a, b in zip(reference, outputs, strict=True)]),
                "tokens": sum(len(output.token_ids) for output in outputs),
                "requests": [
                    {
                        "task": sample.task,
                        "answers": list(sample.answers),
                        "text": output.text,
                        "output_tokens": len(output.token_ids),
                        "finish_reason": output.finish_reason,
                    }
                    for sample, output in zip(samples, outputs, strict=True)
                ],
            }
            for method, outputs in accuracy.outputs.items()
        },
    }


def score_report(values: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    """Means over the requests with answers, and of the difference to the reference's, request by request."""
    differences = [mine - theirs for mine, theirs in zip(values, reference, strict=True)]
    return {
        "mean": mean(values),
        "interval": bootstrap_interval(values, statistic=mean),
        "difference": mean(differences),
        "difference_interval": bootstrap_interval(differences, statistic=mean),
    }


def parting_report(partings: Sequence[Parting | None]) -> dict[str, Any]:
    parted = [(i, each) for i, each in enumerate(partings) if each is not None]
    margins = [each.margin for _, each in parted if each.margin is not None]
    return {
        "requests_differing": len(parted),
        "tokens_differing": sum(each.differing for _, each in parted),
        "margin_median": median(margins) if margins else None,
        "margin_max": max(margins) if margins else None,
        "partings": [
            {"request": i, "position": each.position, "differing": each.differing, "margin": each.margin}
            for i, each in parted
        ],
    }


def accuracy_table(report: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("method", no_wrap=True)
    for name in SCORES:
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    for name in ("requests\ndiffering", "tokens\ndiffering", "largest\nmargin"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, method in report["methods"].items():
        cells = []
        for score in method["scores"].values():
            if score is None:
                cells.append("-")
            else:
                change = "" if name == report["reference"] else f"\n{score['difference']:+.2f}"
                cells.append(f"{score['mean']:.2f}{change}")
        margin = method["margin_max"]
        table.add_row(
            name,
            *cells,
            f"{method['requests_differing']} of {report['workload']['requests']}",
            f"{method['tokens_differing']} of {method['tokens']}",
            "-" if margin is None else f"{margin:.4f}",
        )
    return table


def accuracy_notes(report: dict[str, Any]) -> list[str]:
    workload = report["workload"]
    lengths = workload["prompt_tokens"]
    notes = [
        f"{workload['requests']} prompts of {min(lengths)}-{max(lengths)} tokens, {workload['with_answers']} with answers; "
        f"{report['dtype']} on {report['device']}; scores in points (0-100), differences to {report['reference']}."
    ]
    if workload["skipped"]:
        notes.append("skipped: " + ", ".join(f"{n} {reason}" for reason, n in workload["skipped"].items()) + ".")
    others = [method for name, method in report["methods"].items() if name != report["reference"]]
    total = sum(method["tokens_differing"] for method in others)
    notes.append(
        f"{total} differences to {report['reference']} in {sum(method['tokens'] for method in others)} tokens of output."
    )
    return notes
