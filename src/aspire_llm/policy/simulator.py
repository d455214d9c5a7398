"""Replays recorded traces under a policy: the engine's step loop with a cost model for a clock.

Each simulated step asks the policy for one action a request, adds up the load, takes the cost model's seconds and hands out
the results, at once or (`late`) after the next decision, as the engine on a GPU does. A request begins at a random recorded
position, draws its drafts from the trace (see `trace`), wraps around at the trace's end, and leaves after `tokens` tokens.

Of the time of a step each request pays what it adds and an equal share of the rest, so that requests' times add up to the
clock and tokens/s = sum of tokens / sum of times. Every policy serves the same requests from the same positions. Arrivals
go on until the last of these has left, so that the batch does not run dry at the end; later ones are not counted.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any, Literal, get_args

import numpy as np

from aspire_llm.errors import UserError
from aspire_llm.policy.base import Action, CycleOutcome, Policy, RequestView, StepLoad
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.factory import POLICY_SETTINGS, make_policy
from aspire_llm.policy.rows import PASS_SHARE
from aspire_llm.policy.trace import Draft, Trace, shipped_traces

# Where the next cycle's draft comes from: the position that this one reached, as in decoding; or any position, all
# alike, so that every start counts the same. (Not the next start: its draft says the same tokens as this one's.)
Walk = Literal["positions", "starts"]
NO_LOAD = StepLoad(0, 0.0)
BOUNDED = frozenset(name for name, (takes, _) in POLICY_SETTINGS.items() if "max_verify_tokens" in takes)


@dataclass(frozen=True, slots=True)
class SimulatedCost:
    """The clock: coefficients of the cost model, what rows read, and how long the contexts are.

    The default, in units of one read of the weights: of 16 requests each pays 1/16 of it, a full read of its KV costs
    0.35, its draft's read 0.02. That is one refresh layer of 24 and a set of 452 positions at 28,000 tokens.
    """

    fixed: float = 1.0
    per_token: float = 0.0
    per_kv: float = 0.35 / 28_000
    free_tokens: float = 0.0
    per_check: float = 0.0
    verify_step: float = 0.0
    context_length: int = 28_000
    reads: ReadModel = field(default_factory=lambda: ReadModel(452, 24, 1))

    def model(self) -> CostModel:
        return CostModel(self.fixed, self.per_token, self.per_kv, self.free_tokens, self.per_check, self.verify_step)


@dataclass(frozen=True, slots=True)
class Replay:
    """How traces are replayed."""

    batch_size: int = 16
    arrival_rate: float | None = None  # requests a second (Poisson); none: the batch is always full
    late: bool = False  # results arrive after the next decision
    tokens: int = 512  # of each request
    repeats: int = 8  # times each request of the trace is replayed
    walk: Walk = "positions"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "tokens", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)}: allowed are 1 and more", name)
        if self.walk not in get_args(Walk):
            raise UserError(f"walk {self.walk!r}: known are {', '.join(get_args(Walk))}", "walk")
        if self.arrival_rate is not None and self.arrival_rate <= 0.0:
            raise UserError(f"arrival_rate {self.arrival_rate}: must be positive", "arrival_rate")


@dataclass(slots=True)
class _Request:
    """A request: what is true at once (the device's) and what the policy has been told (the host's)."""

    key: int
    source: int  # request of the trace
    offset: int  # position in the trace of the next token
    arrival: float
    draft: Draft  # of this cycle
    rng: random.Random  # of this request's starts: the same for every policy
    pending: int = 0
    emitted: int = 0
    seconds: float = 0.0  # of machine time
    told_confidences: int = 0
    told_emitted: int = 0
    lookahead: int = 0  # most tokens that verifications the host does not know of may have emitted


@dataclass(frozen=True, slots=True)
class _Event:
    """What a row produced, on its way to the host."""

    request: _Request
    outcome: CycleOutcome | None  # of a verification
    lookahead: int = 0
    emitted: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What a policy made of a trace. Machine time and tokens are totals by request of the trace."""

    tokens: tuple[int, ...]  # [R]
    seconds: tuple[float, ...]  # [R]
    latency: float  # mean seconds a token, from arrival to departure
    num_steps: int
    num_cycles: int
    num_draft_tokens: int
    num_accepted_tokens: int
    most_verify_tokens: int  # in any step, in verifications with drafts

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


