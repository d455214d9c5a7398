"""From a source to a decoder with its weights, tokenizer and configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aspire_llm.errors import UserError
from aspire_llm.models.config import DecoderConfig, check_architecture, decoder_config, token_ids
from aspire_llm.models.convert import converted_folder
from aspire_llm.models.decoder import Decoder
from aspire_llm.models.find import find_model
from aspire_llm.models.quiet import quiet_transformers

LoadFormat = Literal["auto", "dummy"]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of which a tokenizer needs
SAVED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SAMPLE_BYTES, SAMPLES = 1 << 16, 8  # of each weight file, for the fingerprint
DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """All of a model but its weights."""

    tokenizer: (
        Any | None
    )  # transformers PreTrainedTokenizerBase; None only with dummy weights, where the folder has none
    config: DecoderConfig
    hf_config: Any  # transformers PreTrainedConfig
    eos_token_ids: frozenset[int]  # of the configuration and of the generation configuration
    source: str


@dataclass(frozen=True, slots=True)
class LoadedModel:
    decoder: Decoder
    config: DecoderConfig
    tokenizer: Any | None
    hf_config: Any
    eos_token_ids: frozenset[int]
    source: str
    fingerprint: str  # hex; the same for the same shape and weights, wherever they lie


def load_tokenizer(source: str, *, tokenizer: str | None = None, cache: Path | None = None) -> LoadedTokenizer:
    """Tokenizer and configuration of `source`, without its weights. Arguments and errors as `load_model`'s."""
    return _read_folder(_folder(source, cache, weights=False), tokenizer, tokenizer_required=True)


def load_model(
    source: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tokenizer: str | None = None,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    cache: Path | None = None,
) -> LoadedModel:
    """Load a model.

    source: a built-in name, a folder in Hugging Face format, a .gguf file, or a hub id.
    dtype: what the weights are held and computed in, whatever they are saved in.
    tokenizer: a folder or hub id to take the tokenizer from instead.
    load_format: "dummy" needs config.json only and draws random weights from `seed`.
    cache: where GGUF conversions are kept, instead of `convert.cache_folder()`.
    Raises UserError where the source is not found, incomplete, damaged, or of an architecture that is not supported.
    """
    if load_format not in ("auto", "dummy"):
        raise UserError(f"load_format={load_format!r} is unknown; allowed: auto, dummy", "load_format")
    dummy = load_format == "dummy"
    device = torch.device(device)
    folder = _folder(source, cache, weights=not dummy)
    parts = _read_folder(folder, tokenizer, tokenizer_required=not dummy)
    try:
        if dummy:
            decoder, identity = dummy_decoder(parts.config, dtype=dtype, device=device, seed=seed), f"dummy {seed}"
        else:
            files = weight_files(folder.path)
            decoder = Decoder(parts.config, dtype=dtype, device=device)
            load_weights(decoder, files)
            # a converted file is what the hash of its source says (the folder's name), whichever library wrote it
            identity = folder.path.name if folder.converted else _weights_identity(files)
    except torch.OutOfMemoryError as error:
        raise UserError(f"model {source} in {dtype} does not fit into the memory of {device}", "model") from error
    return LoadedModel(
        decoder=decoder,
        config=parts.config,
        tokenizer=parts.tokenizer,
        hf_config=parts.hf_config,
        eos_token_ids=parts.eos_token_ids,
        source=source,
        fingerprint=fingerprint(parts.config, identity),
    )


def dummy_decoder(config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Decoder:
    """A decoder of the given shape with random weights, drawn on the device; norms are 1."""
    decoder = Decoder(config, dtype=dtype, device=torch.device(device))
    generator = torch.Generator(device=decoder.device).manual_seed(seed)
    for name, view in decoder.checkpoint_views().items():
        if "norm" in name.split(".")[-2]:
            view.fill_(1.0)
        else:
            view.normal_(0.0, DUMMY_STD, generator=generator)
    return decoder


def load_weights(decoder: Decoder, files: list[Path]) -> None:
    """Copy safetensors files into the decoder's matrices, tensor by tensor. UserError unless they fit exactly."""
    views = decoder.checkpoint_views()
    missing = set(views)
    tied_head: Tensor | None = None
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    if name == "lm_head.weight" and decoder.config.tie_word_embeddings:
                        tied_head = file.get_tensor(name)  # some checkpoints save it twice
                    elif name in views:
                        _copy(views[name], file.get_tensor(name), name, path)
                        missing.discard(name)
                    elif not name.endswith("rotary_emb.inv_freq"):  # a buffer that old checkpoints saved
                        raise UserError(
                            f"{path}: tensor {name} has no place in a {decoder.config.architecture} decoder", "model"
                        )
        except FileNotFoundError as error:
            raise UserError(f"weight file {path} is missing", "model") from error
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path} is not a whole safetensors file: {error} (truncated or corrupt?)", "model"
            ) from error
    if missing:
        raise UserError(f"{files[0].parent} lacks the tensor {min(missing)} ({len(missing)} in all)", "model")
    if tied_head is not None and not torch.equal(tied_head.to(decoder.dtype), decoder.embedding.cpu()):
        raise UserError("config.json ties the head to the embedding, but lm_head.weight differs from it", "model")


