"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aspire_llm.errors import UserError
from aspire_llm.policy.autoregressive import Autoregressive
from aspire_llm.policy.base import Policy
from aspire_llm.policy.confidence import Confidence
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.ema import Ema
from aspire_llm.policy.fsm import Fsm
from aspire_llm.policy.hindsight import Hindsight, Truth
from aspire_llm.policy.lockstep import Lockstep
from aspire_llm.policy.staggered import Staggered

# name -> settings of its own that it takes, and those of them that it cannot do without
POLICY_SETTINGS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "autoregressive": (frozenset(), frozenset()),
    "lockstep": (frozenset({"draft_length"}), frozenset({"draft_length"})),
    "staggered": (frozenset({"draft_length", "max_verify_tokens"}), frozenset({"draft_length"})),
    "fsm": (frozenset({"max_verify_tokens"}), frozenset()),
    "ema": (frozenset({"max_verify_tokens"}), frozenset()),
    "confidence": (frozenset({"max_verify_tokens"}), frozenset()),
    "hindsight": (frozenset({"truth"}), frozenset({"truth"})),
}

PRICED = frozenset({"fsm", "ema", "confidence", "hindsight"})  # policies that weigh costs


def make_policy(
    name: str,
    cost: CostModel,
    reads: ReadModel,
    *,
    draft_length: int | None = None,
    max_verify_tokens: int | None = None,
    truth: Truth | None = None,
) -> Policy:
    """The policy called `name`. `cost` (kept right by the policies that use it) and `reads` describe the machine and model;
    the other settings are the policy's own: one that it has no use for, or lacks, is a UserError."""
    if name not in POLICY_SETTINGS:
        raise UserError(f"policy {name!r}: known are {', '.join(POLICY_SETTINGS)}", "policy")
    given: dict[str, Any] = {"draft_length": draft_length, "max_verify_tokens": max_verify_tokens, "truth": truth}
    settings = {key: value for key, value in given.items() if value is not None}
    takes, needs = POLICY_SETTINGS[name]
    for key in settings.keys() - takes:
        raise UserError(f"{key}: policy {name} has no such setting; it takes {sorted(takes) or 'none'}", key)
    for key in needs - settings.keys():
        raise UserError(f"policy {name}: needs {key}", key)
    if draft_length is not None and draft_length < 1:
        raise UserError(f"draft_length {draft_length}: allowed are 1 and more", "draft_length")
    unpriced: dict[str, Callable[..., Policy]] = {
        "autoregressive": Autoregressive,
        "lockstep": Lockstep,
        "staggered": Staggered,
    }
    if name in unpriced:
        return unpriced[name](**settings)
    priced: dict[str, Callable[..., Policy]] = {
        "fsm": Fsm,
        "ema": Ema,
        "confidence": Confidence,
        "hindsight": Hindsight,
    }
    return priced[name](cost, reads, **settings)