class Simulation:
    """One policy on one trace. It is itself the `Truth` that `hindsight` is told by."""

    def __init__(self, trace: Trace, cost: SimulatedCost, replay: Replay) -> None:
        self._trace, self._cost, self._replay = trace, cost, replay
        self._model = cost.model()
        self._running: dict[int, _Request] = {}
        self._done: list[tuple[_Request, float]] = []
        self._cycles = self._drafted = self._accepted = self._most = 0

    def all_right(self, key: int, pending: int) -> bool:
        return self._running[key].draft.accepted >= pending

    def run(self, policy: Policy) -> SimulatedRun:
        replay, rng = self._replay, random.Random(self._replay.seed)
        order = [r for r in range(self._trace.num_requests) for _ in range(replay.repeats)]
        rng.shuffle(order)
        offsets = [rng.randrange(self._trace.span) for _ in order]
        keys, clock, arrival, steps, counted = count(), 0.0, 0.0, 0, 0
        waiting: deque[_Request] = deque()
        events: list[_Event] = []
        load = NO_LOAD
        while counted < len(order):
            while arrival <= clock if replay.arrival_rate else len(self._running) + len(waiting) < replay.batch_size:
                key = next(keys)
                source, offset = order[key % len(order)], offsets[key % len(order)]
                came = arrival if replay.arrival_rate else clock
                waiting.append(
                    _Request(key, source, offset, came, self._trace.draft_at(source, offset), random.Random(key))
                )
                if replay.arrival_rate:
                    arrival += rng.expovariate(replay.arrival_rate)
            while waiting and len(self._running) < replay.batch_size:
                admitted = waiting.popleft()
                self._running[admitted.key] = admitted
            if not self._running:
                clock = arrival
                continue
            batch = list(self._running.values())
            actions = policy.decide([self._view(r) for r in batch], NO_LOAD)
            if replay.late and steps:
                counted += self._tell(policy, events, load, clock, len(order))
                events = []
            load, events = self._execute(batch, actions)
            clock += load.seconds
            steps += 1
            if not replay.late:
                counted += self._tell(policy, events, load, clock, len(order))
        tokens, seconds = [0] * self._trace.num_requests, [0.0] * self._trace.num_requests
        for request, _ in self._done:
            tokens[request.source] += request.emitted
            seconds[request.source] += request.seconds
        latency = sum(left - r.arrival for r, left in self._done) / sum(tokens)
        return SimulatedRun(
            tuple(tokens), tuple(seconds), latency, steps, self._cycles, self._drafted, self._accepted, self._most
        )

    def _view(self, r: _Request) -> RequestView:
        left = self._replay.tokens - r.told_emitted - r.lookahead  # at least
        max_draft = max(0, min(self._trace.max_draft, left - 1))
        length = self._cost.context_length + r.told_emitted + r.lookahead + r.pending
        return RequestView(r.key, length, r.pending, r.draft.confidences[: r.told_confidences], max_draft)

    def _execute(self, batch: list[_Request], actions: list[Action]) -> tuple[StepLoad, list[_Event]]:
        """Run a step on the device: move the requests, charge them, and say what the host will hear."""
        if len(actions) != len(batch):
            raise ValueError(f"{len(actions)} actions for {len(batch)} requests")
        events, loads, verify_tokens = [], [], 0
        for r, action in zip(batch, actions, strict=True):
            length = self._cost.context_length + r.emitted
            if action is Action.WAIT:
                loads.append((0, 0.0))
                events.append(_Event(r, None))
            elif action is Action.DRAFT:
                if r.pending >= self._trace.max_draft:
                    raise ValueError(f"request {r.key} must not draft: {r.pending} pending")
                r.pending += 1
                loads.append((1, self._cost.reads.draft(length + r.pending, r.pending)))
                events.append(_Event(r, None))
            else:
                loads.append((1 + r.pending, self._cost.reads.verify(length + r.pending + 1)))
                verify_tokens += 1 + r.pending if r.pending else 0
                events.append(self._verify(r))
        tokens, kv_tokens = sum(n for n, _ in loads), sum(kv for _, kv in loads)
        checked = sum(kv for n, kv in loads if n > 1)
        seconds = self._model.predict(StepLoad(tokens, kv_tokens, checked_kv=checked))
        whole = self._cost.fixed + (self._cost.verify_step if checked else 0.0)
        again = [  # of each request: keys that its verification reads more than once
            PASS_SHARE * self._cost.per_kv * kv * self._cost.reads.extra_passes(n) if n > 1 else 0.0 for n, kv in loads
        ]
        token_time = seconds - whole - self._cost.per_kv * kv_tokens - self._cost.per_check * checked
        for r, (n, kv), more in zip(batch, loads, again, strict=True):
            share = whole / len(batch) + (token_time * n / tokens if tokens else 0.0)
            r.seconds += share + (self._cost.per_kv + self._cost.per_check * (n > 1)) * kv + more
        self._most = max(self._most, verify_tokens)
        return StepLoad(tokens, kv_tokens, seconds + sum(again), checked), events

    def _verify(self, r: _Request) -> _Event:
        accepted = min(r.draft.accepted, r.pending)
        outcome = CycleOutcome(r.key, r.pending, accepted, r.draft.confidences[: r.pending])
        emitted = min(accepted + 1, self._replay.tokens - r.emitted)
        event = _Event(r, outcome, r.pending + 1, emitted)
        r.lookahead += r.pending + 1
        r.emitted += emitted
        if self._replay.walk == "positions":
            r.offset = (r.offset + accepted + 1) % self._trace.span
        else:
            r.offset = r.rng.randrange(self._trace.span)
        r.draft = self._trace.draft_at(r.source, r.offset)
        r.pending = r.told_confidences = 0
        return event

    def _tell(self, policy: Policy, events: list[_Event], load: StepLoad, clock: float, num_counted: int) -> int:
        """Hand a step's results to the host; how many of the counted requests have left."""
        policy.observe_step(load)
        left = 0
        for event in events:
            r, outcome = event.request, event.outcome
            if r.key not in self._running:
                continue  # a row planned before it was known that the request had ended
            if outcome is None:
                # A draft's confidence; it is of no use once its verification has been planned.
                r.told_confidences += r.told_confidences < r.pending
                continue
            r.lookahead -= event.lookahead
            r.told_emitted += event.emitted
            if event.emitted:
                policy.observe_cycle(outcome)
                self._cycles += 1
                self._drafted += outcome.drafted
                self._accepted += outcome.accepted
            if r.told_emitted == self._replay.tokens:
                del self._running[r.key]
                policy.forget(r.key)
                if r.key < num_counted:
                    self._done.append((r, clock))
                    left += 1
        return left


