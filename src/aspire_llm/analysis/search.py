"""Measures a model's profile: which layers should refresh the drafting context, and how large it should be.

First a cheap pass: one run of plain decoding gives the attention recall of every layer, of every pair, of every split
(`recall`). Then drafts are really made, for the penultimate layer and the few that promise most: layers, then splits, then
budgets. The cost model turns acceptance into tokens per second; the best of all that was measured becomes the profile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

from aspire_llm.analysis.efficiency import Efficiency, efficiency
from aspire_llm.analysis.recall import RecallTable, ScoreRecorder, Split, recall_of
from aspire_llm.analysis.recorder import Method, Recorder
from aspire_llm.analysis.saved_work import SavedWork
from aspire_llm.config import make_config
from aspire_llm.context.profile import Profile
from aspire_llm.engine.build import build_engine
from aspire_llm.errors import UserError
from aspire_llm.models.load import LoadedModel
from aspire_llm.policy.cost import CostModel, ReadModel

DEFAULT_BUDGETS = (256, 512, 1024)
CALIBRATION_REQUESTS, CALIBRATION_CONTEXT = 4, 4096

Show = Callable[[str, int, int], None]  # (stage, tokens done, of at most)


@dataclass(frozen=True, slots=True)
class Effort:
    """What is tried, and on how much. budgets: None for those of 256, 512 and 1024 that leave most of a prompt out."""

    budgets: tuple[int, ...] | None = None
    shares: tuple[float, ...] = (0.25, 0.5, 0.75)
    singles: int = 5  # layers that are drafted with, after the penultimate
    pairs: int = 3
    pair_layers: int = 8  # pairs are of the best so many layers
    starts: int = 12  # of each request
    first_start: int = 8
    stride: int = 4
    draft_tokens: int = 16
    cycle: int = 8  # draft positions from one verification to the next, in the recall pass
    batch_size: int = 8  # requests that share the fixed part of a step, in the cost

    def all_starts(self) -> tuple[int, ...]:
        return tuple(self.first_start + self.stride * i for i in range(self.starts))

    @property
    def num_output(self) -> int:
        return self.all_starts()[-1] + self.draft_tokens


@dataclass(frozen=True, slots=True)
class Candidate:
    refresh_layers: tuple[int, ...]
    split: Split

    @property
    def method(self) -> Method:
        return Method("refreshed", self.split.budget, self.refresh_layers, self.split.verified_share)

    @property
    def name(self) -> str:
        layers = " and ".join(map(str, self.refresh_layers))
        return f"layer {layers}, budget {self.split.budget}, verified {self.split.verified_share:g}"


@dataclass(frozen=True, slots=True)
class Measured:
    candidate: Candidate
    recall: float
    survival: tuple[float, ...]  # [K]: probability that the first k + 1 drafts are right
    efficiency: Efficiency

    @property
    def accepted_length(self) -> float:
        """Of drafts of full length, the verification's own token counted."""
        return 1.0 + sum(self.survival)

    def as_json(self) -> dict[str, Any]:
        return {
            "refresh_layers": list(self.candidate.refresh_layers),
            "budget": self.candidate.split.budget,
            "verified_share": self.candidate.split.verified_share,
            "recall": round(self.recall, 6),
            "accepted_length": round(self.accepted_length, 6),
            "acceptance_by_position": [round(alive, 6) for alive in self.survival],
            "draft_length": self.efficiency.draft_length,
            "accepted_length_at_draft_length": round(self.efficiency.accepted_length, 6),
            "speedup": round(self.efficiency.speedup, 6),
        }


