"""A GGUF file converted once into a cached folder in Hugging Face format: bf16 safetensors, configuration, tokenizer.

The folder is keyed by the file's sha256 and appears whole or not at all: it is written under another name and renamed.
transformers can load GGUF weights too, but needs the accelerate package and several times the memory for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from aspire_llm.errors import UserError
from aspire_llm.models.config import SUPPORTED, SUPPORTED_ARCHITECTURES, DecoderConfig, decoder_config
from aspire_llm.models.decoder import Decoder
from aspire_llm.models.gguf_file import GGUFFile, read_gguf
from aspire_llm.models.gguf_tokenizer import tokenizer_from_gguf

FORMAT = 1  # of the cached folders; raised when the conversion changes
SHARD_BYTES = 4 << 30
UNFINISHED = ".converting-"
ABANDONED_AFTER = 24 * 3600  # seconds after which an unfinished conversion must be a killed one

TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROPE_FACTORS = "rope_freqs.weight"  # float32 [head_dim / 2]: Llama 3 scaling, as divisors of the frequencies


def cache_folder() -> Path:
    """Where conversions are kept: $XDG_CACHE_HOME/aspire-llm/models, by default under ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "aspire-llm" / "models"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converted_folder(path: Path, expected_sha256: str | None = None, cache: Path | None = None) -> Path:
    """The cached folder of the GGUF file `path`, converting it where that has not been done.

    expected_sha256: UserError where the file has another. cache: instead of `cache_folder()`.
    """
    try:
        digest = sha256_of(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "model") from error
    if expected_sha256 is not None and digest != expected_sha256:
        raise UserError(f"{path} has sha256 {digest}, expected {expected_sha256}: reinstall its package", "model")
    cache = cache_folder() if cache is None else cache
    folder = cache / f"{digest[:32]}-v{FORMAT}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=cache))
        try:
            convert(path, unfinished)
            try:
                unfinished.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first, with the same result
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write the converted model into {cache}: {error.strerror or error}; XDG_CACHE_HOME names another place",
            "model",
        ) from error
    return folder


def convert(path: Path, folder: Path) -> None:
    """Write the model in GGUF file `path` into the existing `folder`, in Hugging Face format."""
    file = read_gguf(path)
    hf_config = hf_config_from_gguf(file)
    config = decoder_config(hf_config)
    names = _tensor_names(file, config)  # refuses a wrong file before anything slow is done
    tokenizer = tokenizer_from_gguf(file)
    eos = list(config.eos_token_ids)
    hf_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}) + "\n")
    _save_shards(_tensors(file, config, names), folder)


