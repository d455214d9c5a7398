"""`bench report`: real results of every benchmark as one page, looked at in a browser; and files that are none."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aspire_llm.bench.report.page import html, markdown
from aspire_llm.bench.report.read import read_report
from aspire_llm.bench.report.svg import Scale, log_ticks, ticks
from aspire_llm.cli import main
from aspire_llm.errors import UserError
from bad_server import bad_server
from live_server import chromium
from saved_model import save_tiny_model

RECORDED = Path(__file__).parent.parent / "benchmarks" / "results"
KINDS = ("offline", "replayed", "accept", "accuracy", "serve", "kernels")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One file of each benchmark, made by the benchmark itself."""
    folder = tmp_path_factory.mktemp("results")
    model = ["--model", str(save_tiny_model(folder / "model"))]
    files = {kind: folder / f"{kind}.json" for kind in KINDS}

    def bench(kind: str, *options: str, command: str | None = None) -> None:
        assert main(["bench", command or kind, *options, "--json", str(files[kind])]) == 0

    small = ["--max-model-len", "512", "--block-size", "16", "--kv-cache-memory", "8M"]
    offline = [*small, "--no-calibrate", "--method", "plain,sparsespec,aspire", "--budget", "32", "--requests", "2"]
    lengths = ["--prompt-tokens", "60-90", "--max-tokens", "16", "--ignore-eos"]
    bench("offline", *model, *offline, *lengths, "--repeats", "2")
    bench("replayed", *model, *offline, *lengths, "--replay-lengths", "4,2,7", "--seeds", "0,1", command="offline")
    text = ["--dataset", "text", "--requests", "2"]
    bench(
        "accept", *model, *text, "--prompt-tokens", "80-90", "--starts", "2", "--draft-tokens", "4", "--budgets", "16"
    )
    needles = ["--dataset", "needles", "--needles", "1", "--requests", "2", "--max-tokens", "8"]
    needles += ["--prompt-tokens", "250-300", "--budget", "32", "--method", "plain,sparsespec"]
    bench("accuracy", *model, *small, *needles)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in ["good"] * 5 + ["500", "half"]))
    with bad_server() as server:
        options = ["--base-url", server.url, "--dataset", str(prompts), "--num-prompts", "7", "--max-concurrency", "2"]
        bench("serve", *options, "--goodput", "ttft:1000")
    shape = ["--device", "cpu", "--shape", "tiny", "--cells", "2x64", "--budget", "16", "--verify-tokens", "1,2"]
    bench("kernels", *shape, "--block-size", "16", "--repeats", "2", "--tokens", "2", "--groups", "attention,product")
    return files


