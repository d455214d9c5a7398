"""The kernels' figures as a table."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table


def kernels_table(report: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("kernel", overflow="fold")
    for column in ("time, µs", "95 %", "GB/s", "floor, µs", "bound", "of the\nroofline"):
        table.add_column(column, justify="right", no_wrap=True)
    group = None
    for kernel in report["kernels"]:
        if kernel["group"] != group:
            group = kernel["group"]
            table.add_row(f"[bold]{group}")
        interval = kernel["seconds_interval"]
        mark = "*" if kernel["in_cache"] else "†" if kernel["host_in_time"] else ""
        table.add_row(
            kernel["name"],
            f"{kernel['seconds'] * 1e6:.1f}",
            f"{interval[0] * 1e6:.1f}-{interval[1] * 1e6:.1f}" if interval is not None else "-",
            f"{kernel['bytes'] / kernel['seconds'] / 1e9:.3g}",
            f"{kernel['floor_seconds'] * 1e6:.1f}",
            kernel["bound"],
            f"{kernel['share_of_roofline']:.0%}{mark}",
        )
    return table


def kernels_notes(report: dict[str, Any]) -> list[str]:
    """What a reader must know to read the table."""
    notes = [
        f"Roofline: {report['read_bytes_per_s'] / 1e9:.0f} GB/s of reads (a large sum), "
        f"{report['flops_per_s'] / 1e12:.3g} TFLOP/s (a large product in {report['shape']['dtype']}), measured in this run; "
        f"medians of {report['repeats']} repeats with 95 % bootstrap intervals."
    ]
    if any(kernel["in_cache"] for kernel in report["kernels"]):
        notes.append(
            f"* All its bytes fit in the device's cache of {report['cache_bytes'] / 2**20:.0f} MiB: memory is no floor for it."
        )
    if any(kernel["host_in_time"] and not kernel["in_cache"] for kernel in report["kernels"]):
        notes.append("† The host takes part in every call; its time is included.")
    errors = report["relative_errors"]
    if isinstance(errors, dict):
        worst = max(errors.values())
        notes.append(
            f"Largest relative error against plain float32 attention on random rows of every kind: {worst:.2g}."
        )
    else:
        notes.append(f"NOT CHECKED against plain attention: {errors}")
    notes += [f"FAILED: {failure['name']}: {failure['error']}" for failure in report["failed"]]
    return notes
