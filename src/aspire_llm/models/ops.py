"""The decoder's products and element-wise steps. In torch here; kernels.py has the latter as fused GPU kernels, tested against
this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Ops(Protocol):
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, n] times weight [m, n] transposed, plus bias [m]: [T, m]."""
        ...

    def delta(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `linear`, in whatever form `add_norm` takes its delta in."""
        ...

    def gated(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """x [T, n], gate_up [2 m, n] -> silu(x · gate) × (x · up), [T, m]."""
        ...

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x [T, n] plus delta (if any; what `delta` made), and that sum's RMS norm times weight [n]: (normed, sum). x may be
        overwritten."""
        ...

    def norm_rope(
        self, qk: Tensor, num_q: int, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys [T, heads, D] of one matrix, normed by head where the model does, and turned by position.

        cos, sin: [T, 1, D / 2]. Returns q [T, num_q, D] and k [T, the rest, D]; qk may be overwritten.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where one layer's keys and values of a step's tokens belong."""

    keys: Tensor  # [KV heads, places, D], strided, D contiguous
    values: Tensor
    token_place: Tensor  # int64 [T, or longer]: the token's place, -1 for padding
    key_factor: float  # float8 caches hold keys times this, clamped and rounded
    value_factor: float


class StoringOps(ABC):
    """`Ops` that can write keys and values into a cache as they make them."""

    @abstractmethod
    def norm_rope_store(
        self,
        qkv: Tensor,
        num_q: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        cache: LayerCache,
    ) -> Tensor:
        """As `norm_rope`, of qkv [T, num_q + 2 × KV heads, D]; keys, and values as they are, go into `cache` alone. Returns q."""


class TorchOps:
    """The arithmetic, rounding included, of transformers' modelling code."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def delta(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.linear(x, weight, bias)

    def gated(self, x: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = self.linear(x, gate_up).chunk(2, dim=-1)
        return F.silu(gate) * up

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if delta is not None:
            x = x + delta
        return rms_norm(x, weight, eps), x

    def norm_rope(
        self, qk: Tensor, num_q: int, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if q_norm is None or k_norm is None:  # queries and keys are neighbours: turn them together
            turned = apply_rope(qk, cos, sin)
            return turned[:, :num_q], turned[:, num_q:]
        return (
            apply_rope(rms_norm(qk[:, :num_q], q_norm, eps), cos, sin),
            apply_rope(rms_norm(qk[:, num_q:], k_norm, eps), cos, sin),
        )


class PackedOps(TorchOps):
    """For float32 on the CPU: weights in oneDNN's own layout, made at their first use. For a few tokens at a time products then
    take half as long as through the BLAS (measured on two cores of an AVX2 machine: 8 tokens of SmolLM2 73 -> 32 ms)."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[int, Tensor]] = {}  # address of a weight -> its version, and the weight repacked

    @staticmethod
    def available() -> bool:
        return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        version, packed = self._packed.get(weight.data_ptr(), (-1, weight))
        if version != weight._version:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            self._packed[weight.data_ptr()] = (weight._version, packed)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] scaled to unit root mean square, in float32, then multiplied by `weight` [n] in x's dtype."""
    return F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D] by position; cos, sin: [T, 1, D / 2]. Dimension i is paired with i + D / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