@pytest.fixture(scope="module")
def page(results: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    recorded = [RECORDED / "demo-cpu.json", *(RECORDED / "h200" / f"{name}.json" for name in ("methods", "kernels"))]
    files = [str(path) for path in (*results.values(), *recorded)]
    assert main(["bench", "report", *files, "--out", str(out), "--markdown", str(out.with_suffix(".md"))]) == 0
    return out


def test_every_result_has_its_section_and_its_pictures(results: dict[str, Path]) -> None:
    found = {kind: read_report([str(path)], "t").sections[0] for kind, path in results.items()}
    titles = {kind: [picture.title for picture in section.pictures] for kind, section in found.items()}
    for kind in ("offline", "replayed"):
        words = " ".join(titles[kind])
        for what in ("Speed-up", "Accepted lengths", "Draft length over time", "A stretch of one run", "Cost model"):
            assert what in words, kind
    assert any("Roofline" in title for title in titles["kernels"])
    assert len(titles["accept"]) == 2
    methods = found["offline"].tables[0]
    assert [row[0] for row in methods.rows] == ["plain", "sparsespec", "aspire"]
    data = json.loads(results["offline"].read_text())
    speedup = data["methods"]["sparsespec"]["speedup"]
    low, high = data["methods"]["sparsespec"]["speedup_interval"]
    assert methods.rows[1][2] == f"{speedup:.2f} [{low:.2f}, {high:.2f}]"
    note = next(note for note in found["serve"].notes if note.startswith("NOT ok"))
    assert "1 http 500" in note
    assert "1 truncated" in note
    assert found["serve"].tables[0].rows[0] == ["requests ended well", "5 of 7"]
    assert [row[0] for row in found["accuracy"].tables[0].rows] == ["plain", "sparsespec"]


def test_what_was_replayed_is_marked_everywhere_and_nothing_else(results: dict[str, Path]) -> None:
    replayed = html(read_report([str(results["replayed"])], "t"))
    for part in ("<h2 id", "<figcaption>", "<caption>", '<div class="table"', '<svg class="wide"', "<li><a"):
        pieces = [piece.split("</", 1)[0] for piece in replayed.split(part)[1:]]
        assert pieces
        assert all("replayed" in piece for piece in pieces), part
    for method in ("sparsespec", "aspire"):
        assert f"{method} (replayed)" in replayed
    assert "plain (replayed)" not in replayed
    words = markdown(read_report([str(results["replayed"])], "t"))
    assert "**Methods (replayed)**" in words
    assert "(replayed)" in words.split("## ")[1].splitlines()[0]
    real = html(read_report([str(results["offline"])], "t"))
    assert "replayed" not in re.sub(r"<style>.*</style>", "", real, flags=re.S)


def test_where_the_numbers_come_from_is_at_the_foot(page: Path, results: dict[str, Path]) -> None:
    foot = page.read_text().split("<footer>")[1]
    data = json.loads(results["kernels"].read_text())["environment"]
    assert data["machine"]["cpu"] in foot
    assert f"torch {data['versions']['torch']}" in foot
    assert data["started"] in foot
    assert "NVIDIA H200" in foot
    assert foot.count("<h3>") == len(KINDS) + 3


def test_markdown_tables_are_whole(page: Path) -> None:
    text = page.with_suffix(".md").read_text()
    width = None
    tables = 0
    for line in text.splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = len(re.findall(r"(?<!\\)\|", line))
        tables += width is None
        width = width or cells
        assert cells == width, line
    assert tables >= 12


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator[Any]:
    """After the page and its results: Playwright leaves an event loop running, and `bench serve` starts one."""
    with chromium() as made:
        yield made


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_in_a_browser(browser: Any, page: Path, theme: str, width: int) -> None:
    # no script is needed to read it
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    try:
        shown = context.new_page()
        said: list[str] = []
        asked: list[str] = []
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto(page.as_uri())
        assert said == []
        assert asked == [page.as_uri()]
        wide = shown.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide[0] <= wide[1], f"scrolls sideways: {wide}"
        assert shown.evaluate("document.scripts.length") == 0
        pictures = shown.evaluate(
            """[...document.querySelectorAll('figure')].map(figure => {
              const seen = [...figure.querySelectorAll('svg[role=img]')].filter(svg => svg.getClientRects().length);
              return {n: seen.length, label: seen[0]?.getAttribute('aria-label') ?? '',
                      width: seen[0]?.getBoundingClientRect().width, box: seen[0]?.viewBox.baseVal.width};
            })"""
        )
        assert len(pictures) > 15
        for picture in pictures:
            assert picture["n"] == 1
            assert len(picture["label"]) > 20
            # letters of 11 px stay letters of at least 10
            assert picture["width"] / picture["box"] > 0.9
        hidden = shown.evaluate(
            "[...document.querySelectorAll('img, canvas, iframe, object, link[href^=http]')].length"
        )
        assert hidden == 0
        background, ink = shown.evaluate(
            """[getComputedStyle(document.querySelector('section')).backgroundColor,
                getComputedStyle(document.querySelector('svg text')).fill]"""
        )
        assert (brightness(background) < 80) == (theme == "dark")
        assert abs(brightness(background) - brightness(ink)) > 120
    finally:
        context.close()


def brightness(colour: str) -> float:
    parts = [float(part) for part in re.findall(r"[\d.]+", colour)[:3]]
    return sum(parts) / 3


def test_labels_stay_within_their_picture(browser: Any, page: Path) -> None:
    for width in (1280, 390):
        context = browser.new_context(viewport={"width": width, "height": 900})
        try:
            shown = context.new_page()
            shown.goto(page.as_uri())
            out = shown.evaluate(
                """[...document.querySelectorAll('svg[role=img] text')].filter(text => {
                  if (!text.getClientRects().length) return false;
                  const inner = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
                  return inner.left < outer.left - 2 || inner.right > outer.right + 2;
                }).map(text => text.textContent)"""
            )
            assert out == []
        finally:
            context.close()


@pytest.mark.parametrize("name", ["demo-cpu", "h200/methods", "h200/plain", "h200/kernels"])
def test_older_files_can_be_read(name: str) -> None:
    report = read_report([str(RECORDED / f"{name}.json")], "t")
    assert html(report)
    data = json.loads((RECORDED / f"{name}.json").read_text())
    if name == "h200/methods":
        assert len(report.sections) == len(data["cells"])
        rows = {row[0]: row for row in report.sections[0].tables[0].rows}
        cell = data["cells"]["64x8192"]
        ratio = cell["aspire (replayed)"]["tokens_per_s"] / cell["plain"]["tokens_per_s"]
        assert rows["aspire (replayed)"][2] == f"{ratio:.2f}"
        assert all(section.replayed for section in report.sections)
    if name == "h200/kernels":
        rows = {row[0]: row for row in report.sections[0].tables[0].rows}
        share = data["TB_s"]["default"]["64x8192"]["verify 1"] / data["card_TB_s"]
        assert rows["64x8192 verify 1"][-1] == f"{share:.0%}"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", "report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ("not JSON",)),
        ("", ("not JSON",)),
        ("[1, 2]", ("no object",)),
        ("{}", ("offline", "kernels")),
        ('{"kind": "magic"}', ("'magic'", "offline")),
        ('{"kind": ["offline"]}', ("unknown",)),
        ('{"kind": "offline"}', ("broken", "'methods'")),
        ('{"kind": "offline", "methods": {"plain": {}}}', ("broken", "'tokens_per_s'")),
        ('{"kind": "offline", "methods": {"plain": {"tokens_per_s": "fast"}}}', ("broken",)),
        ('{"kind": "kernels", "kernels": 3}', ("broken",)),
        ('{"cells": {"a": 1}}', ("broken",)),
        ("[" * 100000, ("nested",)),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_files_that_are_no_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: tuple[str, ...]
) -> None:
    file, out = tmp_path / "bad.json", tmp_path / "out.html"
    file.write_text(text)
    line = refused(capsys, str(RECORDED / "demo-cpu.json"), str(file), "--out", str(out))
    for word in ("bad.json", *words):
        assert word in line
    assert not out.exists()


