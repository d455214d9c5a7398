"""GGUF: tiny files of every layout converted and compared with transformers' own reading; damage; atomic conversion."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aspire_llm.errors import UserError
from aspire_llm.models import convert
from aspire_llm.models.convert import cache_folder, converted_folder
from aspire_llm.models.gguf_file import read_gguf
from aspire_llm.models.load import load_model, weight_files
from dense_attention import dense_attention

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD, LAYERS = 64, 96, 4, 2, 32, 2
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|endoftext|>", "<|bos|>", "<|eos|>", "<tool>", *ALPHABET, "he", "ll", "hell", "12", "Ġa"]
MERGES = ["h e", "l l", "he ll", "1 2", "Ġ a"]
TYPES = {"F32": gguf.GGMLQuantizationType.F32, "F16": gguf.GGMLQuantizationType.F16}
TYPES |= {name: gguf.GGMLQuantizationType[name] for name in ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")}


def write_gguf(
    path: Path,
    arch: str = "llama",
    quantization: str = "F32",
    *,
    tied: bool = True,
    pre: str | None = "smollm",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    tokens: list[str] = TOKENS,
) -> Path:
    """A tiny model file. `metadata`: integers, strings and floats to add or replace; `tensors`: to add, replace or drop."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (len(tokens), HIDDEN)
    for i in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * HEAD, HIDDEN),
            "attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
            "attn_v.weight": (KV_HEADS * HEAD, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * HEAD),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INTERMEDIATE, HIDDEN),
            "ffn_up.weight": (INTERMEDIATE, HIDDEN),
            "ffn_down.weight": (HIDDEN, INTERMEDIATE),
        }
        if arch == "qwen2":
            layer |= {f"attn_{n}.bias": layer[f"attn_{n}.weight"][:1] for n in "qkv"}
        if arch == "qwen3":
            layer |= {f"attn_{n}_norm.weight": (HEAD,) for n in "qk"}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    values: dict[str, Any] = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    values |= tensors or {}

    fields: dict[str, Any] = {
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.block_count": LAYERS,
        f"{arch}.feed_forward_length": INTERMEDIATE,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": HEAD,
        f"{arch}.attention.value_length": HEAD,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 5000.0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.chat_template": "{{ messages[0]['content'] }}!",
    }
    if pre is not None:
        fields["tokenizer.ggml.pre"] = pre
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (fields | (metadata or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    if (metadata or {}).get("tokenizer.ggml.model") == "llama":
        writer.add_array("tokenizer.ggml.scores", [-float(i) for i in range(len(tokens))])
    else:
        writer.add_array("tokenizer.ggml.merges", MERGES)
    writer.add_array("tokenizer.ggml.token_type", [3, 3, 3, 4] + [1] * (len(tokens) - 4))
    for name, value in values.items():
        if value is not None:
            kind = TYPES[quantization] if value.ndim == 2 else TYPES["F32"]
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(path: Path, cache: Path, *words: str) -> None:
    with pytest.raises(UserError) as error:
        converted_folder(path, cache=cache)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize(
    ("arch", "quantization", "tied"),
    [
        ("llama", "F32", True),
        ("llama", "F16", False),
        ("llama", "BF16", True),
        ("llama", "Q4_0", True),
        ("llama", "Q4_1", False),
        ("llama", "Q5_0", True),
        ("qwen2", "Q8_0", False),
        ("qwen2", "Q5_1", True),
        ("qwen3", "Q8_0", True),
    ],
)
def test_weights_equal_transformers(arch: str, quantization: str, tied: bool, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch, quantization, tied=tied, pre="smollm" if arch == "llama" else "qwen2")
    folder = converted_folder(path, cache=tmp_path / "cache")
    loaded = load_model(str(folder), dtype=torch.float32, device="cpu")
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[arch]
    model = AutoModelForCausalLM.from_config(kind.from_pretrained(folder), dtype=torch.float32).eval()
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({k: torch.as_tensor(v).to(torch.bfloat16).float() for k, v in theirs.items()}, strict=False)
    assert len(theirs) == len(loaded.decoder.checkpoint_views())
    tokens = torch.arange(30)
    hidden = loaded.decoder(tokens, tokens, dense_attention(loaded.config, [30]))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(loaded.decoder.logits(hidden), expected, rtol=1e-4, atol=1e-3)
    assert loaded.config.tie_word_embeddings == tied
    assert loaded.config.rms_norm_eps == 1e-5
    assert loaded.eos_token_ids == {2}


def test_load_by_path_converts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.eot_token_id": 3})
    first = load_model(str(path), dtype=torch.float32, device="cpu", cache=tmp_path / "cache")
    assert first.eos_token_ids == {2, 3}
    monkeypatch.setattr(convert, "convert", None)  # a second conversion would fail
    moved = path.rename(tmp_path / "moved.gguf")
    again = load_model(str(moved), dtype=torch.float32, device="cpu", cache=tmp_path / "cache")
    assert again.fingerprint == first.fingerprint
    assert torch.equal(again.decoder.layers[1].qkv, first.decoder.layers[1].qkv)


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "aspire-llm" / "models"


def tokenizer_of(path: Path, tmp_path: Path) -> Any:
    return load_model(str(path), dtype=torch.float32, device="cpu", cache=tmp_path / "cache").tokenizer


def test_tokenizer(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_gguf(tmp_path / "m.gguf"), tmp_path)
    text = "hello  12 a\n<tool>é漢<|eos|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    pieces = [TOKENS[i] for i in ids]
    assert pieces[:8] == ["hell", "o", "Ġ", "Ġ", "1", "2", "Ġa", "Ċ"]  # smollm: one digit at a time
    assert "<tool>" in pieces  # user-defined tokens are found in text
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith("<tool>é漢")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "hi!"


def test_tokenizer_splits_as_the_file_says(tmp_path: Path) -> None:
    def pieces(text: str, **options: Any) -> list[str]:
        path = write_gguf(tmp_path / "m.gguf", **options)
        return [TOKENS[i] for i in tokenizer_of(path, tmp_path).encode(text)]

    assert pieces("12", pre="gpt-2") == ["12"]
    assert pieces("12", pre="llama-bpe") == ["<|bos|>", "12"]
    assert pieces("12", pre="llama-bpe", metadata={"tokenizer.ggml.add_bos_token": False}) == ["12"]
    assert pieces("12", arch="qwen2", pre="qwen2") == ["1", "2"]
    assert pieces("12", pre="smollm", metadata={"tokenizer.ggml.add_bos_token": True}) == ["<|bos|>", "1", "2"]


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<tool>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    path = write_gguf(tmp_path / "m.gguf", tokens=tokens, pre=None, metadata={"tokenizer.ggml.model": "llama"})
    tokenizer = tokenizer_of(path, tmp_path)
    ids = tokenizer.encode("ab aé")
    assert [tokens[i] for i in ids] == ["<s>", "▁ab", "▁a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "ab aé"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]


@pytest.mark.parametrize("scaling", ["linear", "yarn", "llama3"])
def test_rope_scaling_survives(scaling: str, tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"llama.context_length": 65536, "llama.rope.freq_base": 500000.0}
    rope = {"rope_type": scaling, "rope_theta": 500000.0, "factor": 8.0}
    tensors: dict[str, np.ndarray | None] = {}
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    else:
        metadata |= {"llama.rope.scaling.type": scaling, "llama.rope.scaling.factor": 8.0}
    if scaling == "yarn":
        metadata["llama.rope.scaling.original_context_length"] = 8192
        rope["original_max_position_embeddings"] = 8192
    expected_config = LlamaConfig(head_dim=HEAD, max_position_embeddings=65536, rope_parameters=rope)
    expected, factor = ROPE_INIT_FUNCTIONS[scaling](expected_config, torch.device("cpu"))
    if scaling == "llama3":
        plain = 1 / 500000.0 ** (torch.arange(0, HEAD, 2) / HEAD)
        tensors["rope_freqs.weight"] = (plain / expected).numpy().astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata, tensors=tensors)
    config = load_model(str(path), dtype=torch.float32, device="cpu", cache=tmp_path / "cache").config
    torch.testing.assert_close(torch.tensor(config.rope_inv_freq), expected)
    assert config.rope_attention_factor == factor


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arch": "gemma2"}, ("'gemma2'", "supported: Llama")),
        ({"metadata": {"llama.expert_count": 8}}, ("mixture of experts", "supported: Llama")),
        ({"metadata": {"llama.block_count": None}}, ("llama.block_count is None",)),
        ({"metadata": {"llama.block_count": "two"}}, ("llama.block_count is 'two'",)),
        ({"metadata": {"llama.attention.head_count": 0}}, ("llama.attention.head_count is 0",)),
        ({"metadata": {"llama.block_count": 3}}, ("lacks the tensor blk.2.",)),
        ({"metadata": {"llama.rope.dimension_count": 16}}, ("rope.dimension_count=16",)),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, ("'longrope'",)),
        ({"metadata": {"llama.feed_forward_length": 95}}, ("ffn_gate.weight has shape (96, 64), expected (95, 64)",)),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, ("'bert'",)),
        ({"pre": "tekken"}, ("'tekken'", "supported: gpt-2")),
        ({"tensors": {"blk.0.attn_q.bias": np.zeros(128, np.float32)}}, ("blk.0.attn_q.bias has no place",)),
        ({"tensors": {"token_embd.weight": None}}, ("token_embd.weight",)),
        ({"tensors": {"rope_freqs.weight": np.arange(1, 17, dtype=np.float32)}}, ("rope_freqs.weight",)),
    ],
)
def test_files_that_cannot_be_run_are_refused(options: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    refused(write_gguf(tmp_path / "m.gguf", **options), tmp_path / "cache", *words)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for keep in (0, 3, 4, 20, 24, 30, 200, 1000, 5000, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:keep])
        refused(cut, tmp_path / "cache", "not a whole GGUF file")


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_headers_never_crash_or_hang(data: st.DataObject, header: bytes, tmp_path_factory: Any) -> None:
    """Eight bytes anywhere overwritten: the file is read, or refused with one line."""
    damaged = bytearray(header)
    at = data.draw(st.integers(4, 9000))
    damaged[at : at + 8] = data.draw(st.sampled_from([b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 1 << 40)]))
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    path.write_bytes(damaged)
    try:
        read_gguf(path)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_not_gguf_and_wrong_version(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK" + bytes(100))
    refused(path, tmp_path / "cache", "does not begin with GGUF")
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(100))
    refused(path, tmp_path / "cache", "version 1", "2 and 3")


