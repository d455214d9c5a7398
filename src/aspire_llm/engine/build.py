"""Puts an engine together: every open choice of an EngineConfig settled once, against the model and the machine."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace

import torch

from aspire_llm.attention.reference import ReferenceBackend
from aspire_llm.cache.pages import PageAllocator
from aspire_llm.cache.pool import KVPool
from aspire_llm.config import EngineConfig
from aspire_llm.context.profile import Profile, find_profile
from aspire_llm.context.selectors import Selector, SelectorFactory, SelectorSetting, make_selector, scored_layers
from aspire_llm.context.state import ContextState
from aspire_llm.engine.calibrate import calibrate, prior_cost
from aspire_llm.engine.engine import Engine
from aspire_llm.engine.finish import Finish
from aspire_llm.engine.forward import EagerForward, Forward
from aspire_llm.engine.kv_scales import calculate_kv_scales
from aspire_llm.engine.memory import bytes_beside_pages, choose_num_pages, gib
from aspire_llm.engine.numerics import check_shared_cache, choose_decoder, choose_kv_dtype, require_triton, uses_triton
from aspire_llm.engine.runner import Runner
from aspire_llm.engine.slots import SlotState
from aspire_llm.engine.startup import measure_ceilings, startup_report
from aspire_llm.errors import UserError
from aspire_llm.models.config import DecoderConfig
from aspire_llm.models.decoder import Decoder
from aspire_llm.models.load import LoadedModel, load_model
from aspire_llm.policy.base import Policy
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.factory import POLICY_SETTINGS, PRICED, make_policy
from aspire_llm.policy.hindsight import Truth
from aspire_llm.sampling.sampler import Sampler
from aspire_llm.sampling.structured import Grammars
from aspire_llm.scheduler.scheduler import Limits, Scheduler

DEFAULT_BUDGET = 512
DEFAULT_VERIFIED_SHARE = 0.5
# A step is captured up to as many tokens as a batch drafts and verifies at once; at least LEAST_, so that small batches have
# graphs for bits of prompts, at most MOST_GRAPH_TOKENS: wider steps are long enough to be launched kernel by kernel.
LEAST_GRAPH_TOKENS, MOST_GRAPH_TOKENS = 512, 2048
# options that mean nothing beside a policy or selector of the caller's own
REPLACED = {
    "policy_object": ("policy", "draft_tokens", "max_verify_tokens"),
    "selector_factory": ("context", "refresh_layers"),
}
# Tokens a step in verifications, on a GPU: bursts beyond that are spread. A batch whose requests go at their own pace verifies
# one token a request and step on average; bounds below four cost 1-3 % in the simulator, higher ones gain nothing.
GPU_VERIFY_TOKENS = 192
VERIFY_TOKENS_A_REQUEST = 4


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV cache: which pages are whose, and the tensors. Engines of the same model may share one, one at a time."""

    pages: PageAllocator
    pool: KVPool
    deterministic: bool = False  # whether the K/V come from an engine that is


@dataclass(frozen=True, slots=True)
class DraftingContext:
    """Settings of a selector. refresh_layers: None for the penultimate one."""

    budget: int
    refresh_layers: tuple[int, ...] | None
    verified_share: float


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an EngineConfig means on this machine, for this model."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int
    num_pages: int
    limits: Limits
    context: str | None
    policy: str
    draft_tokens: int
    max_verify_tokens: int | None
    graph_tokens: int  # of the widest captured step
    budget: int
    refresh_layers: tuple[int, ...] | None
    verified_share: float


@dataclass(frozen=True, slots=True)
class Built:
    engine: Engine
    cache: Cache
    startup: tuple[str, ...] = ()  # what is worth saying: see `startup_report`


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r} is unknown; allowed: auto, cpu, cuda, cuda:N", "device") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported; allowed: auto, cpu, cuda, cuda:N", "device")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"device {name!r} is not there; this machine has {torch.cuda.device_count()} GPUs", "device")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def load(config: EngineConfig) -> LoadedModel:
    device = choose_device(config.device)
    return load_model(
        config.model,
        dtype=choose_dtype(config.dtype, device),
        device=device,
        tokenizer=config.tokenizer,
        load_format=config.load_format,
    )


