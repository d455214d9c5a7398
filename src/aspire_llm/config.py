"""Settings of an engine: frozen, checked once, resolved once against the model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from aspire_llm.errors import UserError, explain

SelectorName = Literal["window", "snapkv", "verified", "refreshed"]
DraftSampling = Literal["coupled", "greedy", "rejection"]


@dataclass(frozen=True, slots=True)
class MethodPreset:
    """A published method as selector + policy. `context` is None where nothing is drafted."""

    context: SelectorName | None
    policy: str
    draft_tokens: int  # of fixed-length policies; the starting length of adaptive ones
    summary: str


METHODS: dict[str, MethodPreset] = {
    "plain": MethodPreset(None, "autoregressive", 0, "plain decoding"),
    "magicdec-window": MethodPreset(
        "window", "lockstep", 4, "MagicDec with StreamingLLM drafts: sinks + recent, whole batch in phase"
    ),
    "magicdec-snapkv": MethodPreset(
        "snapkv", "lockstep", 4, "MagicDec with SnapKV drafts: set chosen once at the end of the prompt"
    ),
    "vegas": MethodPreset("verified", "lockstep", 6, "Vegas: set from the last verification, whole batch in phase"),
    "sparsespec": MethodPreset(
        "verified", "staggered", 8, "SparseSpec: fixed draft length, phases spread over the batch"
    ),
    "aspire-fsm": MethodPreset(
        "refreshed", "fsm", 4, "ASPIRE's simple variant: longer after full acceptance, shorter after a rejection"
    ),
    "aspire-ema": MethodPreset(
        "refreshed", "ema", 4, "ASPIRE, the paper: best length by smoothed acceptance rate and cost model"
    ),
    "aspire": MethodPreset(
        "refreshed", "confidence", 4, "ours: every request drafts while its draft confidence says that it pays"
    ),
}

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(value: Any) -> Any:
    """'32K' -> 32768, '4G' -> 4 GiB; anything else is left for the type check."""
    if isinstance(value, str) and (
        match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
    ):
        return int(float(match[1]) * _UNITS[match[2].upper()])
    return value


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]


class EngineConfig(BaseModel):
    """Options of `LLM` and of the command line, under the same names. None means: chosen from model and machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field("smollm2-135m", description="built-in name, folder, .gguf file or hub id")
    tokenizer: str | None = Field(None, description="folder or hub id, if not the model's own")
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights, to measure speed")
    device: str = Field("auto", description="cpu, cuda, cuda:1; auto: a GPU where there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on the CPU, else bfloat16"
    )
    attention_backend: Literal["auto", "reference", "triton"] = Field(
        "auto", description="auto: triton on a GPU, else reference"
    )
    deterministic: bool = Field(
        False,
        description="GPU: batch-invariant kernels, so that greedy tokens are plain decoding's to the bit in any batch; slower",
    )
    enforce_eager: bool = Field(
        False, description="GPU: launch every kernel by itself instead of replaying CUDA graphs"
    )
    seed: int = Field(0, ge=0, description="of requests that bring none")
    max_model_len: Size | None = Field(
        None, description="longest prompt + output in tokens, e.g. 8192 or 32K; default: the model's"
    )
    max_num_seqs: int = Field(64, ge=1, description="most requests running at once")
    max_num_batched_tokens: Size | None = Field(
        None, description="token budget of a step; default 512 on the CPU, else 2048"
    )
    block_size: int = Field(64, ge=1, le=1024, description="tokens a page of the KV cache")
    kv_cache_memory: Size | None = Field(
        None,
        description="bytes of KV cache, e.g. 4G; default: what max_num_seqs needs, up to a share of the free memory",
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3"] = Field(
        "auto", description="auto: the model's dtype; fp8 is fp8_e4m3 and takes half the memory of bfloat16"
    )
    calculate_kv_scales: bool = Field(
        False, description="fp8 cache: measure at start-up how large keys and values get, instead of scales of 1"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the GPU's memory for weights, cache and work"
    )
    enable_prefix_caching: bool = Field(True, description="reuse the K/V of prompt prefixes seen before")
    method: str = Field("aspire", description="preset of context and policy: " + ", ".join(METHODS))
    context: SelectorName | None = Field(None, description="selector of the drafting context; default: the method's")
    policy: str | None = Field(None, description="when to draft and verify; default: the method's")
    budget: int | None = Field(
        None, ge=1, description="positions in a drafting context; default: the profile's, else 512"
    )
    draft_tokens: int | None = Field(
        None, ge=1, le=64, description="draft length of fixed-length policies; default: the method's"
    )
    max_draft_tokens: int = Field(16, ge=1, le=64, description="most drafts between two verifications")
    max_verify_tokens: int | None = Field(
        None, ge=1, description="most tokens of verifications a step; default on a GPU: 192, or four a request"
    )
    calibrate: bool = Field(True, description="measure this machine at start-up, for policies that weigh costs")
    refresh_layers: tuple[int, ...] | None = Field(
        None, description="layers that renew the context; default: profile's, else penultimate"
    )
    profile: str | None = Field(
        None, description="profile file; default: the one kept for this model, if any; 'none': no profile"
    )
    draft_sampling: DraftSampling = Field("coupled", description="how drafts of sampled requests are drawn")

    @property
    def drafts(self) -> bool:
        return self.preset.context is not None or self.context is not None

    @property
    def preset(self) -> MethodPreset:
        return METHODS[self.method]


def make_config(**options: Any) -> EngineConfig:
    """EngineConfig from keyword options. Raises UserError naming the option, its value and what is allowed."""
    try:
        config = EngineConfig(**options)
    except ValidationError as error:
        raise explain(error, EngineConfig) from None
    if config.method not in METHODS:
        raise UserError(f"method {config.method!r} is unknown; known: {', '.join(METHODS)}", "method")
    if config.drafts and config.preset.context is None and config.policy is None:
        raise UserError(
            f"context={config.context!r} does nothing with method {config.method!r}, which does not draft", "context"
        )
    if not config.drafts:
        for name in ("budget", "draft_tokens", "refresh_layers", "profile"):
            if getattr(config, name) not in (None, "none"):
                raise UserError(
                    f"{name}={getattr(config, name)!r} does nothing with method {config.method!r}, which does not draft",
                    name,
                )
    if config.calculate_kv_scales and not config.kv_cache_dtype.startswith("fp8"):
        raise UserError(
            f"calculate_kv_scales=True does nothing with kv_cache_dtype={config.kv_cache_dtype!r}; use 'fp8'",
            "calculate_kv_scales",
        )
    context = config.context or config.preset.context
    if config.refresh_layers is not None and context != "refreshed":
        raise UserError(
            f"refresh_layers={list(config.refresh_layers)} does nothing with context {context!r}; use 'refreshed'",
            "refresh_layers",
        )
    if config.draft_tokens is not None and config.draft_tokens > config.max_draft_tokens:
        raise UserError(
            f"draft_tokens={config.draft_tokens} is above max_draft_tokens={config.max_draft_tokens}", "draft_tokens"
        )
    return config


def selector_names() -> tuple[str, ...]:
    return get_args(SelectorName)


def read_text(path: str, what: str) -> str:
    """A text file's content. Raises UserError naming the file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{what} {path!r} cannot be read: {reason}") from None