def hf_config_from_gguf(file: GGUFFile) -> Any:
    """The transformers configuration that a GGUF file's metadata describes."""
    from transformers import AutoConfig

    data = file.metadata
    arch = data.get("general.architecture")
    if not isinstance(arch, str) or arch not in SUPPORTED_ARCHITECTURES:
        raise UserError(f"{file.path}: architecture {arch!r} is not supported; supported: {SUPPORTED}")
    if data.get(f"{arch}.expert_count", 0):
        raise UserError(f"{file.path}: mixture of experts is not supported; supported: {SUPPORTED}")

    def number(key: str, default: int | None = None) -> int:
        value = data.get(f"{arch}.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{file.path}: {arch}.{key} is {value!r}, not one whole number of at least 1")
        return value

    heads, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", hidden // heads)
    epsilon = data.get(f"{arch}.attention.layer_norm_rms_epsilon")
    if not isinstance(epsilon, float):
        raise UserError(f"{file.path}: {arch}.attention.layer_norm_rms_epsilon is {epsilon!r}, not a number")
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path} lacks the tensor token_embd.weight")
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise UserError(f"{file.path}: {arch}.{key}={number(key)} is not supported; supported: {head_dim}")
    ids = (data.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    eos = sorted({index for index in ids if isinstance(index, int)})
    bos = data.get("tokenizer.ggml.bos_token_id")
    context = number("context_length")
    return AutoConfig.for_model(
        arch,
        architectures=[SUPPORTED_ARCHITECTURES[arch]],
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=float(f"{epsilon:.6g}"),  # float32 in the file: 1e-05 again, not 9.99999975e-06
        max_position_embeddings=context,
        rope_parameters=_rope(file, arch, head_dim, context),
        sliding_window=None,
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=bos,
        eos_token_id=eos[0] if len(eos) == 1 else eos or None,
        dtype="bfloat16",
    )


def _rope(file: GGUFFile, arch: str, head_dim: int, context: int) -> dict[str, Any]:
    data = file.metadata
    theta = float(data.get(f"{arch}.rope.freq_base", 10000.0))
    scaling = data.get(f"{arch}.rope.scaling.type", "none")
    factor = float(data.get(f"{arch}.rope.scaling.factor", data.get(f"{arch}.rope.scale_linear", 1.0)))
    original = data.get(f"{arch}.rope.scaling.original_context_length", context)
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, theta, head_dim, context)
    if scaling == "yarn":
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    if scaling == "linear" or (scaling == "none" and factor != 1.0):
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if scaling != "none":
        raise UserError(
            f"{file.path}: rope scaling {scaling!r} is not supported; supported: none, linear, yarn, llama3"
        )
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int, context: int) -> dict[str, Any]:
    """GGUF keeps Llama 3 scaling as divisors only. Find the parameters that every Llama 3.x release has and check them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama import LlamaConfig

    divisors = file.read(ROPE_FACTORS, torch.float32)
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": round(float(divisors.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)
    if divisors.shape == plain.shape:
        reference = LlamaConfig(
            head_dim=head_dim, max_position_embeddings=max(context, 8193), rope_parameters=dict(rope)
        )
        inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, torch.device("cpu"))
        if torch.allclose(plain / divisors, inv_freq, rtol=1e-4):
            return rope
    raise UserError(
        f"{file.path}: its {ROPE_FACTORS} is not Llama 3's rope scaling; use the model in Hugging Face format"
    )


def _tensor_names(file: GGUFFile, config: DecoderConfig) -> dict[str, str]:
    """Name in a transformers checkpoint -> name in the file, after checking that all shapes agree and none is left over."""
    shapes = {
        name: tuple(view.shape)
        for name, view in Decoder(config, dtype=torch.bfloat16, device=torch.device("meta")).checkpoint_views().items()
    }
    names: dict[str, str] = {}
    for name, shape in shapes.items():
        if name in TOP_NAMES:
            names[name] = TOP_NAMES[name]
        else:
            index, rest = name.removeprefix("model.layers.").split(".", 1)
            module, suffix = rest.rsplit(".", 1)
            names[name] = f"blk.{index}.{LAYER_NAMES[module]}.{suffix}"
        tensor = file.tensors.get(names[name])
        if tensor is None:
            raise UserError(f"{file.path} lacks the tensor {names[name]}")
        if tensor.shape != shape:
            raise UserError(f"{file.path}: tensor {names[name]} has shape {tensor.shape}, expected {shape}")
    extra = sorted(set(file.tensors) - set(names.values()) - {ROPE_FACTORS})
    if extra:
        raise UserError(f"{file.path}: tensor {extra[0]} has no place in a {config.architecture} decoder")
    return names


def _tensors(file: GGUFFile, config: DecoderConfig, names: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    for name, gguf_name in names.items():
        tensor = file.read(gguf_name, torch.bfloat16)
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        if config.architecture == "llama" and heads is not None:
            # llama.cpp keeps the two halves of each rotary pair as neighbours; transformers half a head apart.
            tensor = tensor.view(heads, config.head_dim // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)
        yield name, tensor


def _save_shards(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Write safetensors files of about SHARD_BYTES and their index, holding one shard in memory."""
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor.contiguous()
        if sum(t.nbytes for t in shard.values()) >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _remove_abandoned(cache: Path) -> None:
    for folder in cache.glob(f"{UNFINISHED}*"):
        if time.time() - folder.stat().st_mtime > ABANDONED_AFTER:
            shutil.rmtree(folder, ignore_errors=True)
