"""Sections of `bench kernels` results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aspire_llm.bench.report.charts import NARROW, Bar, bars
from aspire_llm.bench.report.parts import Picture, Section, Table, number
from aspire_llm.bench.report.svg import Drawing, Scale, axes, log_ticks

Kernels = Sequence[Mapping[str, Any]]


def kernels_section(data: Mapping[str, Any]) -> Section:
    kernels: Kernels = data["kernels"]
    shape = data.get("shape") or {}
    pictures = [shares(group, kernels) for group in dict.fromkeys(kernel["group"] for kernel in kernels)]
    classic = roofline(data)
    notes = [
        f"Read bandwidth of the device: {data['read_bytes_per_s'] / 1e9:.0f} GB/s"
        + (f"; products: {data['flops_per_s'] / 1e12:.3g} TFLOP/s" if data.get("flops_per_s") else "")
        + ". A floor is the longer of bytes over the one and operations over the other."
    ]
    errors = data.get("relative_errors")
    if isinstance(errors, Mapping) and errors:
        notes.append(f"Largest relative error against plain float32 attention: {max(errors.values()):.2g}.")
    elif errors:
        notes.append(f"NOT CHECKED against plain attention: {errors}")
    notes += [f"FAILED: {failure['name']}: {failure['error']}" for failure in data.get("failed") or []]
    if any(kernel.get("in_cache") for kernel in kernels):
        notes.append("* All bytes fit in the device's cache: memory is no floor there, and a share may pass 100 %.")
    if any(kernel.get("host_in_time") for kernel in kernels):
        notes.append("† The host takes part in every call; its time is included.")
    if data.get("note"):
        notes.append(str(data["note"]))
    name = " · ".join(str(part) for part in (shape.get("name"), data.get("backend"), data.get("device")) if part)
    return Section(
        f"Kernels: {name}", False, notes, [kernel_table(kernels)], ([classic] if classic is not None else []) + pictures
    )


def named(kernel: Mapping[str, Any]) -> str:
    return str(kernel["name"]) + (" *" if kernel.get("in_cache") else "") + (" †" if kernel.get("host_in_time") else "")


def kernel_table(kernels: Kernels) -> Table:
    rows = []
    for kernel in kernels:
        seconds, interval = kernel.get("seconds"), kernel.get("seconds_interval")
        rows.append(
            [
                named(kernel),
                str(kernel["group"]),
                number(seconds * 1e6 if seconds else None, ".1f"),
                f"{interval[0] * 1e6:.1f}-{interval[1] * 1e6:.1f}" if interval else "-",
                number(_bandwidth(kernel) / 1e9, ".4g"),
                number(kernel["floor_seconds"] * 1e6 if kernel.get("floor_seconds") else None, ".1f"),
                str(kernel.get("bound", "-")),
                number(kernel["share_of_roofline"], ".0%"),
            ]
        )
    columns = ("kernel", "group", "time, µs", "95 %", "GB/s", "floor, µs", "bound", "of the roofline")
    return Table("Kernels", columns, rows)


def _bandwidth(kernel: Mapping[str, Any]) -> float:
    return float(kernel["bytes_per_s"]) if kernel.get("bytes_per_s") else kernel["bytes"] / kernel["seconds"]


def shares(group: str, kernels: Kernels) -> Picture:
    chosen = [kernel for kernel in kernels if kernel["group"] == group]
    shown = [
        Bar(
            named(kernel),
            float(kernel["share_of_roofline"]),
            kernel.get("share_interval"),
            "bar soft" if kernel.get("in_cache") or kernel.get("host_in_time") else "bar",
            f"{kernel['share_of_roofline']:.0%}",
        )
        for kernel in chosen
    ]
    most = min(1.5, max([1.0, *(bar.value for bar in shown)]) * 1.1)
    return Picture(
        f"Share of the roofline: {group}",
        "Share of the roofline that each kernel reaches: "
        + "; ".join(f"{bar.name} {bar.shown}" for bar in shown)
        + ".",
        bars(shown, mark=1.0, most=most),
    )


def roofline(data: Mapping[str, Any]) -> Picture | None:
    """Operations a second against operations a byte, on logarithmic scales."""
    bandwidth, rate = data["read_bytes_per_s"], data.get("flops_per_s")
    points = [
        (kernel["flops"] / kernel["bytes"], kernel["flops"] / kernel["seconds"], kernel)
        for kernel in data["kernels"]
        if kernel.get("flops") and kernel.get("seconds")
    ]
    if not points or not rate:
        return None
    ridge = rate / bandwidth
    low = min([ridge, *(x for x, _, _ in points)]) / 2
    high = max([ridge, *(x for x, _, _ in points)]) * 4
    bottom, top = min([bandwidth * low, *(y for _, y, _ in points)]) / 2, max([rate, *(y for _, y, _ in points)]) * 2

    def draw(width: float) -> Drawing:
        drawing = Drawing(width, 320.0 if width >= NARROW else 290.0)
        x = Scale(low, high, 50.0, width - 14, log=True)
        y = Scale(bottom, top, drawing.height - 44, 30.0, log=True)
        axes(drawing, x, y, log_ticks(low, high), log_ticks(bottom, top), "operations a byte", "operations a second")
        drawing.path([(x(low), y(bandwidth * low)), (x(ridge), y(rate)), (x(high), y(rate))], "roof")
        for px, py, kernel in points:
            style = "dot soft" if kernel.get("in_cache") else "dot"
            drawing.dot(x(px), y(py), 3.5, style, f"{named(kernel)}: {kernel['share_of_roofline']:.0%} of the roofline")
        return drawing

    best = max((kernel for _, _, kernel in points), key=lambda kernel: float(kernel["share_of_roofline"]))
    return Picture(
        "Roofline: attention and products",
        f"{len(points)} kernels under the roof of {bandwidth / 1e9:.0f} GB/s and {rate / 1e12:.3g} TFLOP/s; nearest: "
        f"{named(best)} at {best['share_of_roofline']:.0%}.",
        draw,
    )
