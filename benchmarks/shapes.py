"""Model shapes whose weights are not at hand: folders with a configuration alone, for `load_format="dummy"`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1, "vocab_size": 151936, "head_dim": 128,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False,
    "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1, "head_dim": 128, "rope_theta": 5e5,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": {
        **_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "deepseek-r1-distill-llama-8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        **_LLAMA, "rope_scaling": None, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "small": {
        **_QWEN3, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "tie_word_embeddings": True,
    },
    "tiny": {  # to try a script on a CPU
        **_QWEN3, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip


def model_folder(shape: str) -> str:
    """A folder with the configuration of `shape`, and nothing else."""
    folder = Path(tempfile.gettempdir()) / f"aspire-{shape}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return str(folder)


def refresh_layer(shape: str) -> int:
    """The layer at two thirds of the depth: about where profiles of real models of such depth put it (16 of 24, 19 of 28)."""
    layers: int = SHAPES[shape]["num_hidden_layers"]
    return 2 * layers // 3
