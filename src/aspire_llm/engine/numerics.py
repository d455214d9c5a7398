"""What an engine computes and keeps K/V with: attention backend, operations, cache dtype; and what cannot be had together."""

from __future__ import annotations

import torch

from aspire_llm.cache.pool import FP8, KVPool
from aspire_llm.config import EngineConfig
from aspire_llm.errors import UserError
from aspire_llm.models.decoder import Decoder

FP8_CAPABILITY = (8, 9)  # of NVIDIA GPUs: the first that convert to and from e4m3


def require_triton() -> None:
    """UserError where the kernels cannot be imported."""
    try:
        import aspire_llm.attention.triton.backend  # noqa: F401
    except ImportError:
        raise UserError("attention_backend='triton' needs the package triton", "attention_backend") from None


def uses_triton(config: EngineConfig, device: torch.device) -> bool:
    """Whether attention runs on the Triton kernels rather than on the reference in torch."""
    return config.attention_backend == "triton" or (config.attention_backend == "auto" and device.type == "cuda")


def choose_kv_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """dtype: the model's. Raises UserError where this machine cannot read such a cache."""
    name = config.kv_cache_dtype
    chosen = {"auto": dtype, "bfloat16": torch.bfloat16, "fp8": FP8, "fp8_e4m3": FP8}[name]
    if chosen == FP8 and device.type == "cuda" and uses_triton(config, device):
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is not None or capability < FP8_CAPABILITY:
            raise UserError(
                f"kv_cache_dtype={name!r} needs an NVIDIA GPU of compute capability 8.9 or newer, and "
                f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}",
                "kv_cache_dtype",
            )
    return chosen


def check_shared_cache(config: EngineConfig, kv_dtype: torch.dtype, pool: KVPool, deterministic: bool) -> None:
    """UserError unless a cache that another engine made holds what this one's would. deterministic: the other engine's."""
    if pool.dtype != kv_dtype:
        raise UserError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} is {kv_dtype} here, and the shared cache holds {pool.dtype}",
            "kv_cache_dtype",
        )
    if config.deterministic != deterministic:
        raise UserError(
            f"deterministic={config.deterministic} with the cache of an engine with deterministic={deterministic}: "
            "its K/V would have other bits",
            "deterministic",
        )


def choose_decoder(config: EngineConfig, decoder: Decoder) -> Decoder:
    """The decoder with the operations that the engine asks for. Raises UserError where they do not exist."""
    if not config.deterministic:
        return decoder
    if not uses_triton(config, decoder.device):
        raise UserError(
            "deterministic=True needs the Triton kernels, so a GPU and attention_backend 'auto' or 'triton'; "
            "on the CPU leave it off: float32 gives plain decoding's tokens, not its bits",
            "deterministic",
        )
    from aspire_llm.models.deterministic import DeterministicOps

    return decoder.with_ops(DeterministicOps(decoder.device))