def test_missing_files_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = str(RECORDED / "demo-cpu.json")
    assert "--out" in refused(capsys, demo)
    assert "absent.json" in refused(capsys, "absent.json", "--out", str(tmp_path / "o"))
    assert "RESULTS" in refused(capsys, "--out", str(tmp_path / "o"))
    assert "folder" in refused(capsys, demo, "--out", str(tmp_path))
    for name in ("exact", "overhead"):
        assert f"{name}.json" in refused(capsys, str(RECORDED / "h200" / f"{name}.json"), "--out", str(tmp_path / "o"))
    assert list(tmp_path.iterdir()) == []


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_one_clear_error_or_a_page(data: Any, results: dict[str, Path], tmp_path: Path) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    whole = copy.deepcopy(json.loads(results[kind].read_text()))
    path = data.draw(st.sampled_from(list(places(whole))))
    place = whole
    for key in path[:-1]:
        place = place[key]
    if data.draw(st.booleans()):
        del place[path[-1]]
    else:
        wrong = [None, "x", -1, 0, 1e308, float("nan"), float("inf"), [], {}, [None], True, {"a": 1}]
        place[path[-1]] = data.draw(st.sampled_from(wrong))
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(whole))
    try:
        report = read_report([str(file)], "t")
    except UserError as error:
        refusal = str(error)
    else:
        refusal = "damaged.json"
        assert html(report)
        assert markdown(report)
    assert "damaged.json" in refusal


def test_names_in_results_cannot_become_markup(tmp_path: Path) -> None:
    evil = "</h2><script>alert(1)</script>|`*"
    file = tmp_path / "x.json"
    data = {"kind": "offline", "model": evil, "methods": {evil: {"tokens_per_s": 1.0, "speedup": 1.0}}}
    file.write_text(json.dumps(data))
    report = read_report([str(file)], evil)
    assert "<script" not in html(report)
    words = markdown(report)
    assert "<script" not in words
    row = next(line for line in words.splitlines() if line.startswith("| &lt;/h2"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 11


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e9), st.integers(1, 12))
def test_ticks(low: float, width: float, most: int) -> None:
    high = low + width
    found = ticks(low, high, most)
    slack = (high - low) * 1e-6
    assert found == sorted(found)
    assert len(found) <= most + 1
    assert all(low - slack <= value <= high + slack for value in found)


def test_log_scales() -> None:
    assert log_ticks(0.5, 2000) == [1.0, 10.0, 100.0, 1000.0]
    scale = Scale(1.0, 100.0, 0.0, 50.0, log=True)
    assert [scale(value) for value in (1, 10, 100)] == pytest.approx([0, 25, 50])


def test_tables_of_replayed_cells(tmp_path: Path) -> None:
    """The shape of benchmarks/table.py: model, cell, kind of replay."""

    def row(speed: float, ratio: float) -> dict[str, Any]:
        middle = {"median": ratio, "interval": [ratio - 0.1, ratio + 0.1], "values": [ratio]}
        return {
            "tokens_per_s": {"median": speed, "interval": None, "values": [speed]},
            "speedup": middle,
            "mean_accepted_length": {"median": 4.0, "interval": None, "values": [4.0]},
            "runs": [{}, {}, {}],
        }

    rows = {"plain": row(100.0, 1.0), "aspire": row(250.0, 2.5)}
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"note": "REPLAYED acceptance", "cells": {"qwen3-8b": {"64x8192": {"recorded": rows}}}}))
    section = read_report([str(file)], "t").sections[0]
    assert section.title == "Throughput: qwen3-8b 64x8192 recorded"
    assert section.replayed
    assert [row[0] for row in section.tables[0].rows] == ["plain", "aspire (replayed)"]
    assert section.tables[0].rows[1][1:4] == ["250", "2.50 [2.40, 2.60]", "4.00"]
