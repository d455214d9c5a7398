"""The decoder against transformers: tiny random models of every family and option, logits equal in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from aspire_llm.errors import UserError
from aspire_llm.models.config import decoder_config
from aspire_llm.models.decoder import Decoder
from aspire_llm.models.load import dummy_decoder, load_weights, weight_files
from dense_attention import dense_attention

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama biases": (LlamaConfig, {"attention_bias": True}),
    "llama wide heads": (LlamaConfig, {"head_dim": 16}),
    "llama3 rope": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": (LlamaConfig, {"rope_parameters": LINEAR_ROPE}),
    "dynamic rope": (LlamaConfig, {"rope_parameters": DYNAMIC_ROPE}),
    "yarn rope": (Qwen2Config, {"rope_parameters": YARN_ROPE}),
    "yarn rope, own factor": (Qwen3Config, {"rope_parameters": {**YARN_ROPE, "attention_factor": 1.3}, "head_dim": 16}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral window": (MistralConfig, {"sliding_window": 7}),
    "qwen2": (Qwen2Config, {}),
    "qwen2 tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2 windows": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3": (Qwen3Config, {"head_dim": 12}),
    "qwen3 tied, biases": (Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 windows": (
        Qwen3Config,
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
}


def oracle(kind: type, options: dict[str, Any]) -> Any:
    """A random model of transformers whose every weight, biases and norms included, differs from its neutral value."""
    config = kind(**TINY, **{k: dict(v) if isinstance(v, dict) else v for k, v in options.items()})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))
    return model


def loaded(folder: Path, hf_config: Any, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(decoder_config(hf_config), dtype=dtype, device=torch.device("cpu"))
    load_weights(decoder, weight_files(folder))
    return decoder


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = oracle(*CASES[case])
    model.save_pretrained(tmp_path)
    decoder = loaded(tmp_path, model.config)
    sequences = [torch.randint(0, 97, (n,)) for n in (100, 1, 30)]
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    hidden = decoder(torch.cat(sequences), positions, dense_attention(decoder.config, [len(s) for s in sequences]))
    with torch.no_grad():
        expected = torch.cat([model(s[None]).logits[0] for s in sequences])
    logits = decoder.logits(hidden)
    assert logits.dtype == torch.float32
    assert expected.std() > 0.1  # the comparison is about something
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(decoder.logits(hidden[[3, 100]]), expected[[3, 100]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_bfloat16_rounds_as_transformers(case: str, tmp_path: Path) -> None:
    model = oracle(*CASES[case]).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    decoder = loaded(tmp_path, model.config, torch.bfloat16)
    tokens, length = torch.arange(40), [1] * 40
    alone = decoder(tokens, torch.zeros(40, dtype=torch.long), dense_attention(decoder.config, length))
    together = decoder(tokens, tokens, dense_attention(decoder.config, [40]))
    with torch.no_grad():
        expected_alone = model(tokens[:, None]).logits[:, 0].float()
        expected_together = model(tokens[None]).logits[0].float()
    assert alone.dtype == torch.bfloat16
    # Alone, a token's attention is its own value: all else must round as there. Together, softmax rounds differently.
    assert (decoder.logits(alone) - expected_alone).abs().mean() < 0.002 * expected_alone.std()
    assert (decoder.logits(together) - expected_together).abs().mean() < 0.05 * expected_together.std()


def test_attend_is_called_once_a_layer_in_order_with_flat_shapes() -> None:
    config = decoder_config(LlamaConfig(**TINY))
    decoder = dummy_decoder(config, dtype=torch.float32, device="cpu")
    seen = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((layer, q.shape, k.shape, v.shape))
        return q

    assert decoder(torch.tensor([1, 2, 3]), torch.tensor([9, 0, 4]), attend).shape == (3, 48)
    assert seen == [(i, (3, 6, 8), (3, 2, 8), (3, 2, 8)) for i in range(4)]


def test_config_facts() -> None:
    config = decoder_config(LlamaConfig(**TINY))
    assert config.attention_scale == 8**-0.5
    assert config.kv_bytes_per_token(torch.bfloat16) == 2 * 4 * 2 * 8 * 2
    assert config.eos_token_ids == (1,)
    assert decoder_config(MistralConfig(**TINY, sliding_window=7)).windows == (7,) * 4
    assert decoder_config(MistralConfig(**TINY, sliding_window=256)).windows == (None,) * 4  # cuts nothing off
    windows = decoder_config(CASES["qwen2 windows"][0](**TINY, **CASES["qwen2 windows"][1])).windows
    assert windows == (None, None, 5, 5)
    hash(config)


def test_yarn_extends_the_positions() -> None:
    original = {**TINY, "max_position_embeddings": 64}  # as Qwen2.5 says to configure it
    assert decoder_config(Qwen2Config(**original, rope_parameters=dict(YARN_ROPE))).max_position_embeddings == 256
    assert decoder_config(Qwen2Config(**TINY, rope_parameters=dict(YARN_ROPE))).max_position_embeddings == 256
    assert decoder_config(LlamaConfig(**TINY, rope_parameters=dict(LINEAR_ROPE))).max_position_embeddings == 256


def test_dummy_weights_are_seeded() -> None:
    config = decoder_config(Qwen3Config(**TINY, head_dim=8, tie_word_embeddings=True))
    first, again, other = (dummy_decoder(config, dtype=torch.bfloat16, device="cpu", seed=s) for s in (1, 1, 2))
    for name, view in first.checkpoint_views().items():
        assert torch.equal(view, again.checkpoint_views()[name])
        assert view.isfinite().all()
    assert not torch.equal(first.layers[0].qkv, other.layers[0].qkv)
    assert first.head is first.embedding


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (LlamaConfig, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LlamaConfig, {"mlp_bias": True}, "mlp_bias=True"),
        (LlamaConfig, {"rope_interleaved": True}, "rope_interleaved=True"),
        (LlamaConfig, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (
            LlamaConfig,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "0.5",
        ),
        (LlamaConfig, {"sliding_window": 8}, "sliding_window=8"),
        (LlamaConfig, {"num_key_value_heads": 4}, "num_key_value_heads=4"),
        (LlamaConfig, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (MistralConfig, {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        (MistralConfig, {"sliding_window": 0}, "sliding_window=0"),
        (Qwen2Config, {"layer_types": ["full_attention", "chunked_attention"] * 2}, "layer_types"),
        (Qwen2Config, {"use_mrope": True}, "use_mrope=True"),
    ],
)
def test_options_that_are_not_computed_are_refused(kind: type, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=r"supported|must|names") as error:
        decoder_config(kind(**{**TINY, **options}))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_rope_type_is_refused() -> None:
    config = LlamaConfig(**TINY)
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    with pytest.raises(UserError, match=r"rope type 'longrope'.*supported: default, linear, dynamic, llama3, yarn"):
        decoder_config(config)
