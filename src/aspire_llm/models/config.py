"""The shape of a dense decoder, made from a transformers configuration; everything else is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aspire_llm.errors import UserError

# model_type -> the class that a checkpoint of it names in `architectures`
SUPPORTED_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SUPPORTED = "Llama 2/3 and its distillations, SmolLM 1/2, Qwen2, Qwen2.5, Qwen3 (dense), Mistral"
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

# Options of these or related families that change the computation and that the decoder does not have. A configuration may
# carry them only at a value that changes nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "no_rope_layers": (None, []),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (1.0, None),
    "residual_multiplier": (1.0, None),
    "embedding_multiplier": (1.0, None),
    "logits_scaling": (1.0, None),
    "logit_scale": (1.0, None),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A dense decoder with grouped-query attention, rotary positions, RMS norms and a SiLU-gated MLP."""

    architecture: str  # model_type: a key of SUPPORTED_ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    windows: tuple[int | None, ...]  # per layer: w = a token at p reads p - w + 1 … p; None = everything up to p
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    attention_scale: float  # factor of q·k before the softmax
    rope_inv_freq: tuple[float, ...]  # [head_dim / 2], radians a position
    rope_attention_factor: float  # factor of cos and sin (YaRN's; 1.0 elsewhere)
    max_position_embeddings: int  # the longest sequence, rope scaling included
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype | None  # what the checkpoint says it was saved in

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def decoder_config(hf_config: Any) -> DecoderConfig:
    """What `hf_config` (a transformers PreTrainedConfig) describes. UserError where the decoder would not compute it."""
    architecture = check_architecture(hf_config.model_type, getattr(hf_config, "architectures", None))
    for option, neutral in NEUTRAL_VALUES.items():
        value = getattr(hf_config, option, None)
        if value is not None and value not in neutral:
            raise UserError(f"model option {option}={value!r} is not supported; supported: {neutral[0]!r}")

    for name in SIZES:
        size = getattr(hf_config, name, None)
        if not isinstance(size, int) or size < 1:
            raise UserError(f"model option {name}={size!r} must be a whole number of at least 1")
    num_heads, num_kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise UserError(f"num_attention_heads={num_heads} must be a multiple of num_key_value_heads={num_kv_heads}")
    if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
        raise UserError(f"head_dim={head_dim!r} must be an even whole number of at least 2")

    inv_freq, attention_factor = rope_parameters(hf_config, head_dim)
    attention_bias = bool(getattr(hf_config, "attention_bias", False))
    dtype = getattr(hf_config, "dtype", None)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=hf_config.rms_norm_eps,
        windows=layer_windows(hf_config, architecture),
        qkv_bias=architecture == "qwen2" or (architecture in ("llama", "qwen3") and attention_bias),
        o_bias=architecture in ("llama", "qwen3") and attention_bias,
        qk_norm=architecture == "qwen3",
        tie_word_embeddings=bool(hf_config.tie_word_embeddings),
        attention_scale=head_dim**-0.5,
        rope_inv_freq=inv_freq,
        rope_attention_factor=attention_factor,
        max_position_embeddings=max_positions(hf_config),
        eos_token_ids=token_ids(hf_config.eos_token_id),
        dtype=dtype if isinstance(dtype, torch.dtype) else None,
    )


def check_architecture(model_type: object, architectures: list[str] | None) -> str:
    """`model_type` if the decoder computes it, else UserError. `architectures` as in config.json, where given."""
    if not isinstance(model_type, str) or model_type not in SUPPORTED_ARCHITECTURES:
        raise UserError(f"architecture {model_type!r} is not supported; supported: {SUPPORTED}")
    wanted = SUPPORTED_ARCHITECTURES[model_type]
    if architectures and wanted not in architectures:
        raise UserError(f"architecture {', '.join(architectures)} is not supported; supported: {SUPPORTED}")
    return model_type


def token_ids(value: object) -> tuple[int, ...]:
    """Token ids as configurations give them (one, several or none), ascending."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(index, int) and index >= 0 for index in values):
        raise UserError(f"eos_token_id={value!r} must be a token id or a list of token ids")
    return tuple(sorted(set(values)))


def max_positions(hf_config: Any) -> int:
    """Positions a sequence may have. YaRN's factor applies to the length before it, which configurations may still name."""
    limit: int = hf_config.max_position_embeddings
    rope = hf_config.rope_parameters
    if rope["rope_type"] == "yarn" and rope["factor"] is not None:
        limit = max(limit, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return limit


def layer_windows(hf_config: Any, architecture: str) -> tuple[int | None, ...]:
    """The sliding window of each layer. One that never cuts anything off is no window."""
    window = getattr(hf_config, "sliding_window", None)
    layer_types: list[str] = getattr(hf_config, "layer_types", None) or []
    num_layers = hf_config.num_hidden_layers
    if window is not None and (not isinstance(window, int) or window < 1):
        raise UserError(f"model option sliding_window={window!r} must be a whole number of at least 1")
    if architecture == "llama":
        if window is not None:
            raise UserError(f"model option sliding_window={window} is not supported for llama")
        sliding = [False] * num_layers
    elif architecture == "mistral":  # transformers gives every layer the window
        if len(set(layer_types)) > 1:
            raise UserError("model option layer_types of mixed kinds is not supported for mistral")
        sliding = [window is not None] * num_layers
    else:
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown or len(layer_types) != num_layers:
            raise UserError(
                f"model option layer_types={layer_types!r} must give full_attention or sliding_attention "
                f"for each of {num_layers} layers"
            )
        sliding = [kind == "sliding_attention" for kind in layer_types]
        if any(sliding) and window is None:
            raise UserError("model option layer_types names sliding_attention, but no sliding_window is in use")
    if window is not None and window >= max_positions(hf_config):
        window = None
    return tuple(window if slides else None for slides in sliding)


def rope_parameters(hf_config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies [head_dim / 2] and the factor of cos and sin, by transformers' own initialisation.

    `dynamic` keeps the frequencies that hold up to max_position_embeddings. Beyond, they would depend on the longest
    sequence of a batch and make cached keys wrong, so max_position_embeddings is the limit there.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = hf_config.rope_parameters
    rope_type = parameters.get("rope_type")
    if rope_type not in ROPE_TYPES:
        raise UserError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        factor = parameters["partial_rotary_factor"]
        raise UserError(f"model option partial_rotary_factor={factor!r} is not supported; supported: 1.0")
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        inv_freq, attention_factor = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    else:
        try:
            inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"))
        except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
            raise UserError(f"rope parameters {parameters!r} are not valid for type {rope_type!r}: {error}") from error
    return tuple(inv_freq.tolist()), float(attention_factor)