@dataclass(slots=True)
class ProfileSearch:
    """One model, some prompts, and what is known so far. Deterministic, but for `cost` where it is measured.

    cost: coefficients to use; None: this machine is timed. Raises UserError where the prompts are too short to leave
    anything out, or the model ends its answers too early.
    """

    model: LoadedModel
    prompts: Sequence[Sequence[int]]
    effort: Effort
    show: Show
    cost: CostModel | None = None
    results: dict[Candidate, Measured] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """All that what is measured depends on; not how many candidates are tried, nor costs."""
        text = hashlib.sha256(json.dumps([list(p) for p in self.prompts]).encode()).hexdigest()
        dtype = str(self.model.decoder.dtype)
        choice = ("singles", "pairs", "pair_layers", "batch_size")
        effort = {name: value for name, value in asdict(self.effort).items() if name not in choice}
        return {
            "fingerprint": self.model.fingerprint,
            "prompts": text,
            "effort": effort,
            "dtype": dtype,
        }

    def run(self, saved: SavedWork, about: dict[str, Any]) -> Profile:
        """The best profile. about: further facts of the run, for the file."""
        budgets = self._budgets()
        middle = Split(budgets[len(budgets) // 2], 0.5)
        splits = list(dict.fromkeys([middle, *(Split(b, s) for b in budgets for s in self.effort.shares)]))
        layers = [layer for layer, window in enumerate(self.model.config.windows) if window is None]
        if not layers:
            raise UserError("every layer of this model has a sliding window: it drafts without a profile", "model")
        recorder = Recorder(self.model, self.prompts, self.effort.num_output)
        covered = self._recall_pass(recorder, saved, layers, splits)
        starts = sum(
            recorder.has_start(r, s, self.effort.draft_tokens)
            for r in range(len(self.prompts))
            for s in self.effort.all_starts()
        )
        if not starts:
            longest = max(map(len, recorder.continuations))
            raise UserError(
                f"the model's answers end after at most {longest} tokens; drafts of {self.effort.draft_tokens} from "
                f"position {self.effort.first_start} on need longer ones: take another dataset"
            )
        cost = self._cost(saved)

        def measure(candidate: Candidate) -> None:
            if candidate not in self.results:
                recall = recall_of(covered[splits.index(candidate.split)], layers, candidate.refresh_layers)
                self.results[candidate] = self._measure(recorder, saved, candidate, recall, cost, starts)

        penultimate = layers[max(0, len(layers) - 2)]
        baseline = Candidate((penultimate,), middle)
        measure(baseline)
        for chosen in self._promising(covered[splits.index(middle)], layers):
            measure(Candidate(chosen, middle))
        for share in self.effort.shares:
            measure(Candidate(self._best().candidate.refresh_layers, Split(middle.budget, share)))
        share = self._best().candidate.split.verified_share
        for budget in budgets:
            if Split(budget, share) in splits:
                measure(Candidate(self._best().candidate.refresh_layers, Split(budget, share)))
        best = self._best()
        table = covered[splits.index(middle)]
        return Profile(
            model=self.model.source,
            fingerprint=self.model.fingerprint,
            refresh_layers=best.candidate.refresh_layers,
            budget=best.candidate.split.budget,
            verified_share=best.candidate.split.verified_share,
            measured={
                **about,
                "prompt_tokens": [len(prompt) for prompt in self.prompts],
                "drafts": starts,
                "effort": asdict(self.effort),
                "dtype": str(self.model.decoder.dtype).removeprefix("torch."),
                "context_length": self._context_length,
                "cost": _coefficients(cost),
                "recall": {
                    "budget": middle.budget,
                    "verified_share": middle.verified_share,
                    "refresh_layer": {str(layer): round(recall_of(table, layers, [layer]), 6) for layer in layers},
                },
                "penultimate": self.results[baseline].as_json(),
                "best": best.as_json(),
                "candidates": [result.as_json() for result in self.ranked()],
            },
        )

    def ranked(self) -> list[Measured]:
        """Best first."""
        return sorted(
            self.results.values(), key=lambda m: (-m.efficiency.speedup, -m.recall, m.candidate.refresh_layers)
        )

    def _best(self) -> Measured:
        return self.ranked()[0]

    @property
    def _context_length(self) -> int:
        return round(sum(map(len, self.prompts)) / len(self.prompts))

    def _budgets(self) -> list[int]:
        shortest = min(map(len, self.prompts))
        if self.effort.budgets is not None:
            budgets = sorted(set(self.effort.budgets))
            if budgets[-1] >= shortest:
                raise UserError(
                    f"budget {budgets[-1]}: the shortest prompt has {shortest} tokens, so nothing would be left out"
                )
            return budgets
        budgets = [budget for budget in DEFAULT_BUDGETS if 2 * budget <= shortest]
        if not budgets:
            raise UserError(
                f"the shortest prompt has {shortest} tokens; a profile is for long contexts, of "
                f"{2 * DEFAULT_BUDGETS[0]} and more: take longer prompts, or name budgets"
            )
        return budgets

    def _recall_pass(
        self, recorder: Recorder, saved: SavedWork, layers: list[int], splits: list[Split]
    ) -> list[list[list[float]]]:
        """Recall of every refresh layer at every layer, by split; leaves the recorder with prompts and continuations."""
        prompt_tokens = sum(map(len, self.prompts))
        done = saved.get("recall")
        if done is not None:
            recorder.restore(done["continuations"], lambda n: self.show("prefill", n, prompt_tokens))
            covered: list[list[list[float]]] = done["covered"]
            return covered
        table = RecallTable(layers, splits, self.effort.cycle)
        most = prompt_tokens + len(self.prompts) * (self.effort.num_output - 1)
        recorder.decode(
            lambda n: self.show("plain decoding, recall of every layer", n, most), ScoreRecorder(layers, table)
        )
        saved.put("recall", {"continuations": recorder.continuations, "covered": table.covered()})
        return table.covered()

    def _promising(self, covered: Sequence[Sequence[float]], layers: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Layers, then pairs of good layers, by recall."""

        def by_recall(choices: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
            return sorted(choices, key=lambda chosen: (-recall_of(covered, layers, chosen), chosen))

        singles = by_recall([(layer,) for layer in layers])
        yield from singles[: self.effort.singles]
        good = sorted(layer for (layer,) in singles[: self.effort.pair_layers])
        yield from by_recall(list(combinations(good, 2)))[: self.effort.pairs]

    def _cost(self, saved: SavedWork) -> CostModel:
        if self.cost is not None:
            return self.cost
        done = saved.get("cost")
        if done is None:
            self.show("timing this machine", 0, 0)
            config = make_config(
                model=self.model.source,
                method="aspire-ema",
                profile="none",
                max_num_seqs=CALIBRATION_REQUESTS,
                max_model_len=min(CALIBRATION_CONTEXT, self.model.config.max_position_embeddings),
                max_draft_tokens=self.effort.draft_tokens,
            )
            measured = build_engine(config, self.model).engine.cost
            assert measured is not None
            done = _coefficients(measured)
            saved.put("cost", done)
        return CostModel(**done)

    def _measure(
        self, recorder: Recorder, saved: SavedWork, candidate: Candidate, recall: float, cost: CostModel, starts: int
    ) -> Measured:
        survival = saved.get(candidate.name)
        if survival is None:
            effort = self.effort
            stage = f"drafting: {candidate.name}"
            most = starts * effort.draft_tokens
            drafts = recorder.record(
                candidate.method, effort.all_starts(), effort.draft_tokens, lambda n: self.show(stage, n, most)
            )
            survival = drafts.survival()
            saved.put(candidate.name, survival)
        reads = ReadModel(candidate.split.budget, self.model.config.num_layers, len(candidate.refresh_layers))
        gain = efficiency(survival, cost, reads, self._context_length, self.effort.batch_size)
        return Measured(candidate, recall, tuple(survival), gain)


def _coefficients(cost: CostModel) -> dict[str, float]:
    return {
        "fixed": cost.fixed,
        "per_token": cost.per_token,
        "per_kv": cost.per_kv,
        "free_tokens": cost.free_tokens,
        "per_check": cost.per_check,
        "verify_step": cost.verify_step,
    }
