"""Keys and values written as they are made: the bits of turning first and storing then."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aspire_llm.attention.triton.backend import TritonBackend
from aspire_llm.models.deterministic import DeterministicOps
from aspire_llm.models.kernels import TritonOps
from exact_interpreter import exact_interpreter  # noqa: F401
from test_triton_attention import DEVICE, DIM, DRAFT, PREFILL, VERIFY, backend
from tiny import tiny_model
from triton_oracle import RowSpec, Scene, make_scene

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("exact_interpreter")]
FP8 = torch.float8_e4m3fn
SPECS = [RowSpec(PREFILL, 14, 5), RowSpec(DRAFT, 31, 1, tail_start=20, set_positions=(0, 3)), RowSpec(VERIFY, 16, 3)]


def bits(scene: Scene) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8).clone() for tensor in (*scene.pool.k, *scene.pool.v)]


def scene_of(heads: int, kv_heads: int, dim: int, cache: torch.dtype) -> Scene:
    scales = {"key_scale": 0.01, "value_scale": 3.0} if cache == FP8 else {}  # some keys lie beyond the largest number
    return make_scene(
        SPECS, num_heads=heads, kv_heads=kv_heads, dim=dim, padding=2, dtype=cache, device=DEVICE, **scales
    )


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, FP8),
    ],
    ids=["float32", "float16", "bfloat16", "fp8"],
)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, DIM), (9, 3, 64), (7, 1, 96), (16, 8, 2 * DIM)])
def test_bits_of_the_cache(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, cache: torch.dtype, normed: bool
) -> None:
    apart, fused = scene_of(heads, kv_heads, dim, cache), scene_of(heads, kv_heads, dim, cache)
    tokens = apart.q.shape[0]
    draw = torch.Generator().manual_seed(1)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=draw).to(DEVICE, dtype) * 3
    cos, sin = (torch.rand(tokens, 1, dim // 2, generator=draw).to(DEVICE, dtype) for _ in range(2))
    norms = tuple(torch.rand(dim, generator=draw).to(DEVICE, dtype) + 0.5 if normed else None for _ in range(2))
    turn = (heads, *norms, cos, sin, 1e-6)
    before = bits(apart)
    made = backend(apart)
    made.plan(apart.batch)
    separate = qkv.clone()
    q, k = TritonOps().norm_rope(separate[:, : heads + kv_heads], *turn)
    made.store(0, k, separate[:, heads + kv_heads :])
    made = backend(fused)
    made.plan(fused.batch)
    got = TritonOps().norm_rope_store(qkv, *turn, made.cache(0))
    assert torch.equal(got, q)
    for ours, theirs, old in zip(bits(fused), bits(apart), before, strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, old)  # something was stored


class FusedBackend(TritonBackend):
    def store(self, layer, k, v):
        raise AssertionError("the decoder stores keys and values itself")


class ApartBackend(TritonBackend):
    """Hands out an `Attend` that takes keys and values: they are stored by a launch of their own."""

    def attention(self, plan):
        return lambda layer, q, k, v: self.run(plan, layer, q, k, v)


@pytest.mark.skipif(DEVICE == "cuda", reason="the tiny model's heads are smaller than a GPU's kernels take")
@pytest.mark.parametrize("make_ops", [lambda device: TritonOps(), DeterministicOps], ids=["triton", "deterministic"])
def test_a_decoder_computes_the_same_bits(make_ops) -> None:
    model = tiny_model()
    config = model.config
    decoder = model.decoder.to(DEVICE)
    decoder = decoder.with_ops(make_ops(torch.device(DEVICE)))
    results = []
    for kind in (FusedBackend, ApartBackend):
        scene = make_scene(
            SPECS, num_heads=config.num_heads, kv_heads=config.num_kv_heads, dim=config.head_dim,
            num_layers=config.num_layers, padding=1, device=DEVICE,
        )  # fmt: skip
        made = kind(
            scene.pool, num_heads=config.num_heads, scale=scene.scale, windows=[None] * config.num_layers,
            max_tokens=16, max_rows=4, max_len=64,
        )  # fmt: skip
        tokens = torch.arange(scene.q.shape[0], device=DEVICE)
        hidden = decoder(tokens, scene.batch.positions, made.attention(made.plan(scene.batch)))
        results.append([hidden[: sum(scene.batch.num_tokens)], *bits(scene)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
