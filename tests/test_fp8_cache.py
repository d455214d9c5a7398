"""An fp8 (e4m3) KV cache on the reference backend, which reads it converted: half the bytes, and still the drafter never
matters, since a verification writes what plain decoding writes."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from aspire_llm.cache.pool import FP8, FP8_MAX, KVPool
from aspire_llm.cli.options import add_engine_options, engine_options
from aspire_llm.config import make_config
from aspire_llm.engine.build import build_engine
from aspire_llm.engine.kv_scales import calculate_kv_scales
from aspire_llm.errors import UserError
from aspire_llm.models.load import LoadedModel
from aspire_llm.request import SamplingParams
from test_exactness import DRAFTING, LENGTHS
from tiny import (
    GREEDY,
    plain_tokens,
    prompts_of,
    requests_for,
    run,
    tiny_config,
    tiny_engine,
    tiny_model,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model()


def pool_of(engine: Any) -> KVPool:
    pool: KVPool = engine.runner._forward._backend.pool
    return pool


@pytest.mark.parametrize(("key_scale", "value_scale"), [(1.0, 1.0), (4.0, 2.0**-6)])
def test_what_is_written_is_read_rounded_once(key_scale: float, value_scale: float) -> None:
    pool = KVPool(2, 3, 8, 4, 4, FP8, CPU, key_scales=[1.0, key_scale], value_scales=[1.0, value_scale])
    places = torch.tensor([9, 2, 15, 4])
    k, v = torch.randn(4, 3, 8) * 30 * key_scale, torch.randn(4, 3, 8) * value_scale
    pool.write(1, places, k, v)
    for read, given in zip(pool.read(1, places, torch.float32), (k, v), strict=True):
        torch.testing.assert_close(read.transpose(0, 1), given, rtol=2**-4, atol=2**-10 * value_scale)
    assert pool.num_bytes == 2 * 2 * 3 * 16 * 8
    pool.clear(places[:1])
    assert all((tensor == 0).all() for tensor in pool.read(1, places[:1], torch.float32))
    assert (pool.read(1, places[1:], torch.float32)[0] != 0).any()


def test_what_is_too_large_is_clamped() -> None:
    pool = KVPool(1, 1, 4, 1, 2, FP8, CPU)
    pool.write(0, torch.tensor([0]), torch.tensor([[[1e6, -1e6, 449.0, 1.0]]]), torch.zeros(1, 1, 4))
    assert pool.read(0, torch.tensor([0]), torch.float32)[0].flatten().tolist() == [FP8_MAX, -FP8_MAX, FP8_MAX, 1.0]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "bfloat16"])
@pytest.mark.parametrize("method", DRAFTING)
def test_methods_equal_plain(model: LoadedModel, method: str, kv_cache_dtype: str) -> None:
    prompts = prompts_of(LENGTHS)
    expected = plain_tokens(model, prompts, GREEDY, kv_cache_dtype=kv_cache_dtype)
    engine = tiny_engine(model, method=method, kv_cache_dtype=kv_cache_dtype)
    assert pool_of(engine).dtype == (FP8 if kv_cache_dtype == "fp8" else torch.bfloat16)
    requests = requests_for(model, prompts, GREEDY)
    assert run(engine, requests) == expected
    made = sum(r.stats.num_draft_tokens for r in requests)
    assert made > sum(r.stats.num_accepted_tokens for r in requests) > 0
    # once more: from the prefix cache
    again = requests_for(model, prompts, GREEDY)
    assert run(engine, again) == expected
    assert sum(r.stats.num_cached_tokens for r in again) > 0


def test_preemption(model: LoadedModel) -> None:
    prompts = prompts_of([60, 70, 50, 80])
    expected = plain_tokens(model, prompts, GREEDY, kv_cache_dtype="fp8")
    engine = tiny_engine(model, method="aspire", kv_cache_dtype="fp8", kv_cache_memory=70 * 256)
    assert engine.scheduler.pages.num_pages == 70  # 256 bytes a page: a quarter of float32's
    requests = requests_for(model, prompts, GREEDY)
    assert run(engine, requests) == expected
    assert sum(r.stats.num_preemptions for r in requests) > 0


def test_verification_writes_what_plain_decoding_writes(model: LoadedModel) -> None:
    """The bytes; but for the odd number that float32's noise moves over the border between two of e4m3."""
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    prompts = prompts_of([5, 40, 80])
    kept: dict[str, list[torch.Tensor]] = {}
    lengths = []
    for method in ("plain", "aspire", "vegas"):
        engine = tiny_engine(model, method=method, kv_cache_dtype="fp8", enable_prefix_caching=False)
        requests = requests_for(model, prompts, params)
        for request in requests:
            engine.add(request)
        while min(len(r.output_token_ids) for r in requests) < 30:
            engine.step()
        kept[method] = [
            part.view(torch.uint8).clone()
            for r in requests
            for layer in (0, 1)
            for part in cached_fp8(engine, r, layer)
        ]
        lengths.append([r.num_computed for r in requests])
    for method in ("aspire", "vegas"):
        for ours, theirs in zip(kept[method], kept["plain"], strict=True):
            common = min(ours.shape[1], theirs.shape[1])
            assert common > 30
            assert (ours[:, :common] != theirs[:, :common]).float().mean() < 1e-3


