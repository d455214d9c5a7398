"""Tiny random float32 models and engines around them, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aspire_llm.config import make_config
from aspire_llm.engine.build import build_engine
from aspire_llm.engine.engine import Engine
from aspire_llm.engine.inputs import InputProcessor
from aspire_llm.models.config import DecoderConfig
from aspire_llm.models.decoder import Decoder
from aspire_llm.models.load import LoadedModel, dummy_decoder
from aspire_llm.policy.base import Action, CycleOutcome, RequestView, StepLoad
from aspire_llm.policy.cost import CostModel
from aspire_llm.request import Request, RowKind, SamplingParams
from aspire_llm.sampling.batch import SampleBatch, SampleOutput

VOCAB = 96
KEYS = itertools.count()  # of all requests of a test run, so that several batches may share an engine


def tiny_config(**changes: Any) -> DecoderConfig:
    base = DecoderConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        windows=(None, None),
        qkv_bias=False,
        o_bias=False,
        qk_norm=False,
        tie_word_embeddings=True,
        attention_scale=8**-0.5,
        rope_inv_freq=(1.0, 0.3, 0.1, 0.03),
        rope_attention_factor=1.0,
        max_position_embeddings=512,
        eos_token_ids=(),
        dtype=torch.float32,
    )
    return replace(base, **changes)


def tiny_model(seed: int = 0, *, eos: Sequence[int] = (), std: float = 0.15, **changes: Any) -> LoadedModel:
    """Two layers, grouped-query attention. Weights are wide, so that tokens depend on the whole context and rarely tie."""
    config = tiny_config(**changes)
    decoder: Decoder = dummy_decoder(config, dtype=torch.float32, device="cpu", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, view in decoder.checkpoint_views().items():
        if "norm" not in name:
            view.normal_(0.0, std, generator=generator)
    return LoadedModel(decoder, config, None, None, frozenset(eos), "tiny", f"tiny-{seed}")


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


class FixedCost(CostModel):
    """Costs that no measurement moves, so that what a policy does never depends on this machine's time."""

    def observe(self, load: StepLoad) -> None:
        pass


def tiny_engine(
    model: LoadedModel,
    *,
    late: bool = False,
    policy: Any = None,
    policy_name: str | None = None,
    verify_step: float = 0.0,
    **options: Any,
) -> Engine:
    """policy: an object to use; policy_name: or one of the engine's own, by name. verify_step: see CostModel."""
    settings: dict[str, Any] = {
        "model": "tiny",
        "max_model_len": 256,
        "max_num_seqs": 9,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "kv_cache_memory": 3 << 18,
    }
    drafts = options.get("method") != "plain"
    if drafts:
        settings["budget"] = 16
    settings.update(options)
    if policy_name is not None:
        settings["policy"] = policy_name
    cost = FixedCost(1.0, 0.01, 0.05, verify_step=verify_step)
    engine = build_engine(make_config(**settings), model, policy=policy, cost=cost).engine
    return Engine(engine.scheduler, engine.runner, late=late) if late else engine


def requests_for(
    model: LoadedModel, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Request]:
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    inputs = InputProcessor(None, model.config.vocab_size, model.eos_token_ids, 0, keys=KEYS)
    return [r for prompt, p in zip(prompts, each, strict=True) for r in inputs.requests(list(prompt), p)]


def run(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Decode to the end, checking integrity after every step; token ids of each request."""
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check()
    return [request.output_token_ids for request in requests]


def plain_tokens(
    model: LoadedModel, prompts: Sequence[Sequence[int]], params: SamplingParams, **options: Any
) -> list[list[int]]:
    return run(tiny_engine(model, method="plain", **options), requests_for(model, prompts, params))


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

Script = Callable[
    [list[int], int], int | None
]  # (tokens before the draft, the model's own draft) -> the draft; None: keep


class ScriptedSampler:
    """A sampler whose drafts are chosen by the test; everything else is the real one's."""

    def __init__(self, inner: Any, script: Script) -> None:
        self._inner = inner
        self._script = script

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, batch: SampleBatch) -> SampleOutput:
        output: SampleOutput = self._inner.run(batch)
        offset = 0
        for row, (kind, slot, n) in enumerate(zip(batch.kinds, batch.slots, batch.num_tokens, strict=True)):
            if kind == RowKind.DRAFT:
                position = int(batch.positions[offset])
                before = batch.history[slot, : position + 1].tolist()
                token = self._script(before, int(output.tokens[row, 0]))
                if token is not None:
                    output.tokens[row, 0] = token
            offset += n
        return output


def script_drafts(engine: Engine, script: Script) -> None:
    engine.runner.sampler = ScriptedSampler(engine.runner.sampler, script)


class ScriptedPolicy:
    """Actions from a function of (request view, how often asked); for schedules that no real policy makes."""

    def __init__(self, choose: Callable[[RequestView, int], Action]) -> None:
        self._choose = choose
        self._asked = 0
        self.outcomes: list[CycleOutcome] = []

    def decide(self, requests: Sequence[RequestView], prefill: StepLoad) -> list[Action]:
        actions = []
        for view in requests:
            self._asked += 1
            action = self._choose(view, self._asked)
            actions.append(Action.VERIFY if action is Action.DRAFT and view.pending >= view.max_draft else action)
        if all(action is Action.WAIT for action in actions):
            actions[0] = Action.VERIFY
        return actions

    def observe_cycle(self, outcome: CycleOutcome) -> None:
        self.outcomes.append(outcome)

    def observe_step(self, load: StepLoad) -> None:
        pass

    def forget(self, key: int) -> None:
        pass


def always_draft_to(length: int) -> ScriptedPolicy:
    return ScriptedPolicy(lambda view, _: Action.DRAFT if view.pending < length else Action.VERIFY)


def cached_kv(engine: Engine, request: Request, layer: int) -> tuple[Tensor, Tensor]:
    """K and V [KV heads, num_computed, D] of a running request's exact positions."""
    pool = engine.runner._forward._backend.pool  # type: ignore[attr-defined]
    pages = torch.tensor(engine.scheduler.pages.pages(request.key))
    places = (pages[:, None] * pool.page_size + torch.arange(pool.page_size)).flatten()[: request.num_computed]
    return pool.k[layer][:, places], pool.v[layer][:, places]
