"""Result files of before there was a `kind`: benchmarks/engine.py, benchmarks/kernels.py, benchmarks/table.py, and the first
`bench offline`; put into today's shapes. What they did not record stays away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aspire_llm.bench.report.parts import REPLAYED

PLAIN = "plain"
NO_ROOM = "(kernel)"  # rows without their combination's launch, which no engine runs


def is_legacy(data: Mapping[str, Any]) -> bool:
    return any(known in data for known in ("cells", "TB_s")) or ("methods" in data and "model" in data)


def in_todays_shape(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One result or several. Raises KeyError, TypeError, ValueError, … for files that only look like one."""
    if "TB_s" in data:
        yield old_kernels(data)
    elif "cells" in data:
        for name, methods in cells_of(data["cells"]):
            yield old_offline(name, methods, data.get("note"))
    else:
        yield {**data, "kind": "offline"}


def cells_of(cells: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, methods) of every cell, however deep: "64x8192", or shape, cell and kind of replay."""
    for name, value in cells.items():
        where = f"{path} {name}".strip()
        if "tokens_per_s" in value:  # plain.json: a cell is the method itself
            yield where, {PLAIN: value}
        elif any(isinstance(of, Mapping) and "tokens_per_s" in of for of in value.values()):
            yield where, {key: of for key, of in value.items() if isinstance(of, Mapping) and "tokens_per_s" in of}
        else:
            yield from cells_of(value, where)


def old_offline(cell: str, methods: Mapping[str, Any], note: str | None) -> dict[str, Any]:
    plain = _middle(methods[PLAIN]["tokens_per_s"]) if PLAIN in methods else None
    shown = {}
    for name, method in methods.items():
        speed = _middle(method["tokens_per_s"])
        speedup = method.get("speedup")
        # benchmarks/table.py: every method but plain decoding is replayed
        replayed = REPLAYED in name or (REPLAYED.upper() in (note or "") and name != PLAIN)
        shown[name] = {
            "replayed": replayed,
            "tokens_per_s": speed,
            "tokens_per_s_interval": _interval(method["tokens_per_s"]),
            "speedup": _middle(speedup) if speedup is not None else speed / plain if plain else None,
            "speedup_interval": _interval(speedup),
            "mean_accepted_length": _middle(method.get("mean_accepted_length")),
            "repeats": len(method["runs"]) if "runs" in method else 1,
        }
    return {
        "kind": "offline",
        "replayed": any(method["replayed"] for method in shown.values()),
        "model": cell,
        "methods": shown,
        "note": note,
    }


def _middle(value: Any) -> Any:
    return value["median"] if isinstance(value, Mapping) else value


def _interval(value: Any) -> Any:
    return value.get("interval") if isinstance(value, Mapping) else None


def old_kernels(data: Mapping[str, Any]) -> dict[str, Any]:
    """Bandwidths of attention, of the first version measured."""
    card = data["card_TB_s"] * 1e12
    rates = {
        f"{cell} {row}": rate * 1e12
        for cell, rows in next(iter(data["TB_s"].values())).items()
        for row, rate in rows.items()
        if NO_ROOM not in row
    }
    scored = {f"32x16384 {row}, scored": rate * 1e12 for row, rate in (data.get("scored_32x16384") or {}).items()}
    errors = next(iter(data["errors"].values()), None)
    return {
        "kind": "kernels",
        "backend": "triton",
        "device": "cuda",
        "shape": {"name": "32 query / 8 KV heads, D 128, bf16"},
        "read_bytes_per_s": card,
        "kernels": [
            {"name": name, "group": group, "bytes_per_s": rate, "share_of_roofline": rate / card, "bound": "memory"}
            for group, found in (("attention", rates), ("scores", scored))
            for name, rate in found.items()
        ],
        "relative_errors": errors,
        "note": "Measured by benchmarks/kernels.py: K and V alone count, and the bandwidth is that of another run.",
    }
