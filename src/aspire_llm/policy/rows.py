"""What a row costs at the margin, and the bound on verify tokens: all that policies share about a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from aspire_llm.errors import UserError
from aspire_llm.policy.base import Action, RequestView, StepLoad
from aspire_llm.policy.cost import CostModel, ReadModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RISE_KEEP, FALL_KEEP = 0.9, 0.99  # of the host's past, each step
PACE_STEPS = 5  # two odd ones among so many are ignored
DRAFT, VERIFY = Action.DRAFT, Action.VERIFY  # looked up once: members of an Enum are slow to get at
PASS_SHARE = 0.7  # of a read: another pass over the same keys, of which some are still in the cache (measured, H200)
TYPICAL_DRAFTS = 4  # of a cycle, where a step of drafting requests is guessed at


class HostPace:
    """Smoothed seconds of the host's work for a step, where a device runs another one meanwhile; 0 where they take turns.

    It rises within ten steps and falls within a hundred: plain steps give the host less to do, and must not make drafts look
    cheap again at once. One step of the host's that took very long (a kernel compiled, a process of somebody else's) is not
    its pace: the median of the last few is smoothed, not each.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: deque[float] = deque(maxlen=PACE_STEPS)

    def observe(self, load: StepLoad) -> None:
        if load.host_seconds <= 0.0:
            return
        self._last.append(load.host_seconds)
        now = median_low(self._last)
        keep = RISE_KEEP if now > self.seconds else FALL_KEEP
        self.seconds = keep * self.seconds + (1.0 - keep) * now


@dataclass(slots=True)
class RowCosts:
    """Seconds that a request's row adds to a step: its tokens, its KV reads, and its share of the fixed part.

    The fixed part is shared by the decoding requests and, if any prefill rides along, by that as one more. Where the cost
    model has a hinge, a token costs what the average token of a step does; a batch that drafts has about two tokens a
    request and step (g drafts and g + 1 verified in g + 1 steps).
    """

    share: float
    per_token: float
    per_kv: float
    reads: ReadModel
    per_check: float = 0.0
    stall: float = 0.0  # the device's wait for the host, beside a draft or a verification of drafts
    verify_share: float = 0.0  # of what a step pays once for its verifications of drafts
    idle: float = 0.0  # of the device in a step of drafts alone, for the whole batch: the host takes longer
    _draft: float = field(init=False)  # what every draft costs, and what every verification does, besides its reads
    _verify: float = field(init=False)

    def __post_init__(self) -> None:
        self._draft = self.stall + self.share + 2.0 * self.per_token
        self._verify = self.share + self.per_token

    @classmethod
    def of_step(
        cls,
        cost: CostModel,
        reads: ReadModel,
        num_requests: int,
        prefill: StepLoad,
        host_seconds: float = 0.0,
        length: float = 0.0,
        together: float = 1.0,
    ) -> RowCosts:
        """host_seconds: the host's time for a step (`HostPace`); length: mean tokens of the requests; together: verifications
        of drafts that share a step."""
        tokens = prefill.tokens + 2.0 * num_requests
        charged = max(0.0, 1.0 - cost.free_tokens / tokens) if tokens else 1.0
        share = cost.fixed / max(1, num_requests + (prefill.tokens > 0))
        costs = cls(
            share,
            cost.per_token * charged,
            cost.per_kv,
            reads,
            cost.per_check,
            verify_share=cost.verify_step / together,
        )
        if host_seconds <= 0.0:
            return costs
        # A step takes the host's time or the device's, whichever is longer: what a step of drafts leaves of the former is the
        # drafts' to pay. Of plain steps it is not asked: they give the host less to do and the device more.
        least = host_seconds / max(1, num_requests)
        cycle = TYPICAL_DRAFTS * costs.draft(round(length), TYPICAL_DRAFTS) + costs.check(round(length))
        read = num_requests * reads.draft(round(length), TYPICAL_DRAFTS)
        drafts = StepLoad(prefill.tokens + num_requests, prefill.kv_tokens + read)
        return replace(
            costs,
            stall=max(0.0, least - cycle / (TYPICAL_DRAFTS + 1)),
            idle=max(0.0, host_seconds - cost.predict(drafts)),
        )

    def draft(self, length: int, pending: int) -> float:
        """One more draft: its DRAFT row now and its token in the verification to come."""
        seconds = self._draft + self.per_kv * self.reads.draft(length, pending + 1)
        if self.reads.another_pass(pending + 2):
            seconds += PASS_SHARE * self.per_kv * self.reads.verify(length)
        return seconds

    def verify(self, length: int) -> float:
        """A verification of no drafts: a plain token."""
        return self._verify + self.per_kv * self.reads.verify(length)

    def check(self, length: int) -> float:
        """A verification of drafts; its tokens beyond the first are counted with the drafts they check."""
        return self.stall + self.verify_share + self.verify(length) + self.per_check * self.reads.verify(length)

    def of_rows(self, lengths: Floats, pending: Ints) -> tuple[Floats, Floats, Floats]:
        """`draft`, `verify` and `check` of many rows at once; lengths and pending [R]."""
        draft = self._draft + self.per_kv * self.reads.drafts(lengths, pending + 1)
        if self.reads.passes:
            draft += PASS_SHARE * self.per_kv * lengths * self.reads.other_passes(pending + 2)
        verify = self._verify + self.per_kv * lengths
        return draft, verify, self.stall + self.verify_share + verify + self.per_check * lengths


class VerifyTogether:
    """Holds verifications back until enough requests want one, since a step with any pays `CostModel.verify_step` once.

    Meanwhile the requests draft on, which costs little: they stopped where one more draft was just not worth it. With k
    steps since the last verification, in which waiting has lost L seconds, and w more by waiting now, the cost of both a step,
    (verify_step + L) / k, still falls while w < (verify_step + L) / k (renewal-reward theorem): so long they wait.
    """

    def __init__(self) -> None:
        self._steps = 1
        self._lost = 0.0

    def waits(self, verify_step: float, lost: float) -> bool:
        """Whether the step goes without verifications of drafts. lost: seconds that waiting costs those that want one, all
        together; infinite if one of them cannot draft on; 0 where nobody wants one."""
        if lost * self._steps < verify_step + self._lost or not lost:
            self._lost += lost
            self._steps += 1
            return True
        self._steps, self._lost = 1, 0.0
        return False


class VerifyBound:
    """At most `limit` tokens a step in verifications with drafts, so that they do not bunch; the longest deferred go first.

    A deferred request drafts on if it may, else it waits. Plain decoding (nothing pending) is never deferred, and one
    verification always goes, so nothing starves.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise UserError(f"max_verify_tokens {limit}: allowed are 1 and more, or none", "max_verify_tokens")
        self._limit = limit
        self._deferred: dict[int, int] = {}

    def apply(self, requests: Sequence[RequestView], actions: list[Action]) -> list[Action]:
        if self._limit is None:
            return actions
        asking = [i for i, action in enumerate(actions) if action is VERIFY and requests[i].pending]
        asking.sort(key=lambda i: (-self._deferred.get(requests[i].key, 0), -requests[i].pending))
        room, first = self._limit, True
        for i in asking:
            view = requests[i]
            if first or view.pending + 1 <= room:
                room -= view.pending + 1
                self._deferred.pop(view.key, None)
                first = False
            else:
                self._deferred[view.key] = self._deferred.get(view.key, 0) + 1
                actions[i] = DRAFT if view.pending < view.max_draft else Action.WAIT
        return actions

    def forget(self, key: int) -> None:
        self._deferred.pop(key, None)
