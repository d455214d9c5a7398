"""`bench kernels`: what it counts, how it holds kernels to the roofline, and that its driver runs the Triton kernels right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aspire_llm.bench.kernels import GROUPS, KernelRun, run_kernels
from aspire_llm.bench.kernels_attention import attention_case
from aspire_llm.bench.kernels_batch import TAIL, Rows, make_pool
from aspire_llm.bench.kernels_check import check, same_bits
from aspire_llm.bench.kernels_report import kernels_notes, kernels_table
from aspire_llm.bench.kernels_shape import find_shape
from aspire_llm.bench.kernels_timing import Case, timings
from aspire_llm.cli import main
from aspire_llm.errors import UserError
from aspire_llm.request import RowKind

CPU = torch.device("cpu")
TINY = find_shape("tiny", torch.float32)
KV = 2 * TINY.num_kv_heads * TINY.head_dim * 4  # bytes of a position


def tiny_run(**changes: Any) -> KernelRun:
    settings: dict[str, Any] = {
        "backend": "reference",
        "shape_name": "tiny",
        "shape": TINY,
        "device": CPU,
        "cells": [(2, 64)],
        "budget": 16,
        "verify_tokens": (1, 3),
        "token_counts": (1, 4),
        "page_size": 16,
        "pool_layers": 2,
        "plan_layers": 2,
        "repeats": 3,
    }
    return KernelRun(**{**settings, **changes})


def test_bytes_and_flops_of_rows() -> None:
    verify, draft = Rows(RowKind.VERIFY, 3, 100, 5), Rows(RowKind.DRAFT, 2, 100, 1, 16)
    assert verify.kv_bytes(TINY) == 3 * 100 * KV
    assert draft.kv_bytes(TINY) == 2 * (16 + TAIL) * KV
    assert draft.kv_bytes(TINY, dense=True) == 2 * 100 * KV
    # two products of heads * D, two operations each; causally, the five tokens see 96 to 100 positions
    assert verify.flops(TINY) == 3 * sum(range(96, 101)) * 4 * TINY.num_heads * TINY.head_dim


def test_seconds_are_of_one_call() -> None:
    made: list[int] = []
    found = timings(Case("", "", 1, 0, lambda: made.append(1), calls=4), CPU, 5)
    assert len(found) == 5
    assert len(made) > 5  # so short a body is repeated
    assert all(0 < seconds < 0.01 for seconds in found)


def test_a_run_on_the_cpu() -> None:
    report = run_kernels(tiny_run(), "the command", "2026-11-30")
    assert report["failed"] == []
    assert {kernel["group"] for kernel in report["kernels"]} == set(GROUPS)
    assert report["environment"]["command"] == "the command"
    assert max(report["relative_errors"].values()) < 1e-5
    bandwidth, rate = report["read_bytes_per_s"], report["flops_per_s"]
    assert report["read_bytes_per_s_interval"][0] <= bandwidth <= report["read_bytes_per_s_interval"][1]
    for kernel in report["kernels"]:
        low, high = kernel["seconds_interval"]
        assert 0 < low <= kernel["seconds"] <= high
        assert kernel["floor_seconds"] == pytest.approx(max(kernel["bytes"] / bandwidth, kernel["flops"] / rate))
        assert kernel["share_of_roofline"] == pytest.approx(kernel["floor_seconds"] / kernel["seconds"])
        assert kernel["bound"] == ("memory" if kernel["bytes"] / bandwidth >= kernel["flops"] / rate else "compute")
    by_name = {kernel["name"]: kernel for kernel in report["kernels"]}
    queries = 2 * 3 * TINY.num_heads * TINY.head_dim * 4
    assert by_name["2x64 verify 3"]["bytes"] == 2 * 64 * KV + 2 * queries
    assert by_name["qkv 128x64, 4 tokens"]["bytes"] == 4 * (128 * 64 + 4 * 64 + 4 * 128)
    assert by_name["qkv 128x64, 4 tokens"]["flops"] == 2 * 4 * 128 * 64
    assert kernels_table(report).row_count == len(report["kernels"]) + len(GROUPS)


def test_a_kernel_that_fails_is_reported_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Case:
        raise RuntimeError("no room\nat all")

    monkeypatch.setattr("aspire_llm.bench.kernels.store_case", broken)
    report = run_kernels(tiny_run(groups=("store", "plan")), "", "")
    assert report["failed"] == [{"name": "store 6 tokens", "error": "RuntimeError: no room at all"}]
    assert [kernel["group"] for kernel in report["kernels"]] == ["plan"]
    assert any("FAILED: store 6 tokens" in note for note in kernels_notes(report))


@pytest.mark.kernel
def test_the_driver_runs_the_triton_kernels() -> None:
    groups = ("attention", "selection", "element-wise")
    run = tiny_run(
        backend="triton",
        groups=groups,
        cells=[(1, 48)],
        pool_layers=1,
        repeats=1,
        verify_tokens=(2,),
        token_counts=(2,),
    )
    report = run_kernels(run, "", "")
    assert report["failed"] == []
    assert {kernel["group"] for kernel in report["kernels"]} == set(groups)
    assert max(report["relative_errors"].values()) < 1e-3  # probabilities are kept in float16
    assert report["kernels"][0]["seconds_interval"] is None


@pytest.mark.kernel
def test_checks_notice_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from aspire_llm.attention.triton.backend import TritonBackend

    pool = make_pool(TINY, 2, 2, 16, CPU)
    attend = TritonBackend.attend

    def off_by_a_head(self: TritonBackend, plan: Any, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        attend(self, plan, layer, q.roll(1, dims=1), out)

    monkeypatch.setattr(TritonBackend, "attend", off_by_a_head)
    assert check("triton", TINY, pool, [Rows(RowKind.VERIFY, 1, 32)])["layer 0"] > 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the interpreter's products know no fixed order")
def test_deterministic_kernels_have_the_same_bits() -> None:
    shape = find_shape("smollm2-135m", torch.bfloat16)
    assert same_bits(shape, make_pool(shape, 1, 3 * 141, 64, torch.device("cuda")))


def test_the_reference_attends_every_layer() -> None:
    pool = make_pool(TINY, 3, 8, 16, CPU)
    seen: list[int] = []
    case = attention_case(
        "", "reference", TINY, pool, [Rows(RowKind.VERIFY, 2, 64, 2)], after=lambda plan, layer: seen.append(layer)
    )
    case.body()
    assert seen == [0, 1, 2]
    assert case.calls == 3


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels.json"
    options = ["--shape", "tiny", "--cells", "2x64", "--budget", "16", "--verify-tokens", "1,2", "--tokens", "1"]
    command = ["bench", "kernels", "--device", "cpu", *options, "--block-size", "16", "--repeats", "2"]
    assert main([*command, "--groups", "attention,store", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["kind"] == "kernels"
    assert report["shape"]["name"] == "tiny"
    assert report["cells"] == ["2x64"]
    assert [kernel["name"] for kernel in report["kernels"]] == [
        *("2x64 verify 1", "2x64 verify 2", "2x64 draft 16", "2x64 prefill 64", "store 4 tokens"),
    ]
    for kernel in report["kernels"]:
        assert kernel["name"] in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shape", "gpt-9"], ("gpt-9", "qwen3-8b")),
        (["--device", "tpu"], ("tpu", "cpu")),
        (["--dtype", "int8"], ("int8", "float32")),
        (["--backend", "flash"], ("flash", "triton")),
        (["--cells", "12"], ("12", "NxM")),
        (["--cells", ","], ("--cells",)),
        (["--budget", "60"], ("--budget", "60", "32")),
        (["--verify-tokens", "65"], ("65", "64")),
        (["--verify-tokens", "0"], ("--verify-tokens", "0")),
        (["--groups", "attention,magic"], ("magic", "sampler")),
        (["--repeats", "0"], ("--repeats", "0")),
        (["--tokens", "x"], ("--tokens", "x")),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_options(capsys: pytest.CaptureFixture[str], options: list[str], words: tuple[str, ...]) -> None:
    small = ["--shape", "tiny", "--cells", "1x64", "--budget", "16", "--verify-tokens", "1"]
    kept = [
        word
        for name, value in zip(small[::2], small[1::2], strict=True)
        if name not in options
        for word in (name, value)
    ]
    assert main(["bench", "kernels", *kept, *options]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UserError, match="magic"):
        attention_case("", "magic", TINY, make_pool(TINY, 1, 4, 16, CPU), [Rows(RowKind.VERIFY, 1, 32)])  # type: ignore[arg-type]
