"""The fused element-wise kernels give what the torch operations give, to the last bit that their order allows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aspire_llm.models.ops import TorchOps

pytest.importorskip("triton")

from aspire_llm.models.kernels import TritonOps
from aspire_llm.models.stream import StreamOps, num_splits

pytestmark = pytest.mark.kernel
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]  # the interpreter has no bfloat16


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = 1e-5 if ours.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (5, 576), (3, 100)])
def test_add_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    x, delta, weight = (
        random(tokens, width, dtype=dtype),
        random(tokens, width, dtype=dtype) + 1,
        random(width, dtype=dtype),
    )
    for added in (None, delta):
        expected = TorchOps().add_norm(x.clone(), added, weight, 1e-5)
        for ours, theirs in zip(TritonOps().add_norm(x.clone(), added, weight, 1e-5), expected, strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (9, 3, 64), (7, 1, 96), (32, 8, 128)])
def test_norm_rope(heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
    tokens = 3
    qkv = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)  # the kernel works on a part of a wider matrix
    angles = random(tokens, 1, dim // 2, dtype=torch.float32) * 3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = (random(dim, dtype=dtype), random(dim, dtype=dtype) + 1) if normed else (None, None)
    expected = TorchOps().norm_rope(qkv[:, : heads + kv_heads].clone(), heads, *norms, cos, sin, 1e-6)
    values = qkv[:, heads + kv_heads :].clone()
    for ours, theirs in zip(
        TritonOps().norm_rope(qkv[:, : heads + kv_heads], heads, *norms, cos, sin, 1e-6), expected, strict=True
    ):
        close(ours, theirs)
    assert torch.equal(qkv[:, heads + kv_heads :], values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (4, 1536), (2, 1500)])
def test_silu_mul(tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = random(tokens, 2 * width, dtype=dtype) * 3
    gate, up = gate_up.chunk(2, dim=-1)
    close(TritonOps().silu_mul(gate_up), F.silu(gate) * up)


HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


@pytest.mark.parametrize(
    ("tokens", "rows", "k"), [(1, 64, 256), (5, 128, 512), (16, 64, 128), (17, 192, 256), (64, 64, 384)]
)
def test_streamed_products(tokens: int, rows: int, k: int) -> None:
    x, w = random(tokens, k, dtype=HALF), random(rows, k, dtype=HALF) / 16
    stream, residual, norm = random(tokens, rows, dtype=HALF), random(rows, dtype=HALF), StreamOps(num_programs=6)
    parts = norm.delta(x, w)
    assert parts.dtype == torch.float32
    assert parts.shape == (num_splits(rows, k, 6), tokens, rows)
    close(parts.sum(0).to(HALF), F.linear(x, w))
    expected = TorchOps().add_norm(stream.clone(), F.linear(x, w), residual, 1e-5)
    for ours, theirs in zip(norm.add_norm(stream.clone(), parts, residual, 1e-5), expected, strict=True):
        close(ours, theirs)
    gate_up = torch.cat([w, w.flip(0)])
    close(norm.gated(x, gate_up), TorchOps().gated(x, gate_up))


@pytest.mark.parametrize(("tokens", "rows", "k"), [(65, 64, 256), (3, 60, 256), (3, 64, 100), (0, 64, 256)])
def test_other_shapes_are_not_streamed(tokens: int, rows: int, k: int) -> None:
    x, w = random(tokens, k, dtype=HALF), random(rows, k, dtype=HALF) / 16
    ops = StreamOps(num_programs=6)
    assert torch.equal(ops.delta(x, w), F.linear(x, w))
    assert ops.gated(x, torch.cat([w, w])).shape == (tokens, rows)


def test_a_bias_is_added() -> None:
    x, w, bias = random(3, 256, dtype=HALF), random(64, 256, dtype=HALF) / 16, random(64, dtype=HALF)
    assert torch.equal(StreamOps(6).delta(x, w, bias), F.linear(x, w, bias))


def test_parts_fill_the_device_in_whole_steps() -> None:
    assert num_splits(4096, 4096, 132) == 2  # Qwen3-8B's o on an H200: 64 strips
    assert num_splits(4096, 12288, 132) == 2
    assert num_splits(64, 384, 132) == 3  # 384 = 3 steps of 128
    assert num_splits(64 * 200, 4096, 132) == 1