def run_policy(
    trace: Trace, spec: str, cost: SimulatedCost, replay: Replay, max_verify_tokens: int | None = None
) -> SimulatedRun:
    """Replay one trace under one policy. `spec`: a policy's name, with its draft length after a colon where it has one."""
    name, _, length = spec.partition(":")
    if length and not length.isdigit():
        raise UserError(f"policy {spec!r}: after the colon stands the draft length", "policy")
    simulation = Simulation(trace, cost, replay)
    policy = make_policy(
        name,
        cost.model(),
        cost.reads,
        draft_length=int(length) if length else None,
        max_verify_tokens=max_verify_tokens if name in BOUNDED else None,
        truth=simulation if name == "hindsight" else None,
    )
    return simulation.run(policy)


def best_fixed_length(trace: Trace, cost: SimulatedCost, replay: Replay) -> tuple[int, SimulatedRun]:
    """The single draft length that is best for the whole trace, found by trying all of them (phases spread)."""
    runs = {g: run_policy(trace, f"staggered:{g}", cost, replay) for g in range(1, trace.max_draft + 1)}
    best = max(runs, key=lambda g: runs[g].tokens_per_s)
    return best, runs[best]


def simulate(
    traces: Mapping[str, Trace] | None = None,
    cost: SimulatedCost | None = None,
    policies: Sequence[str] = ("ema", "confidence", "hindsight"),
    replay: Replay | None = None,
    *,
    max_verify_tokens: int | None = None,
    resamples: int = 1000,
) -> dict[str, Any]:
    """Replay every trace (by default the shipped ones) under every policy.

    Returns {"traces": {NAME: {"policies": {NAME: {"tokens_per_s", "speedup", "of_hindsight", "interval"}}}}}: tokens a
    second of machine time; that over plain decoding's and over hindsight's; and the 95 % interval of the last, by
    bootstrap over the requests of the trace (every request's replays stay together, policies are compared on the same).
    `max_verify_tokens` reaches the policies that take it.
    """
    traces = shipped_traces() if traces is None else traces
    cost, replay = cost or SimulatedCost(), replay or Replay()
    report: dict[str, Any] = {}
    for name, trace in traces.items():
        plain = run_policy(trace, "autoregressive", cost, replay)
        hindsight = run_policy(trace, "hindsight", cost, replay)
        known = {"autoregressive": plain, "hindsight": hindsight}
        rows = {}
        for spec in policies:
            run = known.get(spec) or run_policy(trace, spec, cost, replay, max_verify_tokens)
            rows[spec] = {
                "tokens_per_s": run.tokens_per_s,
                "speedup": run.tokens_per_s / plain.tokens_per_s,
                "of_hindsight": run.tokens_per_s / hindsight.tokens_per_s,
                "interval": bootstrap_interval(run, hindsight, resamples, replay.seed),
            }
        report[name] = {"policies": rows}
    return {"traces": report}