def test_wrong_hash_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(UserError, match=r"has sha256 .*, expected 00ff"):
        converted_folder(path, "00ff", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_conversion_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write_gguf(tmp_path / "m.gguf"), tmp_path / "cache"
    real = convert._save_shards

    def killed(tensors: Any, folder: Path) -> None:
        (folder / "model-00001.safetensors").write_bytes(b"half")
        assert folder.parent == cache
        assert folder.name.startswith(convert.UNFINISHED)
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_save_shards", killed)
    with pytest.raises(KeyboardInterrupt):
        converted_folder(path, cache=cache)
    assert list(cache.iterdir()) == []

    # What a kill leaves is never taken for a conversion, and is cleared away once it is old.
    old, fresh = cache / f"{convert.UNFINISHED}old", cache / f"{convert.UNFINISHED}fresh"
    for left in (old, fresh):
        left.mkdir()
    os.utime(old, (time.time() - 2 * convert.ABANDONED_AFTER,) * 2)
    monkeypatch.setattr(convert, "_save_shards", real)
    folder = converted_folder(path, cache=cache)
    assert sorted(p.name for p in cache.iterdir()) == sorted([fresh.name, folder.name])


def test_another_process_may_finish_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write_gguf(tmp_path / "m.gguf"), tmp_path / "cache"
    folder = converted_folder(path, cache=tmp_path / "other")
    real = convert.convert

    def slow(source: Path, unfinished: Path) -> None:
        real(source, unfinished)
        (tmp_path / "other" / folder.name).rename(cache / folder.name)

    monkeypatch.setattr(convert, "convert", slow)
    assert converted_folder(path, cache=cache) == cache / folder.name
    assert [p.name for p in cache.iterdir()] == [folder.name]


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the converted model.*XDG_CACHE_HOME"):
        converted_folder(path, cache=tmp_path / "file" / "cache")


def test_large_models_are_saved_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    one = load_model(str(converted_folder(path, cache=tmp_path / "one")), dtype=torch.float32, device="cpu")
    monkeypatch.setattr(convert, "SHARD_BYTES", 40_000)
    folder = converted_folder(path, cache=tmp_path / "many")
    files = weight_files(folder)
    assert len(files) > 2
    with safe_open(files[0], framework="pt") as file:
        assert all(file.get_tensor(name).dtype == torch.bfloat16 for name in file.keys())  # noqa: SIM118
    many = load_model(str(folder), dtype=torch.float32, device="cpu")
    for name, view in many.decoder.checkpoint_views().items():
        assert torch.equal(view, one.decoder.checkpoint_views()[name])
