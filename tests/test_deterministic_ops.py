"""A token's result has the same bits alone and in company, wherever it stands; and it is the right result.

Under the interpreter this shows that tiles, stretches and masks leave no trace; that the device's products do not depend on
the place in a tile either, benchmarks/deterministic.py checks there.
"""

from __future__ import annotations

import pytest
import torch

from exact_interpreter import exact_interpreter  # noqa: F401

pytest.importorskip("triton")

from aspire_llm.models.deterministic import (
    FLOAT_TILE,
    HALF_TILE,
    MAX_TOKENS,
    PROGRAMS,
    DeterministicOps,
    Tile,
    num_splits,
    num_stages,
)
from aspire_llm.models.ops import TorchOps

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("exact_interpreter")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = torch.device(DEVICE)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = Tile(rows=16, tokens=16, columns=16)  # many tiles of small tensors


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(DEVICE, dtype)


def shape_id(shape: tuple[int, int]) -> str:
    return "x".join(map(str, shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(96, 32), (130, 320), (33, 200)], ids=shape_id)  # rows, columns: even and not
def test_products_are_right(shape: tuple[int, int], with_bias: bool, dtype: torch.dtype) -> None:
    n, k = shape
    weight, bias = random(n, k, dtype=dtype), random(n, dtype=dtype) if with_bias else None
    x = random(37, k, dtype=dtype)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for ops in (DeterministicOps(HERE), DeterministicOps(HERE, Tile(rows=32, tokens=16, columns=32))):
        ours = ops.linear(x, weight, bias)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance * k**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile", "n", "k"), [(None, 96, 32), (None, 40, 512), (SMALL, 24, 150)])
def test_a_tokens_bits_do_not_depend_on_the_others(tile: Tile | None, n: int, k: int, dtype: torch.dtype) -> None:
    ops = DeterministicOps(HERE, tile)
    assert num_splits(n, k, tile or (FLOAT_TILE if dtype == torch.float32 else HALF_TILE)) > 1 or k < 100
    weight, bias = random(n, k, dtype=dtype), random(n, dtype=dtype)
    x = random(140, k, dtype=dtype, seed=1)
    whole = ops.linear(x, weight, bias)
    for count in (1, 17, 129) if DEVICE == "cpu" else (1, 2, 16, 17, 33, 64, 129):  # alone, padded, over several tiles
        assert torch.equal(ops.linear(x[:count], weight, bias), whole[:count])
        assert torch.equal(ops.linear(x[-count:], weight, bias), whole[-count:])
    order = torch.randperm(140, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(ops.linear(x[order], weight, bias), whole[order])
    if dtype == torch.float32 and tile is None and k > 100:  # the order of the sums does change bits
        assert not torch.equal(DeterministicOps(HERE, SMALL).linear(x[:17], weight, bias), whole[:17])
    beside = x.clone()
    beside[1:] = float("inf")  # whatever stands beside it
    assert torch.equal(ops.linear(beside, weight, bias)[0], whole[0])


def test_long_steps_are_cut_without_a_trace() -> None:
    weight = random(32, 512, dtype=torch.float16)
    x = random(MAX_TOKENS + 20, 512, dtype=torch.float16)
    ops = DeterministicOps(HERE)
    whole = ops.linear(x, weight)
    assert torch.equal(whole[-30:], ops.linear(x[-30:], weight))
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight), rtol=1e-2, atol=0.1)
    assert ops.linear(x[:0], weight).shape == (0, 32)


def test_strided_and_unaligned_tokens_give_the_same_bits() -> None:
    weight, wide = random(40, 33, dtype=torch.float16), random(5, 40, dtype=torch.float16)
    x = wide[:, 3:36]
    expected = DeterministicOps(HERE).linear(x.clone(), weight)
    assert torch.equal(DeterministicOps(HERE).linear(x, weight), expected)
    assert torch.equal(DeterministicOps(HERE).linear(x.contiguous()[1:], weight), expected[1:])  # 66 bytes off


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_element_wise_steps_are_batch_invariant(dtype: torch.dtype) -> None:
    """One token a program: alone, first or last of many, the same bits. And those of torch but for the order of sums."""
    tokens, width, heads, kv_heads, dim = 9, 100, 5, 2, 24
    x, delta, weight = (random(tokens, width, dtype=dtype, seed=i) for i in range(3))
    weight = weight[0]
    qkv = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    q_norm, k_norm = random(dim, dtype=dtype), random(dim, dtype=dtype, seed=1)
    angles = random(tokens, 1, dim // 2, dtype=torch.float32) * 3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    gate_up = random(tokens, 2 * width, dtype=dtype)

    def everything(ops: DeterministicOps | TorchOps, at: slice) -> list[torch.Tensor]:
        qk = qkv[at, : heads + kv_heads].clone()
        return [
            *ops.add_norm(x[at].clone(), delta[at].clone(), weight, 1e-5),
            *ops.norm_rope(qk, heads, q_norm, k_norm, cos[at].clone(), sin[at].clone(), 1e-6),
            silu_mul(ops, gate_up[at].clone()),
        ]

    def silu_mul(ops: DeterministicOps | TorchOps, x: torch.Tensor) -> torch.Tensor:
        if isinstance(ops, DeterministicOps):
            return ops.silu_mul(x)
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    whole = everything(DeterministicOps(HERE), slice(0, tokens))
    for at in (slice(0, 1), slice(3, 5), slice(tokens - 1, tokens)):
        for part, all_of_it in zip(everything(DeterministicOps(HERE), at), whole, strict=True):
            assert torch.equal(part, all_of_it[at])
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for ours, theirs in zip(whole, everything(TorchOps(), slice(0, tokens)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_splits_follow_the_weight_alone() -> None:
    """Enough programs for small matrices, none for large ones, no stretch empty or tiny."""
    qwen3_8b = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
    splits = {name: num_splits(n, k, HALF_TILE) for name, (n, k) in qwen3_8b.items()}
    assert splits == {"qkv": 2, "o": 4, "gate_up": 1, "down": 4}
    for n in (1, 64, 576, 960, 4096, 151936):
        for k in (1, 32, 576, 1536, 4096, 14336):
            count, blocks = num_splits(n, k, HALF_TILE), -(-k // HALF_TILE.columns)
            each = -(-blocks // count)
            assert (count - 1) * each < blocks  # the last stretch has columns
            assert count == 1 or (each >= 4 and count * -(-n // HALF_TILE.rows) <= PROGRAMS)


def test_stages_fit_the_shared_memory() -> None:
    for shared in (0, 64 << 10, 99 << 10, 163 << 10, 227 << 10):
        for programs in (1, 2):
            for tile, dtype in ((HALF_TILE, torch.bfloat16), (FLOAT_TILE, torch.float32)):
                stages = num_stages(tile, dtype, shared, programs)
                assert stages == 2 or programs * stages * tile.bytes(dtype) <= shared
    assert num_stages(HALF_TILE, torch.bfloat16, 227 << 10, 1) == 6
    assert num_stages(HALF_TILE, torch.bfloat16, 227 << 10, 2) == 3
