"""Shapes of the models whose kernels are measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from aspire_llm.errors import UserError


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer of a dense decoder, and its output head."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    qk_norm: bool
    dtype: torch.dtype = torch.bfloat16

    @property
    def kv_bytes_per_position(self) -> int:
        """Keys and values of one position in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """The layer's matrices and the head: (outputs, inputs)."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": (heads + 2 * kv, self.hidden_size),
            "o": (self.hidden_size, heads),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
            "head": (self.vocab_size, self.hidden_size),
        }


SHAPES = {
    "qwen3-8b": Shape(4096, 12288, 32, 8, 128, 151936, True),
    "qwen3-1.7b": Shape(2048, 6144, 16, 8, 128, 151936, True),
    "deepseek-r1-distill-llama-8b": Shape(4096, 14336, 32, 8, 128, 128256, False),
    "smollm2-135m": Shape(576, 1536, 9, 3, 64, 49152, False),
    "tiny": Shape(64, 96, 4, 2, 16, 256, True),
}


def find_shape(name: str, dtype: torch.dtype) -> Shape:
    """Raises UserError."""
    if name not in SHAPES:
        raise UserError(f"--shape {name!r} is unknown; known: {', '.join(SHAPES)}")
    return replace(SHAPES[name], dtype=dtype)