def resolve(
    config: EngineConfig,
    model: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    cache: Cache | None,
    profile: Profile | None = None,
) -> Resolved:
    """Raises UserError where an option does not fit the model or the machine's memory. Options win over the profile."""
    preset = config.preset
    context = config.context or preset.context
    max_draft = config.max_draft_tokens if context is not None else 0
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise UserError(
            f"max_model_len={max_model_len} is above the {model.max_position_embeddings} positions of this model",
            "max_model_len",
        )
    page_size = config.block_size
    kv_dtype = choose_kv_dtype(config, dtype, device)
    page_bytes = model.kv_bytes_per_token(kv_dtype) * page_size
    tokens = config.max_num_batched_tokens or (512 if device.type == "cpu" else 2048)
    policy = config.policy or preset.policy
    draft_tokens = min(config.draft_tokens or preset.draft_tokens, max_draft)
    max_verify_tokens = config.max_verify_tokens or default_verify_tokens(config.max_num_seqs, device)
    drafting = drafting_context(config, profile)
    limits = Limits(
        config.max_num_seqs, tokens, max_model_len, max_draft, min_last_chunk=32 if context == "snapkv" else 1
    )
    decoded = most_decoded(limits, policy, draft_tokens, max_verify_tokens)
    graph_tokens = widest_graph(limits, decoded)
    if cache is not None:
        check_shared_cache(config, kv_dtype, cache.pool, cache.deterministic)
        num_pages = cache.pages.num_pages
    else:
        beside = 0
        if device.type == "cuda" and uses_triton(config, device):
            beside = bytes_beside_pages(model, limits, config, device, dtype, drafting.budget, decoded, graph_tokens)
        num_pages = choose_num_pages(config, page_bytes, -(-max_model_len // page_size), device, beside)
    if num_pages * page_size < max_model_len:
        if config.max_model_len is not None or num_pages < 1:
            raise UserError(
                f"one request of max_model_len={max_model_len} needs "
                f"{gib(-(-max_model_len // page_size) * page_bytes)} of KV cache and "
                f"{gib(num_pages * page_bytes)} are there; lower max_model_len or raise kv_cache_memory",
                "max_model_len",
            )
        max_model_len = num_pages * page_size
        limits = replace(limits, max_model_len=max_model_len)
    takes, _ = POLICY_SETTINGS.get(policy, (frozenset(), frozenset()))
    for option, setting in (("draft_tokens", "draft_length"), ("max_verify_tokens", "max_verify_tokens")):
        if getattr(config, option) is not None and policy in POLICY_SETTINGS and setting not in takes:
            raise UserError(f"{option}={getattr(config, option)} does nothing with policy {policy!r}", option)
    return Resolved(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        num_pages=num_pages,
        limits=limits,
        context=context,
        policy=policy,
        draft_tokens=draft_tokens,
        max_verify_tokens=max_verify_tokens,
        graph_tokens=graph_tokens,
        budget=drafting.budget,
        refresh_layers=drafting.refresh_layers,
        verified_share=drafting.verified_share,
    )


def default_verify_tokens(max_num_seqs: int, device: torch.device) -> int | None:
    """The bound on tokens of verifications in a step, where none is given; None (on a CPU): there is none."""
    return max(GPU_VERIFY_TOKENS, VERIFY_TOKENS_A_REQUEST * max_num_seqs) if device.type == "cuda" else None


def drafting_context(config: EngineConfig, profile: Profile | None) -> DraftingContext:
    """Options win over the profile, each by itself. The profile's budget is that of every method, so that they compare."""
    return DraftingContext(
        budget=config.budget or (profile.budget if profile else DEFAULT_BUDGET),
        refresh_layers=config.refresh_layers or (profile.refresh_layers if profile else None),
        verified_share=profile.verified_share if profile else DEFAULT_VERIFIED_SHARE,
    )


def build_engine(
    config: EngineConfig,
    model: LoadedModel,
    cache: Cache | None = None,
    *,
    cost: CostModel | None = None,
    policy: Policy | None = None,
    selector_factory: SelectorFactory | None = None,
    truth: Truth | None = None,
) -> Built:
    """An engine for a loaded model.

    cache: an idle engine's, to share its pool and cached prefixes. cost: another engine's cost model on this machine, to
    start from instead of calibrating. policy: instead of the config's. selector_factory: makes the selector instead of the
    config's. truth: for policy "hindsight", which is told the continuation.
    """
    refuse_replaced(config, policy, selector_factory)
    shape = model.config
    decoder = choose_decoder(config, model.decoder)
    profile = find_profile(config.profile, model.fingerprint) if config.drafts else None
    resolved = resolve(config, shape, decoder.device, decoder.dtype, cache, profile)
    if cache is None:
        cache = make_cache(config, model, resolved)
    selector: Selector | None = None
    if selector_factory is not None:
        slots = config.max_num_seqs + 1
        selector = selector_factory(SelectorSetting(tuple(shape.windows), slots, resolved.budget, resolved.device))
        last_chunk = max(1, selector.prompt_queries)
        resolved = replace(resolved, limits=replace(resolved.limits, min_last_chunk=last_chunk))
    elif resolved.context is not None:
        selector = make_selector(
            resolved.context,
            windows=shape.windows,
            refresh_layers=resolved.refresh_layers,
            num_slots=config.max_num_seqs + 1,
            budget=resolved.budget,
            verified_share=resolved.verified_share,
            device=resolved.device,
        )
    sampler = Sampler(
        config.max_num_seqs,
        shape.vocab_size,
        resolved.device,
        config.draft_sampling,
        max_draft_tokens=config.max_draft_tokens,
        grammars=Grammars(model.tokenizer, shape.vocab_size, model.eos_token_ids)
        if model.tokenizer is not None
        else None,
    )
    state = SlotState(
        config.max_num_seqs,
        resolved.max_model_len,
        resolved.limits.max_draft_tokens,
        config.block_size,
        resolved.device,
    )
    contexts = ContextState(
        shape.num_layers, config.max_num_seqs + 1, resolved.budget if selector else 1, resolved.device
    )
    finish = Finish(decoder, sampler, state)
    forward = build_forward(config, resolved, decoder, cache.pool, selector, state, contexts, finish)
    runner = Runner(decoder, forward, sampler, selector, contexts, state)
    late = resolved.device.type == "cuda"  # a step is planned while the last one runs
    if policy is not None:
        return Built(Engine(Scheduler(resolved.limits, cache.pages, policy), runner, late=late), cache)
    takes, _ = POLICY_SETTINGS.get(resolved.policy, (frozenset(), frozenset()))
    startup: tuple[str, ...] = ()
    weighs = resolved.policy in PRICED
    if weighs and cost is not None:
        cost_model = copy.deepcopy(cost)  # each engine keeps its own right
    else:
        fitted = measured_cost(resolved, runner, cache) if weighs and config.calibrate else None
        cost_model = fitted if fitted is not None else prior(decoder, resolved)
        if fitted is not None:
            startup = startup_report(fitted, decoder, cache.pool, measure_ceilings(cache.pool, resolved.dtype))
    policy = make_policy(
        resolved.policy,
        cost_model,
        read_model(config, resolved, shape, selector),
        draft_length=resolved.draft_tokens if "draft_length" in takes else None,
        max_verify_tokens=resolved.max_verify_tokens if "max_verify_tokens" in takes else None,
        truth=truth,
    )
    shown = cost_model if weighs else None
    return Built(Engine(Scheduler(resolved.limits, cache.pages, policy), runner, late=late, cost=shown), cache, startup)


def refuse_replaced(config: EngineConfig, policy: Policy | None, selector_factory: SelectorFactory | None) -> None:
    """UserError for options that a policy or a selector of the caller's own makes useless."""
    if selector_factory is not None and not config.drafts:
        raise UserError(
            f"selector_factory does nothing with method {config.method!r}, which does not draft", "selector_factory"
        )
    given = {"policy_object": policy, "selector_factory": selector_factory}
    for argument, options in REPLACED.items():
        for option in options:
            if given[argument] is not None and getattr(config, option) is not None:
                raise UserError(f"{option}={getattr(config, option)!r} does nothing beside {argument}", option)


def build_forward(
    config: EngineConfig,
    resolved: Resolved,
    decoder: Decoder,
    pool: KVPool,
    selector: Selector | None,
    state: SlotState,
    contexts: ContextState,
    finish: Finish,
) -> Forward:
    """Reference attention run eagerly on the CPU; Triton kernels, in CUDA graphs, on a GPU."""
    shape = decoder.config
    refresh_layers = selector.refresh_layers if selector else ()
    score_layers = scored_layers(selector)
    if not uses_triton(config, resolved.device):
        reference = ReferenceBackend(
            pool,
            num_heads=shape.num_heads,
            scale=shape.attention_scale,
            windows=shape.windows,
            refresh_layers=refresh_layers,
            score_layers=score_layers,
        )
        return EagerForward(decoder, reference, state, contexts)
    if resolved.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            "attention_backend='triton' on the CPU works only under TRITON_INTERPRET=1", "attention_backend"
        )
    require_triton()
    from aspire_llm.attention.triton.backend import TritonBackend

    rows = config.max_num_seqs + 1
    backend = TritonBackend(
        pool,
        num_heads=shape.num_heads,
        scale=shape.attention_scale,
        windows=shape.windows,
        max_tokens=resolved.limits.widest_step,
        max_rows=rows,
        max_len=resolved.max_model_len + resolved.limits.max_draft_tokens + 1,
        refresh_layers=refresh_layers,
        score_layers=score_layers,
        deterministic=config.deterministic,
        # what two engines must share to agree to the bit: the length asked for, whatever memory or drafts make of it
        nominal_len=config.max_model_len or shape.max_position_embeddings,
        max_scored_tokens=max(2, selector.prompt_queries) if selector else 2,
    )
    if config.enforce_eager or resolved.device.type == "cpu":
        return EagerForward(decoder, backend, state, contexts)
    from aspire_llm.engine.graphs import GraphForward, graph_sizes

    sizes = graph_sizes(resolved.graph_tokens)
    return GraphForward(decoder, backend, state, contexts, finish, sizes, scored=selector is not None)


def widest_graph(limits: Limits, decoded_tokens: int) -> int:
    """Tokens of the widest step that is captured. decoded_tokens: see `most_decoded`."""
    wanted = max(LEAST_GRAPH_TOKENS, min(decoded_tokens, MOST_GRAPH_TOKENS))
    return min(wanted, limits.max_num_seqs * (limits.max_draft_tokens + 1))


def most_decoded(limits: Limits, policy: str, draft_tokens: int, max_verify_tokens: int | None) -> int:
    """Most tokens of a step in drafts and verifications: all of them have logits."""
    requests, per_request = limits.max_num_seqs, limits.max_draft_tokens + 1
    takes, _ = POLICY_SETTINGS.get(policy, (frozenset(), frozenset()))
    if policy == "lockstep":
        per_request = min(per_request, draft_tokens + 1)
    elif max_verify_tokens is not None and "max_verify_tokens" in takes:
        return min(requests * per_request, requests + max_verify_tokens)
    return requests * per_request


def read_model(config: EngineConfig, resolved: Resolved, shape: DecoderConfig, selector: Selector | None) -> ReadModel:
    """What rows read, as policies count it: of the engine's selector, budget and attention backend."""
    passes: tuple[int, ...] = ()
    if uses_triton(config, resolved.device):
        from aspire_llm.attention.triton.backend import key_passes

        group = shape.num_heads // shape.num_kv_heads
        longest = resolved.limits.max_draft_tokens + 1
        passes = tuple(key_passes(n, group, deterministic=config.deterministic) for n in range(longest + 1))
    return ReadModel(resolved.budget, shape.num_layers, len(selector.refresh_layers) if selector else 0, passes=passes)


def measured_cost(resolved: Resolved, runner: Runner, cache: Cache) -> CostModel | None:
    """By a calibration; None where there is no room for one."""
    free_tokens = (0.0,) if resolved.device.type == "cpu" else (0.0, 64.0, 128.0)
    return calibrate(runner, cache.pool, cache.pages, resolved.limits, free_tokens)


def prior(decoder: Decoder, resolved: Resolved) -> CostModel:
    parameters = sum(p.numel() for p in decoder.parameters())
    return prior_cost(decoder.config, parameters, resolved.dtype, resolved.kv_dtype, resolved.device)


def make_cache(config: EngineConfig, model: LoadedModel, resolved: Resolved) -> Cache:
    shape = model.config
    scales: tuple[list[float] | None, list[float] | None] = (None, None)
    if config.calculate_kv_scales:
        scales = calculate_kv_scales(model.decoder)
    try:
        pool = KVPool(
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
            resolved.num_pages,
            config.block_size,
            resolved.kv_dtype,
            resolved.device,
            key_scales=scales[0],
            value_scales=scales[1],
        )
    except (RuntimeError, MemoryError):
        needed = shape.kv_bytes_per_token(resolved.kv_dtype) * config.block_size * resolved.num_pages
        raise UserError(
            f"KV cache of {gib(needed)} cannot be allocated; lower kv_cache_memory", "kv_cache_memory"
        ) from None
    pages = PageAllocator(resolved.num_pages, config.block_size, config.enable_prefix_caching)
    return Cache(pages, pool, config.deterministic)
