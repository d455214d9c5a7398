"""Finished parts of a long measurement, in a file, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from aspire_llm.errors import UserError


class SavedWork:
    """A JSON file of finished parts by name, written whole after each part. `settings` say what they are parts of: a file
    that holds other settings, or is damaged, counts for nothing and is overwritten. With path None nothing is kept."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path = path
        self._settings = settings
        self._parts: dict[str, Any] = {}
        if path is not None and path.is_file():
            self._parts = _parts(path, settings)
        self.found = tuple(self._parts)  # what an earlier run had finished

    def get(self, name: str) -> Any | None:
        return self._parts.get(name)

    def put(self, name: str, value: Any) -> None:
        """Raises UserError where the file cannot be written."""
        self._parts[name] = value
        if self._path is None:
            return
        unfinished = self._path.with_name(self._path.name + ".unfinished")
        try:
            unfinished.write_text(json.dumps({"settings": self._settings, "parts": self._parts}), encoding="utf-8")
            os.replace(unfinished, self._path)
        except OSError as error:
            raise UserError(f"unfinished work cannot be kept in {self._path}: {error.strerror}") from None

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _parts(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        same = value["settings"] == json.loads(json.dumps(settings))
        return dict(value["parts"]) if same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
