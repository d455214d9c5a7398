"""Several methods with one set of options: engine configurations that differ in the method alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aspire_llm.config import METHODS, EngineConfig, make_config
from aspire_llm.errors import UserError
from aspire_llm.policy.factory import POLICY_SETTINGS

HINDSIGHT = "hindsight"  # the bound: drafts as `aspire`, told what plain decoding says
HINDSIGHT_DRAFTS_AS = "aspire"
DRAFTING_OPTIONS = ("budget", "draft_tokens", "refresh_layers", "profile")


def method_configs(methods: Sequence[str], options: Mapping[str, Any]) -> dict[str, EngineConfig]:
    """A config for each method, in order: options that only some methods have go to those. Raises UserError, also for an
    option that none of them has."""
    chosen: dict[str, dict[str, Any]] = {}
    for method in dict.fromkeys(methods):
        if method not in (*METHODS, HINDSIGHT):
            raise UserError(f"method {method!r} is unknown; known: {', '.join((*METHODS, HINDSIGHT))}", "method")
        common = {name: value for name, value in options.items() if name not in DRAFTING_OPTIONS}
        if method == HINDSIGHT:
            chosen[method] = {**common, "method": HINDSIGHT_DRAFTS_AS, "policy": HINDSIGHT}
        else:
            chosen[method] = {**common, "method": method}
    for name in DRAFTING_OPTIONS:
        if name not in options:
            continue
        refused: UserError | None = None
        taken = False
        for settings in chosen.values():
            try:
                check_option(make_config(**settings, **{name: options[name]}), name)
            except UserError as error:
                refused = error
            else:
                settings[name] = options[name]
                taken = True
        if not taken and refused is not None:
            raise refused
    return {method: make_config(**settings) for method, settings in chosen.items()}


def check_option(config: EngineConfig, name: str) -> None:
    """Raises UserError if the policy has no use for the option `name`."""
    policy = config.policy or config.preset.policy
    takes, _ = POLICY_SETTINGS[policy]
    if name == "draft_tokens" and "draft_length" not in takes:
        raise UserError(f"draft_tokens={config.draft_tokens} does nothing with policy {policy!r}", name)
