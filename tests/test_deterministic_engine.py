"""`deterministic`: tokens and K/V of speculative decoding are plain decoding's to the bit, under the interpreter here.

K/V of float32 show the last bit of every sum; bfloat16 with an fp8 cache is what is used.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aspire_llm.config import make_config
from aspire_llm.engine.build import build_engine
from aspire_llm.engine.engine import Engine
from aspire_llm.errors import UserError
from aspire_llm.models.load import LoadedModel, dummy_decoder
from aspire_llm.request import SamplingParams
from exact_interpreter import exact_interpreter  # noqa: F401
from tiny import (
    VOCAB,
    FixedCost,
    always_draft_to,
    prompts_of,
    requests_for,
    run,
    script_drafts,
    tiny_config,
    tiny_engine,
    tiny_model,
)

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.kernel,
    pytest.mark.usefixtures("exact_interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU benchmarks/deterministic.py shows more"),
]
PROMPTS = [3, 24]
TOKENS = 8


def small_model(dtype: torch.dtype) -> LoadedModel:
    config = tiny_config(
        num_heads=2, num_kv_heads=1, head_dim=16, rope_inv_freq=tuple(0.5**i for i in range(8)), attention_scale=0.25,
        qkv_bias=True, qk_norm=True,
    )  # fmt: skip
    decoder = dummy_decoder(config, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, view in decoder.checkpoint_views().items():
        if "norm" not in name:
            view.normal_(0.0, 0.1, generator=generator)
    return LoadedModel(decoder, config, None, None, frozenset(), "tiny", f"tiny-{dtype}")


def engine_of(model: LoadedModel, method: str, **options: Any) -> Engine:
    settings = {
        "block_size": 16, "max_num_seqs": 3, "max_model_len": 64, "attention_backend": "triton", "deterministic": True,
        "max_draft_tokens": 4, "enable_prefix_caching": False, "kv_cache_memory": 1 << 17,
    }  # fmt: skip
    policy = None if method == "plain" else always_draft_to(3)
    return tiny_engine(model, method=method, policy=policy, **{**settings, **options})


def decode(
    engine: Engine, model: LoadedModel, prompts: list[list[int]], tokens: int
) -> tuple[list[list[int]], list[list[torch.Tensor]], int]:
    """Tokens, the cached K/V as it is when every request has half of them, and how many drafts were rejected."""
    requests = requests_for(model, prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    for request in requests:
        engine.add(request)
    while min(len(r.output_token_ids) for r in requests) < tokens // 2:
        engine.step()
    cached = []
    for request in requests:
        layers = [] if request.finished else [cached_bits(engine, request, layer) for layer in range(2)]
        cached.append([part for pair in layers for part in pair])
    while engine.has_work:
        engine.step()
    drafted = sum(r.stats.num_draft_tokens for r in requests)
    return [r.output_token_ids for r in requests], cached, drafted - sum(r.stats.num_accepted_tokens for r in requests)


def cached_bits(engine: Engine, request: Any, layer: int) -> tuple[torch.Tensor, ...]:
    pool = engine.runner._forward._backend.pool  # type: ignore[attr-defined]
    pages = torch.tensor(engine.scheduler.pages.pages(request.key))
    places = (pages[:, None] * pool.page_size + torch.arange(pool.page_size)).flatten()[: request.num_computed]
    return tuple(c[layer].view(torch.uint8)[:, places] for c in (pool.k, pool.v))


@pytest.mark.parametrize(
    ("method", "dtype", "kv_cache_dtype", "step"),
    [("aspire", torch.bfloat16, "fp8", 32), ("vegas", torch.float32, "auto", 9)],
    ids=["bfloat16 and fp8", "float32"],
)  # prompts in one chunk, or in several beside drafts
def test_speculative_decoding_has_the_bits_of_plain_decoding(
    method: str, dtype: torch.dtype, kv_cache_dtype: str, step: int
) -> None:
    model = small_model(dtype)
    prompts = prompts_of(PROMPTS)
    options = {"kv_cache_dtype": kv_cache_dtype}
    alone = [decode(engine_of(model, "plain", **options), model, [prompt], TOKENS) for prompt in prompts]
    engine = engine_of(model, method, max_num_batched_tokens=step, **options)
    script_drafts(engine, lambda before, own: (own + 1) % VOCAB if len(before) % 3 == 0 else own)
    tokens, cached, rejected = decode(engine, model, prompts, TOKENS)
    assert tokens == [tokens for (tokens,), _, _ in alone]
    assert rejected > 0
    compared = 0
    for ours, (_, (theirs,), _) in zip(cached, alone, strict=True):
        for a, b in zip(ours, theirs, strict=False):
            common = min(a.shape[1], b.shape[1])
            assert torch.equal(a[:, :common], b[:, :common])
            compared += common
    assert compared > 4 * sum(PROMPTS)


def test_refused_without_the_kernels() -> None:
    model = tiny_model()
    for backend in ("auto", "reference"):
        with pytest.raises(UserError, match="deterministic=True needs the Triton kernels"):
            tiny_engine(model, method="plain", deterministic=True, attention_backend=backend)


def test_a_cache_is_not_shared_with_an_engine_that_is_not_deterministic() -> None:
    model = tiny_model()
    options = {
        "model": "tiny", "max_model_len": 64, "block_size": 16, "kv_cache_memory": "64K", "method": "plain",
        "attention_backend": "triton",
    }  # fmt: skip
    cost = FixedCost(1.0, 0.01, 0.05)
    built = build_engine(make_config(**options, deterministic=True), model, cost=cost)
    assert build_engine(make_config(**options, deterministic=True), model, built.cache, cost=cost).cache is built.cache
    with pytest.raises(UserError, match="other bits"):
        build_engine(make_config(**options), model, built.cache, cost=cost)


def test_other_engines_of_the_model_keep_their_operations() -> None:
    model = tiny_model()
    before = model.decoder._ops
    engine = engine_of(model, "plain")
    assert model.decoder._ops is before
    assert engine.runner.decoder._ops is not before
    assert engine.runner.decoder.embedding is model.decoder.embedding
    assert engine.runner._forward._backend.deterministic  # type: ignore[attr-defined]
    prompts = prompts_of([5])
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    expected = run(tiny_engine(model, method="plain"), requests_for(model, prompts, params))
    assert run(engine, requests_for(model, prompts, params)) == expected
