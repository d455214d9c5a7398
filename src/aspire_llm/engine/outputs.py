"""From requests to what a user gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aspire_llm.request import CompletionOutput, Request, RequestMetrics, RequestOutput, SpeculationStats


def request_output(request_id: str, prompt: str | None, requests: Sequence[Request]) -> RequestOutput:
    """One RequestOutput of the n continuations of a prompt, finished or not."""
    first = requests[0]
    wants_prompt_logprobs = first.params.prompt_logprobs is not None
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=first.prompt_token_ids,  # never changes, and may be long
        outputs=[completion_output(i, request) for i, request in enumerate(requests)],
        finished=all(request.finished for request in requests),
        # nothing comes before the first token of a prompt
        prompt_logprobs=[None, *first.prompt_logprobs] if wants_prompt_logprobs else None,
        metrics=request_metrics(requests),
        error=next((request.error for request in requests if request.error is not None), None),
    )


def completion_output(index: int, request: Request) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=request.stream.text if request.stream is not None else "",
        token_ids=list(request.output_token_ids),
        logprobs=list(request.logprobs) if request.params.logprobs is not None else None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


def request_metrics(requests: Sequence[Request]) -> RequestMetrics:
    first = requests[0]
    stats = merged_stats([request.stats for request in requests])
    tokens = sum(len(request.output_token_ids) for request in requests)
    first_tokens = [request.first_token for request in requests if request.first_token is not None]
    spans = [r.last_token - r.first_token for r in requests if r.first_token is not None and r.last_token is not None]
    return RequestMetrics(
        arrival_time=first.arrival,
        time_in_queue=(first.first_scheduled - first.arrival) if first.first_scheduled is not None else 0.0,
        time_to_first_token=(min(first_tokens) - first.arrival) if first_tokens else 0.0,
        time_per_output_token=sum(spans) / (tokens - len(first_tokens)) if tokens > len(first_tokens) else 0.0,
        num_cached_tokens=first.stats.num_cached_tokens,
        num_preemptions=stats.num_preemptions,
        steps=dict(stats.steps),
        speculative_decoding=speculative_decoding_metrics(stats),
    )


def merged_stats(all_stats: Sequence[SpeculationStats]) -> SpeculationStats:
    total = SpeculationStats()
    for stats in all_stats:
        total.num_cycles += stats.num_cycles
        total.num_drafts += stats.num_drafts
        total.num_draft_tokens += stats.num_draft_tokens
        total.num_accepted_tokens += stats.num_accepted_tokens
        total.num_preemptions += stats.num_preemptions
        total.num_cached_tokens += stats.num_cached_tokens
        for kind, n in stats.steps.items():
            total.steps[kind] += n
        for mine, theirs in (
            (total.accepted_per_position, stats.accepted_per_position),
            (total.drafted_per_position, stats.drafted_per_position),
        ):
            mine.extend([0] * (len(theirs) - len(mine)))
            for i, n in enumerate(theirs):
                mine[i] += n
    return total


def speculative_decoding_metrics(stats: SpeculationStats) -> dict[str, Any]:
    """Under vLLM's names, which AIPerf reads. num_spec_steps counts verifications that had drafts."""
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": list(stats.accepted_per_position),
        "num_spec_steps": stats.num_drafts,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": len(stats.drafted_per_position),
    }
