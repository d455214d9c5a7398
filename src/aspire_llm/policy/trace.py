"""Acceptance traces: what drafts a real model made from many positions of its own plain continuation, and how far they held.

Format: one .npz file per model and workload, with `shape` = [R requests, S starts, K draft positions], `first_start`,
`stride`, and for every context method METHOD, from output position first_start + stride · i of request r on:
- `METHOD/accepted` int8 [R, S]: length of the common prefix of the free-running draft and the plain continuation, at most K;
- `METHOD/confidence` uint8 [R, S, K]: the drafts' top-1 probabilities × 255;
- `METHOD/match` uint8 [R, S, ceil(K/8)] (numpy.packbits): draft equals plain token; meaningful to the first mismatch.
A stride of 1 records every position. Between recorded starts the nearest at or before the position stands in for it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

from aspire_llm.errors import UserError


@dataclass(frozen=True, slots=True)
class Draft:
    """A recorded free-running draft."""

    accepted: int  # drafts accepted before the first that is not
    confidences: tuple[float, ...]  # [K]


@dataclass(frozen=True, slots=True)
class Trace:
    """The drafts of one model, workload and context method."""

    name: str
    method: str
    first_start: int
    stride: int
    drafts: tuple[tuple[Draft, ...], ...]  # [R][S]

    @property
    def num_requests(self) -> int:
        return len(self.drafts)

    @property
    def max_draft(self) -> int:
        return len(self.drafts[0][0].confidences)

    @property
    def span(self) -> int:
        """Positions covered: the last start stands for `stride` of them."""
        return self.stride * len(self.drafts[0])

    def draft_at(self, request: int, offset: int) -> Draft:
        """The draft from `offset` positions after the first start, offset < span: nearest recorded start at or before."""
        return self.drafts[request][offset // self.stride]


def read_traces(path: str | Traversable, name: str | None = None) -> dict[str, Trace]:
    """All methods of a trace file, by method. `name`: of the trace, by default the file's without its ending."""
    source = Path(path) if isinstance(path, str) else path
    label = name or source.name.removesuffix(".npz")
    try:
        with source.open("rb") as handle, np.load(handle) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"trace {path}: cannot be read as .npz ({error})", "trace") from error
    try:
        requests, starts, positions = (int(n) for n in arrays["shape"])
        first, stride = int(arrays["first_start"]), int(arrays["stride"])
    except (KeyError, ValueError) as error:
        raise UserError(
            f"trace {path}: `shape` of three numbers, `first_start` and `stride` are needed", "trace"
        ) from error
    if min(requests, starts, positions, stride) < 1:
        raise UserError(f"trace {path}: empty, shape {(requests, starts, positions)}, stride {stride}", "trace")
    methods = sorted(key.removesuffix("/accepted") for key in arrays if key.endswith("/accepted"))
    if not methods:
        raise UserError(f"trace {path}: no METHOD/accepted in it", "trace")
    traces = {}
    for method in methods:
        accepted, confidence = arrays[f"{method}/accepted"], arrays.get(f"{method}/confidence")
        match = arrays.get(f"{method}/match")
        shape = (requests, starts, positions)
        if confidence is None or confidence.shape != shape or accepted.shape != shape[:2]:
            raise UserError(f"trace {path}: arrays of {method} do not have the shape {shape}", "trace")
        if match is None or match.shape != (requests, starts, -(-positions // 8)):
            raise UserError(f"trace {path}: match of {method} is missing or of another shape", "trace")
        match = np.unpackbits(match, axis=-1)[..., :positions]
        if not np.array_equal(np.cumprod(match, axis=-1).sum(axis=-1), accepted):
            raise UserError(f"trace {path}: match and accepted of {method} disagree", "trace")
        if int(accepted.min()) < 0 or int(accepted.max()) > positions:
            raise UserError(f"trace {path}: accepted of {method} must lie in 0..{positions}", "trace")
        rows = (confidence / 255.0).tolist()
        drafts = tuple(
            tuple(Draft(a, tuple(c)) for a, c in zip(of_request, row, strict=True))
            for of_request, row in zip(accepted.tolist(), rows, strict=True)
        )
        traces[method] = Trace(label, method, first, stride, drafts)
    return traces


def write_traces(
    path: str,
    first_start: int,
    stride: int,
    accepted: Mapping[str, np.ndarray],
    confidence: Mapping[str, np.ndarray],
    match: Mapping[str, np.ndarray],
) -> None:
    """Write a trace file. By method: accepted [R, S]; confidence [R, S, K] in 0..1; match bool [R, S, K]."""
    arrays: dict[str, Any] = {"first_start": np.int64(first_start), "stride": np.int64(stride)}
    for method, counts in accepted.items():
        arrays["shape"] = np.array(confidence[method].shape, dtype=np.int64)
        arrays[f"{method}/accepted"] = counts.astype(np.int8)
        arrays[f"{method}/confidence"] = np.rint(confidence[method] * 255.0).astype(np.uint8)
        arrays[f"{method}/match"] = np.packbits(match[method].astype(bool), axis=-1)
    with open(path, "wb") as handle:
        np.savez_compressed(handle, allow_pickle=False, **arrays)


def default_method(methods: Mapping[str, Trace]) -> str:
    """The project's own context method where a file has several: half verified, half refreshed by the one layer that the
    profile chose (`refreshed_N`), else by the penultimate, else the first by name."""
    profiled = sorted(m for m in methods if m.removeprefix("refreshed_").isdigit())
    return (profiled or [m for m in methods if m == "refreshed_penultimate"] or sorted(methods))[0]


def shipped_files() -> list[Traversable]:
    """The trace files in the package, by name."""
    files = resources.files("aspire_llm").joinpath("data/traces").iterdir()
    return sorted((file for file in files if file.name.endswith(".npz")), key=lambda file: file.name)


def shipped_traces(method: str | None = None) -> dict[str, Trace]:
    """The traces in the package, by file name; of `method`, by default `default_method`. See data/traces/README.md."""
    chosen = {}
    for file in shipped_files():
        methods = read_traces(file)
        wanted = method or default_method(methods)
        if wanted in methods:
            chosen[file.name.removesuffix(".npz")] = methods[wanted]
    if not chosen:
        raise UserError(f"method {method!r}: no shipped trace has it", "method")
    return chosen
