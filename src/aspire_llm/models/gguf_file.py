"""GGUF files read with every bound checked: a truncated or corrupt file is a UserError, never a hang or a crash.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aspire_llm.errors import UserError

Scalar = int | float | bool | str
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # struct codes
STRING, ARRAY = 8, 9
CHUNK = 1 << 22  # elements dequantised at a time: bounds the float32 copy


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # as torch has it: rows first
    quantization: gguf.GGMLQuantizationType
    start: int  # byte in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Scalar]
    array_starts: dict[str, int]  # byte in the file
    tensors: dict[str, GGUFTensor]

    def array(self, key: str) -> list[Scalar]:
        """The array stored under `key`; empty where there is none."""
        if key not in self.array_starts:
            return []
        cursor = _Cursor(self.path, self.array_starts[key])
        return list(cursor.array())

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The dequantised tensor `name`."""
        tensor = self.tensors[name]
        row_bytes = tensor.num_bytes // math.prod(tensor.shape[:-1])
        raw: NDArray[np.uint8] = np.memmap(
            self.path, np.uint8, mode="r", offset=tensor.start, shape=(tensor.num_bytes // row_bytes, row_bytes)
        )
        out = torch.empty((raw.shape[0], tensor.shape[-1]), dtype=dtype)
        step = max(1, CHUNK // tensor.shape[-1])
        for row in range(0, raw.shape[0], step):
            part = np.array(raw[row : row + step])
            try:
                values = gguf.dequantize(part, tensor.quantization)
            except NotImplementedError as error:  # gguf's word for a quantisation it cannot read
                raise UserError(
                    f"{self.path}: tensor {name} is quantised as {tensor.quantization.name}, which cannot be dequantised"
                ) from error
            out[row : row + step] = torch.from_numpy(values.astype(np.float32, copy=False))
        return out.view(tensor.shape)


class _Cursor:
    """Reads little-endian values from the head of a file; past its end is an error."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.position = position

    def fail(self, reason: str) -> UserError:
        return UserError(f"{self.path} is not a whole GGUF file: {reason} (truncated or corrupt?)")

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.position:
            raise self.fail(f"it ends at byte {len(self.data)}, within its header")
        self.position += count
        return self.data[self.position - count : self.position]

    def scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]
        return value

    def number(self, code: str) -> int:
        return int(self.scalar(code))

    def string(self) -> str:
        data = self.take(self.number("Q"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.fail("a name is not UTF-8") from error

    def array(self) -> Iterator[Scalar]:
        kind, length = self.number("I"), self.number("Q")
        if kind in SCALARS:
            yield from (value for (value,) in struct.iter_unpack("<" + SCALARS[kind], self.array_bytes(kind, length)))
        elif kind == STRING:
            for _ in range(length):
                yield self.string()
        else:
            raise self.fail(f"unknown array type {kind}")

    def array_bytes(self, kind: int, length: int) -> bytes:
        return self.take(length * struct.calcsize(SCALARS[kind]))

    def skip_array(self) -> None:
        kind, length = self.number("I"), self.number("Q")
        if kind in SCALARS:
            self.array_bytes(kind, length)
        elif kind == STRING:
            for _ in range(length):
                self.take(self.number("Q"))
        else:
            raise self.fail(f"unknown array type {kind}")


def read_gguf(path: Path) -> GGUFFile:
    """The header of a GGUF file, after checking that every tensor lies within the file."""
    if path.stat().st_size < 24:
        raise UserError(f"{path} is not a whole GGUF file: it has only {path.stat().st_size} bytes")
    cursor = _Cursor(path)
    if cursor.take(4) != b"GGUF":
        raise UserError(f"{path} is not a GGUF file: it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise UserError(f"{path} has GGUF version {version}; supported: 2 and 3, little-endian")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Scalar] = {}
    array_starts: dict[str, int] = {}
    for _ in range(num_keys):
        key, kind = cursor.string(), cursor.number("I")
        if kind == STRING:
            metadata[key] = cursor.string()
        elif kind == ARRAY:
            array_starts[key] = cursor.position
            cursor.skip_array()
        elif kind in SCALARS:
            metadata[key] = cursor.scalar(SCALARS[kind])
        else:
            raise cursor.fail(f"unknown type {kind} of key {key!r}")
    tensors = {tensor.name: tensor for tensor in _tensors(cursor, num_tensors, metadata)}
    if len(tensors) != num_tensors:
        raise cursor.fail("a tensor is named twice")
    return GGUFFile(path, metadata, array_starts, tensors)


def _tensors(cursor: _Cursor, count: int, metadata: dict[str, Scalar]) -> Iterator[GGUFTensor]:
    heads: list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]] = []
    for _ in range(count):
        name, num_dims = cursor.string(), cursor.number("I")
        if not 1 <= num_dims <= 4:
            raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(num_dims))[::-1]  # the file has the fastest first
        kind, offset = cursor.number("I"), cursor.number("Q")
        try:
            quantization = gguf.GGMLQuantizationType(kind)
        except ValueError as error:
            raise cursor.fail(f"tensor {name!r} has unknown type {kind}") from error
        heads.append((name, shape, quantization, offset))
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.fail(f"general.alignment is {alignment!r}")
    base = -(-cursor.position // alignment) * alignment
    for name, shape, quantization, offset in heads:
        block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
        if not all(shape) or shape[-1] % block:
            raise cursor.fail(f"tensor {name!r} of type {quantization.name} has shape {shape}")
        num_bytes = math.prod(shape) // block * block_bytes
        if base + offset + num_bytes > len(cursor.data):
            raise cursor.fail(f"tensor {name!r} ends at byte {base + offset + num_bytes} of {len(cursor.data)}")
        yield GGUFTensor(name, shape, quantization, base + offset, num_bytes)
