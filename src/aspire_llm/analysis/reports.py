"""Numbers of the analyses, in the shape of their JSON files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aspire_llm.analysis.recall import ReuseTable
from aspire_llm.analysis.recorder import Drafts, Method


def method_json(method: Method) -> dict[str, Any]:
    return {
        "context": method.context,
        "budget": method.budget,
        "refresh_layers": list(method.refresh_layers),
        "verified_share": method.verified_share if method.context == "refreshed" else None,
    }


def heterogeneity(drafts: Drafts, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Accepted length by request, and from start to start within each: of all requests that have any start."""
    requests = []
    for r, prompt in enumerate(prompts):
        measured = drafts.measured[r]
        if not measured.any():
            continue
        lengths = 1 + drafts.accepted[r][measured]
        requests.append(
            {
                "request": r,
                "prompt_tokens": len(prompt),
                "starts": np.asarray(drafts.starts)[measured].tolist(),
                "accepted_length": lengths.tolist(),
                "mean": float(lengths.mean()),
                "std": float(lengths.std()),
                "min": int(lengths.min()),
                "max": int(lengths.max()),
            }
        )
    means = np.array([request["mean"] for request in requests])
    return {
        "draft_tokens": drafts.draft_tokens,
        "mean_accepted_length": drafts.mean_accepted_length(),
        "between_requests": {
            "min": float(means.min()),
            "max": float(means.max()),
            "ratio": float(means.max() / means.min()),
            "std": float(means.std()),
        },
        "within_requests": {"std": float(np.mean([request["std"] for request in requests]))},
        "requests": requests,
    }


def staleness(by_name: Mapping[str, Drafts]) -> dict[str, Any]:
    """Acceptance by draft position. `conditional`: of drafts whose earlier tokens were all right; None where there were
    none. `survival`: all tokens up to this position are right."""
    report: dict[str, Any] = {}
    for name, drafts in by_name.items():
        survival = drafts.survival()
        before = [1.0, *survival[:-1]]
        report[name] = {
            "mean_accepted_length": drafts.mean_accepted_length(),
            "survival": survival,
            "conditional": [now / earlier if earlier else None for now, earlier in zip(survival, before, strict=True)],
        }
    first = next(iter(by_name.values()))
    return {
        "draft_position": list(range(1, first.draft_tokens + 1)),
        "num_drafts": int(first.measured.sum()),
        "contexts": report,
    }


def reuse(table: ReuseTable, k: int) -> dict[str, Any]:
    """Recall of the top-k set across layers at one position, against the same layer's at later positions."""
    over_time = table.over_time()
    by_lag = [float(np.mean(over_time[lag])) for lag in table.lags]
    by_distance = table.by_distance()
    return {
        "k": k,
        "layers": list(table.layers),
        "over_time": {"lag": list(table.lags), "recall": by_lag, "by_layer": [over_time[lag] for lag in table.lags]},
        "across_layers": {
            "distance": list(range(1, len(table.layers))),
            "recall": by_distance,
            "by_layers": table.across_layers(),
        },
        # which decays faster: a set used one position late, or one layer away
        "next_position": by_lag[0],
        "next_layer": by_distance[0] if by_distance else None,
    }


def trace_summary(by_method: Mapping[str, Drafts]) -> dict[str, Any]:
    return {
        name: {
            "mean_accepted_length": drafts.mean_accepted_length(),
            "requests": int(drafts.measured.any(axis=1).sum()),
            "starts": len(drafts.starts),
            "draft_tokens": drafts.draft_tokens,
        }
        for name, drafts in by_method.items()
    }
