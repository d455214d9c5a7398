"""Traces made from accepted lengths instead of recorded: for shapes and workloads of which only these are known.

Each request has a mean accepted length of its own, between two bounds and with a given mean over the requests. The draft of
the token at an output position is right with a probability p that gives this mean, and has one fate: whatever the policy,
wherever the draft began. With p alike at all positions the accepted drafts of a draft of K tokens have the mean
p + p² + … + p^K, and the accepted length is one more.

The draft's confidence comes from what a recorded trace shows (`ConfidenceLaw`): confidences of right drafts, of the first
wrong one, and of those after it, which are about a text that has gone astray.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aspire_llm.errors import UserError
from aspire_llm.policy.trace import Draft, Trace, default_method, read_traces, shipped_files

LAW_TRACE = "qwen2.5-coder-0.5b_28k_prose"  # a draft's confidence predicts its acceptance with AUC 0.92 there
FATES, RIGHT, WRONG, ASTRAY = range(4)  # streams of random numbers of a request

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ConfidenceLaw:
    """Confidences of drafts as they were seen, ascending."""

    right: Floats
    wrong: Floats  # of the first wrong draft of a cycle
    astray: Floats  # of the drafts after it

    @classmethod
    def of(cls, trace: Trace) -> ConfidenceLaw:
        """Raises UserError where the trace lacks one of the three kinds."""
        right: list[float] = []
        wrong: list[float] = []
        astray: list[float] = []
        for draft in (draft for request in trace.drafts for draft in request):
            right += draft.confidences[: draft.accepted]
            wrong += draft.confidences[draft.accepted : draft.accepted + 1]
            astray += draft.confidences[draft.accepted + 1 :]
        if not (right and wrong and astray):
            raise UserError(f"trace {trace.name}: right and wrong drafts are needed for a law of confidences", "trace")
        return cls(*(np.sort(np.asarray(values)) for values in (right, wrong, astray)))

    @property
    def auc(self) -> float:
        """Probability that a right draft has more confidence than a wrong one (ties count half)."""
        below = np.searchsorted(self.wrong, self.right, "left")
        ties = np.searchsorted(self.wrong, self.right, "right") - below
        return float((below + 0.5 * ties).mean() / len(self.wrong))


def synthetic_trace(
    mean: float,
    low: float,
    high: float,
    requests: int,
    positions: int,
    seed: int,
    draft_tokens: int = 32,
    law: ConfidenceLaw | None = None,
) -> Trace:
    """A trace of `requests` requests with a draft of `draft_tokens` from each of `positions` output positions.

    mean, low, high: of the requests' mean accepted lengths (1 + accepted drafts, of drafts of `draft_tokens`; shorter drafts
    have less). They are spread over [low, high] with the most even density that has this mean (exponential; uniform for the
    midpoint), one from each of `requests` strata, so that few requests have about the mean too.
    seed: with (request, position) it fixes a draft's fate and confidence. Fates of `positions` follow each other in a ring,
    as the replay does that begins again at its end.
    Raises UserError for numbers that do not fit together.
    """
    for name, count in (("requests", requests), ("positions", positions), ("draft_tokens", draft_tokens)):
        if count < 1:
            raise UserError(f"{name} {count}: allowed are 1 and more", name)
    if seed < 0:
        raise UserError(f"seed {seed}: allowed are 0 and more", "seed")
    if not (1.0 <= low <= mean <= high < draft_tokens + 1 and math.isfinite(mean)):
        raise UserError(
            f"accepted lengths {mean:g},{low:g},{high:g} (mean, min, max): must be 1 <= min <= mean <= max < "
            f"{draft_tokens + 1} with drafts of {draft_tokens}",
            "lengths",
        )
    if low < high and not low < mean < high:
        raise UserError(f"accepted lengths {mean:g},{low:g},{high:g}: the mean must lie between min and max", "lengths")
    law = law if law is not None else shipped_law()
    drafts = []
    for request, length in enumerate(request_means(mean, low, high, requests, seed)):
        p = right_probability(length, draft_tokens)
        draws = [np.random.default_rng((seed, request, stream)).random(positions) for stream in range(4)]
        drafts.append(_drafts(draws[FATES] < p, law, draws, draft_tokens))
    name = f"lengths {mean:g} ({low:g}-{high:g})"
    return Trace(name, "synthetic", 0, 1, tuple(drafts))


def shipped_law() -> ConfidenceLaw:
    """The law of the shipped trace `LAW_TRACE`."""
    (file,) = (file for file in shipped_files() if file.name == f"{LAW_TRACE}.npz")
    methods = read_traces(file)
    return ConfidenceLaw.of(methods[default_method(methods)])


def request_means(mean: float, low: float, high: float, requests: int, seed: int) -> list[float]:
    """Mean accepted length of each request, in random order."""
    rng = np.random.default_rng((seed, requests))
    strata = (rng.permutation(requests) + rng.random(requests)) / requests
    if low == high:
        return [mean] * requests
    slope = _slope((mean - low) / (high - low))
    # the quantile function of the density that is proportional to exp(slope · x) on [0, 1]
    shares = strata if slope == 0.0 else np.log1p(strata * math.expm1(slope)) / slope
    return [low + (high - low) * float(share) for share in shares]


def right_probability(accepted_length: float, draft_tokens: int) -> float:
    """The p with 1 + p + … + p^draft_tokens = accepted_length."""
    return _bisect(lambda p: sum(p**k for k in range(draft_tokens + 1)), accepted_length, 0.0, 1.0)


def _drafts(
    right: NDArray[np.bool_], law: ConfidenceLaw, draws: Sequence[Floats], draft_tokens: int
) -> tuple[Draft, ...]:
    """The draft from every position. right: [S], fate of the draft at each position."""
    positions = len(right)
    wanted = np.where(right, _quantile(law.right, draws[RIGHT]), _quantile(law.wrong, draws[WRONG]))
    ring = -(-(draft_tokens - 1) // positions) + 1  # times round, so that the last start's draft is whole
    on_track = np.tile(wanted, ring).tolist()
    astray = np.tile(_quantile(law.astray, draws[ASTRAY]), ring).tolist()
    accepted = [0] * positions
    run = 0  # right drafts from the position on; twice round, for runs that cross the end
    for i in reversed(range(2 * positions)):
        run = run + 1 if right[i % positions] else 0
        if i < positions:
            accepted[i] = min(run, draft_tokens)
    if right.all():
        accepted = [draft_tokens] * positions
    made = []
    for start, held in enumerate(accepted):
        turn = min(start + held + 1, start + draft_tokens)  # the first wrong draft is still on track
        made.append(Draft(held, (*on_track[start:turn], *astray[turn : start + draft_tokens])))
    return tuple(made)


def _quantile(values: Floats, shares: Floats) -> Floats:
    """Element of the ascending `values` at each share in [0, 1)."""
    chosen: Floats = values[(shares * len(values)).astype(np.int64)]
    return chosen


def _slope(mean: float) -> float:
    """The slope s of a density proportional to exp(s · x) on [0, 1] that has this mean: 1/(1 - e^-s) - 1/s."""
    if abs(mean - 0.5) < 1e-6:
        return 0.0

    def of(s: float) -> float:
        return 0.5 if abs(s) < 1e-6 else 1.0 / -math.expm1(-s) - 1.0 / s

    return _bisect(of, mean, -500.0, 500.0)


def _bisect(rising: Callable[[float], float], value: float, low: float, high: float) -> float:
    for _ in range(200):
        middle = (low + high) / 2.0
        if rising(middle) < value:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0
