"""What the sampler is given and what it gives back: plain data between runner and sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aspire_llm.request import RowKind, TokenLogprobs

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Logits of the rows that sample. R rows, N tokens with logits (PREFILL 1, DRAFT 1, VERIFY 1 + pending each)."""

    kinds: Sequence[RowKind] | Ints  # [R], on the host
    slots: Sequence[int] | Ints  # [R], on the host
    num_tokens: Sequence[int] | Ints  # [R], on the host: of N
    logits: Tensor  # [N, vocabulary], float32, bfloat16 or float16: as the model gave them
    positions: Tensor  # int64 [N]: of the token that was fed; the token chosen from its logits stands one further
    history: Tensor  # int64 [S, max_model_len]: every known token by slot and position, pending drafts included


@dataclass(frozen=True, slots=True)
class SampleOutput:
    tokens: Tensor  # int64 [R, widest]: PREFILL the first token, DRAFT the draft, VERIFY accepted drafts and one more
    num_emitted: Tensor  # int64 [R]: valid entries of `tokens`
    confidence: Tensor  # float32 [R]: DRAFT rows: top-1 probability of the distribution the draft came from; else 0
    logprobs: dict[int, list[TokenLogprobs]] = field(
        default_factory=dict
    )  # row -> one for each emitted token, where asked
    errors: dict[int, str] = field(default_factory=dict)  # row -> why this request failed
