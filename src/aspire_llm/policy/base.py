"""The protocol of policies: which requests draft and which verify in the coming step. Pure Python, no torch.

A policy sees requests only through `RequestView` and learns only through the `observe_*` methods, so the same object runs
in the engine, one step late, and in the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable


class Action(Enum):
    DRAFT = "draft"
    VERIFY = "verify"
    WAIT = "wait"  # no row this step (a synchronised batch waits for its slowest request)


@dataclass(slots=True)  # not frozen: one is made for every request and step
class RequestView:
    """What a policy may know of one decoding request when a step is planned. To be read in `decide`, not kept or changed."""

    key: int  # stable for the life of the request
    length: int  # tokens whose K/V a full read would touch (upper bound when results are late)
    pending: int  # drafts made since the last verification, those in flight included
    confidences: Sequence[float]  # top-1 probability of each pending draft known so far; may be shorter than `pending`
    max_draft: int  # the most drafts this request may have pending (0: it must verify)


@dataclass(slots=True)  # not frozen: there may be hundreds a step
class CycleOutcome:
    """What a verification found. Nobody changes it."""

    key: int
    drafted: int
    accepted: int  # 0 ≤ accepted ≤ drafted
    confidences: Sequence[float]  # of all `drafted` drafts


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The quantities that a step's time is made of, and the time itself once measured."""

    tokens: int  # tokens in the forward, all rows
    kv_tokens: float  # KV tokens read, mean over layers, all rows
    seconds: float = 0.0
    checked_kv: float = 0.0  # of the KV tokens, those read by verifications of drafts
    host_seconds: float = 0.0  # of the host's work for a step, where that goes on while the device runs another


class Policy(Protocol):
    def decide(self, requests: Sequence[RequestView], prefill: StepLoad) -> list[Action]:
        """One action a request, in order. `prefill` is the load of the prefill rows that will share the step.

        A request with `pending == max_draft` must not draft. VERIFY with nothing pending is plain decoding.
        """
        ...

    def observe_cycle(self, outcome: CycleOutcome) -> None:
        """A verification's outcome, once for each."""
        ...

    def observe_step(self, load: StepLoad) -> None:
        """A finished step's load and its measured seconds."""
        ...

    def forget(self, key: int) -> None:
        """The request has left; `key` will not come again."""
        ...


@runtime_checkable
class Priced(Protocol):
    """A policy that weighs drafts at a price, to be read between steps."""

    @property
    def price(self) -> float:
        """Tokens that a second of a request's time must bring for one more draft to be made: mean over the requests that
        are there, each at the price it was last asked at; 0.0 where none is."""
        ...
