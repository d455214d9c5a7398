"""Counter-based random numbers: a pure function of (seed, position, purpose, index), the same on every device.

Nothing here has state, so a request draws the same numbers alone, in any batch and after preemption, and torch's own
generators are never touched. The hash is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014) in torch's wrapping int64 arithmetic: seed, position and purpose are absorbed one after another
into a 64-bit key; number i of a key's stream is the (i+1)-th output of SplitMix64 started at that key.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a number is for: numbers of different purposes are independent at the same position."""

    TARGET = 0  # the token that plain decoding samples
    DRAFT = 1  # the draft, where it is drawn independently of the target's numbers
    ACCEPT = 2  # whether a draft is accepted
    RESIDUAL = 3  # the token in place of a rejected draft


def signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit constant."""
    return value - (1 << 64) if value >= 1 << 63 else value


GAMMA = signed(0x9E3779B97F4A7C15)
MIX_1 = signed(0xBF58476D1CE4E5B9)
MIX_2 = signed(0x94D049BB133111EB)


def _xor_shift(z: Tensor, bits: int) -> Tensor:
    """z ^ (z >>> bits). torch shifts int64 arithmetically, so the sign's copies are masked off."""
    return z ^ ((z >> bits) & ((1 << (64 - bits)) - 1))


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's output function (Stafford's variant 13)."""
    z = _xor_shift(z, 30) * MIX_1
    z = _xor_shift(z, 27) * MIX_2
    return _xor_shift(z, 31)


def keys(seeds: Tensor, positions: Tensor, purpose: Purpose | Tensor) -> Tensor:
    """int64 [N] keys of int64 [N] seeds and positions (of the token to be chosen, in its request) and a purpose
    (one, or int64 [N])."""
    key = _mix(seeds + GAMMA)
    key = _mix(key + GAMMA * (positions + 1))
    if isinstance(purpose, Purpose):
        return _mix(key + signed((GAMMA * (purpose + 1)) % (1 << 64)))
    return _mix(key + GAMMA * (purpose + 1))


def uniform(key: Tensor) -> Tensor:
    """float64 [N], uniform in (0, 1): the first number of each key's stream."""
    return _unit(_mix(key + GAMMA))


def exponential(key: Tensor, count: int) -> Tensor:
    """float64 [N, count], exponential of rate 1: the first `count` numbers of each key's stream [N]."""
    index = torch.arange(1, count + 1, dtype=torch.int64, device=key.device)
    return -torch.log(_unit(_mix(key[:, None] + index[None, :] * GAMMA)))


def _unit(bits: Tensor) -> Tensor:
    """The upper 52 bits as a float64 in (0, 1), both ends excluded."""
    return (((bits >> 12) & ((1 << 52) - 1)).to(torch.float64) + 0.5) * 2.0**-52
