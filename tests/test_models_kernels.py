"""The fused element-wise kernels give what the torch operations give, to the last bit that their order allows."""

from __future__ import annotations

import pytest
import torch

from aspire_llm.models.ops import TorchOps

pytest.importorskip("triton")

from aspire_llm.models.kernels import TritonOps

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
    close(TritonOps().silu_mul(gate_up), TorchOps().silu_mul(gate_up))