def bootstrap_interval(run: SimulatedRun, other: SimulatedRun, resamples: int = 1000, seed: int = 0) -> list[float]:
    """95 % percentile interval of run's tokens/s over other's, resampling the requests of the trace."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(run.tokens), size=(resamples, len(run.tokens)))

    def rates(of: SimulatedRun) -> np.ndarray:
        rate: np.ndarray = np.asarray(of.tokens)[picks].sum(axis=1) / np.asarray(of.seconds)[picks].sum(axis=1)
        return rate

    low, high = np.quantile(rates(run) / rates(other), [0.025, 0.975])
    return [float(low), float(high)]


def read_cost(path: str) -> SimulatedCost:
    """A SimulatedCost from a JSON object with any of its fields; those of the read model (budget, num_layers,
    num_refresh_layers) stand beside the others, all three or none."""
    try:
        with open(path, encoding="utf-8") as handle:
            given = json.load(handle)
    except (OSError, ValueError) as error:
        raise UserError(f"cost {path}: cannot be read as JSON ({error})", "cost") from error
    own = {f.name for f in fields(SimulatedCost)} - {"reads"}
    reads = {f.name for f in fields(ReadModel)} - {"passes"}
    if not isinstance(given, dict) or given.keys() - own - reads:
        raise UserError(
            f"cost {path}: an object with keys of {sorted(own | reads)} is needed, it has {list(given)}", "cost"
        )
    for key, value in given.items():
        whole = key == "context_length" or key in reads
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or value < 0:
            raise UserError(f"cost {path}: {key} is {value!r}, allowed are numbers from 0 on, counts whole", "cost")
    cost = SimulatedCost(**{k: v for k, v in given.items() if k in own})
    of_reads = {k: v for k, v in given.items() if k in reads}
    if of_reads and of_reads.keys() != reads:
        raise UserError(f"cost {path}: {sorted(reads - of_reads.keys())} missing beside {sorted(of_reads)}", "cost")
    return replace(cost, reads=ReadModel(**of_reads)) if of_reads else cost


def format_report(report: Mapping[str, Any]) -> str:
    """The report of `simulate` as a table."""
    lines = [f"{'trace':32} {'policy':16} {'tokens/s':>10} {'speed-up':>9} {'of hindsight':>13}  95 %"]
    for name, trace in report["traces"].items():
        for policy, row in trace["policies"].items():
            low, high = row["interval"]
            lines.append(
                f"{name:32} {policy:16} {row['tokens_per_s']:10.4g} {row['speedup']:8.2f}x {row['of_hindsight']:13.3f}"
                f"  {low:.3f}-{high:.3f}"
            )
    return "\n".join(lines)
