"""An output file that appears whole or not at all."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aspire_llm.errors import UserError


class OutputFile:
    """`with OutputFile(path, "--json") as out: …; out.write_json(value)`.

    Entering finds out whether the path can be written, before any work is done; the file is written beside it and renamed
    at the end. An exception inside leaves nothing behind, and an existing file as it was. With path None it does nothing.
    Devices (/dev/stdout) are written directly. Raises UserError naming the option and the path.
    """

    def __init__(self, path: str | None, option: str) -> None:
        self._path = Path(path) if path is not None else None
        self._option = option
        self._unfinished: Path | None = None

    def __enter__(self) -> Self:
        if self._path is None:
            return self
        if self._path.is_dir():
            raise UserError(f"{self._option} {self._path}: is a folder; a file name is needed")
        if self._path.exists() and not self._path.is_file():  # a device or pipe
            return self
        if self._path.exists() and not os.access(self._path, os.W_OK):
            raise UserError(f"{self._option} {self._path}: cannot be written: Permission denied")
        try:
            handle, name = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)
        except OSError as error:
            raise UserError(f"{self._option} {self._path}: cannot be written: {error.strerror}") from None
        os.close(handle)
        self._unfinished = Path(name)
        return self

    def write_json(self, value: Any) -> None:
        """Indented, lists of numbers and texts on one line each. Numbers that JSON does not have (the log-probability of a
        banned token is -inf) become null."""
        self.write(_indented(_finite(value)) + "\n")

    def write(self, text: str) -> None:
        self.write_bytes(text.encode("utf-8"))

    def write_bytes(self, data: bytes) -> None:
        if self._path is None:
            return
        try:
            if self._unfinished is None:
                self._path.write_bytes(data)
                return
            self._unfinished.write_bytes(data)
            self._unfinished.chmod(0o666 & ~_umask())
            self._unfinished.replace(self._path)
        except OSError as error:
            raise UserError(f"{self._option} {self._path}: cannot be written: {error.strerror}") from None
        self._unfinished = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unfinished is not None:
            self._unfinished.unlink(missing_ok=True)


def _indented(value: Any, indent: str = "") -> str:
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = [
            f"{inner}{json.dumps(str(key), ensure_ascii=False)}: {_indented(v, inner)}" for key, v in value.items()
        ]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(inner + _indented(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