def cached_fp8(engine: Any, request: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    pool = pool_of(engine)
    pages = torch.tensor(engine.scheduler.pages.pages(request.key))
    places = (pages[:, None] * pool.page_size + torch.arange(pool.page_size)).flatten()[: request.num_computed]
    return tuple(c[layer].view(torch.uint8)[:, places] for c in (pool.k, pool.v))  # type: ignore[return-value]


def test_scales_fit_what_the_layers_make() -> None:
    """Tiny values keep their precision, large keys are not clamped; and calculating changes nothing else."""
    model = tiny_model(qkv_bias=True)
    for layer in model.decoder.layers:
        q_rows, kv_rows = 4 * 8, 2 * 8
        layer.qkv_bias[q_rows : q_rows + kv_rows] = 600.0  # type: ignore[index, operator]
        layer.qkv[q_rows + kv_rows :] *= 1e-3  # type: ignore[index, operator]
        layer.qkv_bias[q_rows + kv_rows :] = 0.0  # type: ignore[index, operator]
    keys, values = calculate_kv_scales(model.decoder)
    assert len(keys) == len(values) == 2
    assert min(keys) > 1 > 0.01 > max(values)
    exact = tiny_engine(model, method="plain", enable_prefix_caching=False)
    scaled = tiny_engine(model, method="plain", kv_cache_dtype="fp8", calculate_kv_scales=True)
    assert pool_of(scaled).key_scales == tuple(keys)
    unscaled = tiny_engine(model, method="plain", kv_cache_dtype="fp8")
    errors = []
    for engine in (scaled, unscaled):
        seen = []
        for each in (exact, engine):
            (request,) = requests_for(model, prompts_of([30]), GREEDY)
            each.add(request)
            each.step()
            pages = torch.tensor(each.scheduler.pages.pages(request.key))
            places = (pages[:, None] * 4 + torch.arange(4)).flatten()[:30]
            seen.append(pool_of(each).read(0, places, torch.float32))
            each.abort(request)
        errors.append([float((a - b).norm() / a.norm()) for a, b in zip(*seen, strict=True)])
    assert max(errors[0]) < 0.05
    assert min(errors[1]) > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "bfloat16", "calculate_kv_scales": True}, "calculate_kv_scales=True does nothing"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales=True does nothing"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_config(model="tiny", **options)


def test_a_shared_cache_must_hold_what_the_engine_would(model: LoadedModel) -> None:
    options = {"model": "tiny", "max_model_len": 64, "block_size": 4, "kv_cache_memory": "64K", "method": "plain"}
    built = build_engine(make_config(**options, kv_cache_dtype="fp8"), model)
    assert build_engine(make_config(**options, kv_cache_dtype="fp8_e4m3"), model, built.cache).cache is built.cache
    with pytest.raises(UserError, match="shared cache holds"):
        build_engine(make_config(**options), model, built.cache)


def test_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    args = parser.parse_args(["--kv-cache-dtype", "fp8", "--calculate-kv-scales", "--deterministic"])
    assert engine_options(args) == {"kv_cache_dtype": "fp8", "calculate_kv_scales": True, "deterministic": True}


def test_only_fp8_has_scales() -> None:
    assert tiny_config().kv_bytes_per_token(FP8) * 4 == tiny_config().kv_bytes_per_token(torch.float32)
    with pytest.raises(ValueError, match="no scales"):
        KVPool(1, 1, 4, 1, 2, torch.bfloat16, CPU, key_scales=[2.0])
