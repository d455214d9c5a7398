"""The cost model's first coefficients: from the model's shape before anything ran, then from a short calibration."""

from __future__ import annotations

import torch

from aspire_llm.models.config import DecoderConfig
from aspire_llm.policy.cost import CostModel

# bytes/s and operations/s of an ordinary machine of the kind; only ratios matter, and only until steps were measured
NOMINAL = {"cpu": (2e10, 1e11), "cuda": (2e12, 4e14)}


def prior_cost(shape: DecoderConfig, num_parameters: int, dtype: torch.dtype, device: torch.device) -> CostModel:
    """Weights are read once a step; a token costs two operations a parameter; a KV token its bytes over all layers."""
    bandwidth, rate = NOMINAL[device.type]
    return CostModel(
        fixed=num_parameters * dtype.itemsize / bandwidth,
        per_token=2 * num_parameters / rate,
        per_kv=shape.kv_bytes_per_token(dtype) / bandwidth,
    )
