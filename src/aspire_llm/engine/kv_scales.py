"""Scales of an fp8 cache: how large the keys and values of each layer get, measured once at start-up."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from aspire_llm.cache.pool import FP8_MAX
from aspire_llm.models.decoder import Decoder

TOKENS = 256  # of the measured text: random ones, always the same
HEADROOM = 2.0  # how much larger than what was measured a number may get before it is clamped


def calculate_kv_scales(decoder: Decoder) -> tuple[list[float], list[float]]:
    """Key and value scales of each layer, powers of two, so that they move the range and add no rounding of their own.

    e4m3 keeps three bits of mantissa from 2^-6 to 448, so scales matter for keys that exceed that range (biases make large
    ones) and for values that fall below it.
    """
    shape, device = decoder.config, decoder.device
    count = min(TOKENS, shape.max_position_embeddings)
    tokens = torch.randint(shape.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).to(device)
    largest = torch.zeros(2, shape.num_layers, device=device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        largest[0, layer], largest[1, layer] = k.abs().amax(), v.abs().amax()
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))  # [1, heads, T, D]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=shape.attention_scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    decoder(tokens, torch.arange(count, device=device), attend)
    keys, values = ([power_of_two(x * HEADROOM / FP8_MAX) for x in row] for row in largest.tolist())
    return keys, values


def power_of_two(x: float) -> float:
    """The smallest one that is at least x; 1 for 0."""
    return 2.0 ** math.ceil(math.log2(x)) if x > 0 else 1.0