def _copy(view: Tensor, tensor: Tensor, name: str, path: Path) -> None:
    if tensor.shape != view.shape:
        raise UserError(f"{path}: tensor {name} has shape {tuple(tensor.shape)}, expected {tuple(view.shape)}", "model")
    if tensor.dtype not in SAVED_DTYPES:
        raise UserError(
            f"{path}: tensor {name} is saved as {tensor.dtype}; supported: float32, float16, bfloat16", "model"
        )
    view.copy_(tensor)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those its index names, or the only one."""
    index = folder / INDEX
    if index.is_file():
        try:
            return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} is not a safetensors index: {error}", "model") from error
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    raise UserError(
        f"{folder} has neither {SINGLE} nor {INDEX} (found: {', '.join(found) or 'no safetensors'})", "model"
    )


def fingerprint(config: DecoderConfig, weights_identity: str) -> str:
    """A stable hash of a model's shape and weights, for files that belong to one model. Numbers count to five digits, so that
    it does not depend on how a machine rounds."""

    def written(value: object) -> str:
        if isinstance(value, tuple):
            return " ".join(written(part) for part in value)
        return f"{value:.5g}" if isinstance(value, float) else str(value)

    shape = {field.name: written(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return hashlib.sha256(json.dumps([shape, weights_identity], sort_keys=True).encode()).hexdigest()[:32]


def _weights_identity(files: list[Path]) -> str:
    """Names, sizes, headers and evenly spread samples: fine-tunings of one model differ, and no file is read whole."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(size * i // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Folder:
    """A model in Hugging Face format."""

    path: Path
    source: str
    converted: bool  # by us, from GGUF


def _folder(source: str, cache: Path | None, *, weights: bool) -> _Folder:
    location = find_model(source, weights=weights)
    if location.kind == "gguf":
        return _Folder(converted_folder(location.path, location.sha256, cache), source, converted=True)
    return _Folder(location.path, source, converted=False)


def _read_folder(model: _Folder, tokenizer: str | None, *, tokenizer_required: bool) -> LoadedTokenizer:
    from transformers import AutoConfig

    folder = model.path
    raw = _read_json(folder / "config.json")
    if "model_type" not in raw:
        raise UserError(f"{folder / 'config.json'} names no model_type", "model")
    check_architecture(raw["model_type"], raw.get("architectures"))
    try:
        with quiet_transformers():
            hf_config = AutoConfig.from_pretrained(str(folder))
    except Exception as error:  # transformers validates with whatever exception suits it
        raise UserError(f"{folder / 'config.json'} is not valid: {_first_line(error)}", "model") from error
    config = decoder_config(hf_config)
    generation = folder / "generation_config.json"
    eos = set(config.eos_token_ids)
    if generation.is_file():
        eos.update(token_ids(_read_json(generation).get("eos_token_id")))
    if tokenizer is not None:
        loaded = _load_tokenizer(_tokenizer_folder(tokenizer))
    elif tokenizer_required or any((folder / name).is_file() for name in VOCABULARIES):
        loaded = _load_tokenizer(folder, as_saved=model.converted)
    else:
        loaded = None
    if not eos and loaded is not None and loaded.eos_token_id is not None:
        eos.add(loaded.eos_token_id)
    return LoadedTokenizer(loaded, config, hf_config, frozenset(eos), model.source)


def _tokenizer_folder(source: str) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    location = find_model(source, weights=False)
    if location.kind == "gguf":
        raise UserError(f"tokenizer {source!r} must be a folder or a hub id", "tokenizer")
    return location.path


def _load_tokenizer(folder: Path, *, as_saved: bool = False) -> Any:
    """as_saved: take tokenizer.json as it is. AutoTokenizer rebuilds some families' by the model type, which is right for
    their hub repositories and wrong for our conversions."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not any((folder / name).is_file() for name in VOCABULARIES):  # transformers would make an empty tokenizer
        raise UserError(f"no usable tokenizer in {folder}: it has none of {', '.join(VOCABULARIES)}", "tokenizer")
    loader = PreTrainedTokenizerFast if as_saved else AutoTokenizer
    try:
        with quiet_transformers():
            return loader.from_pretrained(str(folder))
    except Exception as error:  # missing or damaged files surface as many kinds
        raise UserError(f"no usable tokenizer in {folder}: {_first_line(error)}", "tokenizer") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {_first_line(error)}", "model") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object", "model")
    return value


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
