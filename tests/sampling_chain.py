"""Many requests at once on a tiny model whose logits depend on the newest token, for tests of the sampler.

The model forgets everything at every `block`-th output token, so one request gives many independent blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from aspire_llm.request import RowKind, SamplingParams
from aspire_llm.sampling.batch import SampleBatch, SampleOutput
from aspire_llm.sampling.sampler import Sampler

KINDS = tuple(RowKind)

# (chain, slots [n], positions [n] of the drafts just made): may overwrite chain.history there
DraftScript = Callable[["Chain", torch.Tensor, torch.Tensor], None]


class Chain:
    def __init__(
        self,
        sampler: Sampler,
        target: torch.Tensor,  # [vocabulary, vocabulary]: logits after each token
        draft: torch.Tensor,  # the same, of the drafter
        prompts: Sequence[Sequence[int]],
        *,
        num_tokens: int,
        draft_lengths: np.ndarray,  # [requests]
        block: int = 3,
        script: DraftScript | None = None,
        slots: np.ndarray | None = None,  # [requests]
        order: np.random.Generator | None = None,  # shuffles the rows of every step
    ) -> None:
        n = len(prompts)
        self.sampler, self.target, self.draft, self.block, self.script = sampler, target, draft, block, script
        self.num_tokens, self.draft_lengths, self.order = num_tokens, draft_lengths, order
        self.slots = np.arange(n) if slots is None else slots
        self.prompt_lengths = np.array([len(prompt) for prompt in prompts])
        self.length = int(self.prompt_lengths.max()) + num_tokens + int(draft_lengths.max()) + 2
        self.history = torch.full((int(self.slots.max()) + 1, self.length), 7, dtype=torch.int64)
        for slot, prompt in zip(self.slots.tolist(), prompts, strict=True):
            self.history.numpy()[slot, : len(prompt)] = prompt
        self.known = self.prompt_lengths.copy()  # committed tokens
        self.pending = np.zeros(n, dtype=np.int64)
        self.prefilled = np.zeros(n, dtype=bool)
        self.drafted = self.accepted = 0
        self.logprobs: dict[int, list] = {}
        self.errors: dict[int, str] = {}

    def run(self) -> torch.Tensor:
        """The output tokens [requests, num_tokens]."""
        while True:
            active = np.flatnonzero(self.known - self.prompt_lengths < self.num_tokens)
            if not len(active):
                break
            if self.order is not None:
                self.order.shuffle(active)
            self.step(active)
        index = torch.from_numpy(self.prompt_lengths)[:, None] + torch.arange(self.num_tokens)
        return self.history[torch.from_numpy(self.slots)[:, None], index]

    def step(self, active: np.ndarray) -> SampleOutput:
        kinds = np.where(
            ~self.prefilled[active],
            RowKind.PREFILL,
            np.where(self.pending[active] < self.draft_lengths[active], RowKind.DRAFT, RowKind.VERIFY),
        )
        is_draft, is_verify = kinds == RowKind.DRAFT, kinds == RowKind.VERIFY
        counts = np.where(is_verify, 1 + self.pending[active], 1)
        first = self.known[active] - 1 + np.where(is_draft, self.pending[active], 0)
        rows = np.repeat(np.arange(len(active)), counts)
        positions = first[rows] + np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        requests = active[rows]
        fed = self.history[torch.from_numpy(self.slots[requests]), torch.from_numpy(positions)]
        outputs = positions + 1 - self.prompt_lengths[requests]
        context = torch.where(torch.from_numpy(outputs % self.block == 0), 0, fed)
        logits = torch.where(torch.from_numpy(is_draft[rows])[:, None], self.draft[context], self.target[context])
        batch = SampleBatch(
            tuple(map(KINDS.__getitem__, kinds.tolist())),
            tuple(self.slots[active].tolist()),
            tuple(counts.tolist()),
            logits,
            torch.from_numpy(positions),
            self.history,
        )
        before = logits.clone()
        out = self.sampler.run(batch)
        assert torch.equal(logits, before), "the sampler changed the model's logits"
        emitted = out.num_emitted.numpy()
        assert (emitted[~is_verify] == 1).all()
        assert (out.confidence.numpy()[~is_draft] == 0).all()
        for j in range(int(emitted.max())):
            some = np.flatnonzero(emitted > j)
            at = first[some] + 1 + j
            self.history[torch.from_numpy(self.slots[active[some]]), torch.from_numpy(at)] = out.tokens[some, j]
        if is_draft.any() and self.script is not None:
            at = torch.from_numpy(first[is_draft] + 1)
            self.script(self, torch.from_numpy(self.slots[active[is_draft]]), at)
        for row, found in out.logprobs.items():
            self.logprobs.setdefault(int(active[row]), []).extend(found)
        for row, message in out.errors.items():
            self.errors[int(active[row])] = message
        self.drafted += int((counts[is_verify] - 1).sum())
        self.accepted += int((emitted[is_verify] - 1).sum())
        self.pending[active] = np.where(is_draft, self.pending[active] + 1, 0)
        self.known[active] += np.where(is_draft, 0, emitted)
        self.prefilled[active] = True
        return out


def plain_logits(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stops: Sequence[int] = ()
) -> np.ndarray:
    """The edited logits of one position, one token at a time: the slow oracle. logits [vocabulary], float64."""
    z = np.array(logits, dtype=np.float64)
    vocabulary = range(len(z))
    banned = set()
    if params.allowed_token_ids is not None:
        banned |= set(vocabulary) - set(params.allowed_token_ids)
    for word in params.bad_words_token_ids:
        before = list(word[:-1])
        if not before or list(output[-len(before) :]) == before:
            banned.add(word[-1])
    if len(output) < params.min_tokens:
        banned |= set(stops)
    for token, bias in params.logit_bias.items():
        z[token] += bias
    for token in vocabulary:
        if token in prompt or token in output:
            z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
        count = list(output).count(token)
        z[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    z[list(banned)] = -np.inf
    return z


def plain_distribution(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stops: Sequence[int] = ()
) -> np.ndarray:
    """The distribution of one position: the slow oracle of edits and filters."""
    z = plain_logits(logits, params, prompt, output, stops)
    if params.greedy:
        return (np.arange(len(z)) == z.argmax()).astype(np.float64)
    p = np.exp((z - z.max()) / params.temperature)
    p /= p.sum()
    if params.min_p > 0:
        p[p < params.min_p * p.max()] = 0
    if params.top_k > 0:
        kth = np.sort(p)[::-1][min(params.top_k, len(p)) - 1]
        p[p < kth] = 0
    p /= p.sum()
    if params.top_p < 1:
        ranked = np.sort(p)[::-1]
        before = np.concatenate([[0.0], np.cumsum(ranked)[:-1]])
        p[p < ranked[before < params.top_p].min()] = 0
    return p / p.sum()
