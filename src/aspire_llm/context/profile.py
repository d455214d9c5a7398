"""Profiles: the drafting context that was measured to be best for one model, kept in files.

`aspire-llm profile` writes them: JSON, `NAME.profile.json`, with the fields of `Profile`. Engines find by themselves the one
that was kept for their model (`kept_profile`), else the one that the package ships for it. Needs no torch.
"""

from __future__ import annotations

import json
import os
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aspire_llm.errors import UserError, explain

FORMAT: Literal["aspire-llm profile"] = "aspire-llm profile"
VERSION = 1  # raised when the meaning of a field changes
ENDING = ".profile.json"
NO_PROFILE = "none"

Layer = Annotated[int, Field(ge=0)]


class Profile(BaseModel):
    """The drafting context of one model.

    fingerprint: `LoadedModel.fingerprint` of the model it was measured on; it is of no use with another. refresh_layers:
    counted from 0. budget: positions of the context set. verified_share: share of the budget that comes from the last
    verification; the rest is renewed by the refresh layers. measured: how, and the numbers of every candidate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["aspire-llm profile"] = FORMAT
    version: int = VERSION
    model: str
    fingerprint: Annotated[str, Field(min_length=1)]
    refresh_layers: Annotated[tuple[Layer, ...], Field(min_length=1)]
    budget: Annotated[int, Field(ge=1)]
    verified_share: Annotated[float, Field(ge=0.0, le=1.0)]
    measured: dict[str, Any]


def profile_folder() -> Path:
    """Where profiles are kept: $XDG_DATA_HOME/aspire-llm/profiles, by default under ~/.local/share."""
    root = os.environ.get("XDG_DATA_HOME")
    return (Path(root) if root else Path.home() / ".local" / "share") / "aspire-llm" / "profiles"


def kept_profile(fingerprint: str) -> Path:
    """The file in which the profile of that model is kept, if there is one."""
    return profile_folder() / f"{fingerprint}{ENDING}"


def find_profile(option: str | None, fingerprint: str) -> Profile | None:
    """The profile of a model, by the engine option `profile`: None, the kept one, else the shipped one, if there is any;
    "none", no profile; else the file of that name.

    Raises UserError where a file cannot be read, is damaged, of another version, or of another model.
    """
    if option == NO_PROFILE:
        return None
    if option is not None:
        return read_profile(Path(option), fingerprint)
    kept = kept_profile(fingerprint)
    if kept.is_file():
        return read_profile(kept, fingerprint)
    return next((p for p in map(read_profile, shipped_profiles()) if p.fingerprint == fingerprint), None)


def shipped_profiles() -> list[Traversable]:
    folder = resources.files("aspire_llm").joinpath("data", "profiles")
    return sorted((file for file in folder.iterdir() if file.name.endswith(ENDING)), key=lambda file: file.name)


def read_profile(path: Path | Traversable, fingerprint: str | None = None) -> Profile:
    """The profile in a file. fingerprint: of the model it is meant for. Raises UserError naming the file and its fault."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not there, not UTF-8, not JSON
        reason = error.strerror if isinstance(error, OSError) else f"it is not JSON ({error})"
        raise _refused(path, f"cannot be read: {reason}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _refused(path, f'is not a profile: it must be a JSON object with "format": "{FORMAT}"')
    if value.get("version") != VERSION:
        raise _refused(path, f"has version {value.get('version')!r}; version {VERSION} is what this aspire-llm reads")
    missing = Profile.model_fields.keys() - value.keys()
    if missing:
        raise _refused(path, f"is damaged: it lacks {', '.join(sorted(missing))}")
    try:
        profile = Profile(**value)
    except ValidationError as error:
        raise _refused(path, f"is damaged: {explain(error, Profile)}") from None
    if fingerprint is not None and profile.fingerprint != fingerprint:
        raise _refused(
            path,
            f"belongs to another model ({profile.model}, fingerprint {profile.fingerprint}; this one has {fingerprint}); "
            "measure one with `aspire-llm profile`, or use profile 'none'",
        )
    return profile


def _refused(path: Path | Traversable, fault: str) -> UserError:
    return UserError(f"profile {str(path)!r} {fault}", "profile")
