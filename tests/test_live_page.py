"""The live page in headless Chromium, over the real server and a tiny model."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest

import aspire_llm.serving.live as live
from aspire_llm.serving.app import attach
from live_server import Live, chromium, drafting_model, live_server, wait_for
from serving_server import engine, served

STATIC = Path(live.__file__).parent / "static"
SIZES = [(1280, 900), (390, 844)]
THEMES = ["light", "dark"]
HANGS = 120  # s


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live_server() as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    """No load is left to the next test."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        server.load(0)
        server.pace = 0.0


@contextmanager
def opened(
    browser: Any, url: str, theme: str = "light", size: tuple[int, int] = SIZES[0], complaints: int = 0
) -> Iterator[Any]:
    """A page that must stay on its own server and complain of nothing."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=theme)
    page = context.new_page()
    page.set_default_timeout(HANGS * 1000)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    assert len(said) <= complaints, said
    assert all(request.startswith(url) for request in asked), asked


def text(page: Any, selector: str) -> str:
    return str(page.inner_text(selector)).strip()


def until(page: Any, condition: str, argument: Any = None) -> None:
    """Waits for JavaScript to be true. Not by wait_for_function, which the page's own security policy forbids."""
    end = time.monotonic() + HANGS
    while not page.evaluate(condition, argument):
        assert time.monotonic() < end, f"waited {HANGS} s for {condition}"
        page.wait_for_timeout(30)


def status(page: Any, state: str) -> None:
    until(page, "state => document.getElementById('status').dataset.state === state", state)


def cells(page: Any) -> int:
    return int(
        page.evaluate("[...document.querySelectorAll('.lane')].reduce((n, row) => n + Number(row.dataset.cells), 0)")
    )


def fits(page: Any) -> None:
    wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] <= wide[1], f"scrolls sideways: {wide}"


@pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size[0]))
@pytest.mark.parametrize("theme", THEMES)
def test_empty_then_live(server: Live, browser: Any, theme: str, size: tuple[int, int]) -> None:
    with opened(browser, server.url, theme, size) as page:
        status(page, "live")
        assert text(page, "#running") == "0"
        until(page, "document.getElementById('curl').textContent.includes('\"tiny\"')")
        assert f"curl {server.url}v1/chat/completions" in text(page, "#curl")
        fits(page)
        server.load(4)
        until(page, "document.querySelectorAll('.lane:not(.ended)').length === 4")
        assert page.is_hidden("#empty")
        first, tokens = cells(page), page.evaluate("[...document.querySelectorAll('.counts')].map(e => e.textContent)")
        until(page, "Number(document.getElementById('tokens-per-s').textContent.replace(/,/g, '')) > 0")
        until(page, "document.querySelector('#by-position li:not(.none)')")
        wait_for(lambda: cells(page) > first + 40, "cells to grow")
        assert page.evaluate("[...document.querySelectorAll('.counts')].map(e => e.textContent)") != tokens
        assert re.fullmatch(r"\d+\.\d\d×", text(page, "#speed-up"))
        assert re.fullmatch(r"\d+\.\d\d", text(page, "#accepted"))
        assert text(page, "#running") == "4"
        fits(page)
        server.load(0)
        until(page, "document.querySelectorAll('.lane:not(.ended)').length === 0")
        until(page, "document.getElementById('running').textContent === '0'")
        assert page.is_visible("#empty")


def drawn(page: Any, colours: dict[str, str]) -> set[str]:
    """Names of the colours ("#rrggbb") that fill at least 20 pixels of the lanes."""
    found = page.evaluate(
        """colours => {
          const words = new Map(Object.entries(colours).map(([name, code]) => {
            const [r, g, b] = [1, 3, 5].map(i => parseInt(code.slice(i, i + 2), 16));
            return [(0xff000000 | b << 16 | g << 8 | r) >>> 0, name];
          }));
          const counts = {};
          for (const canvas of document.querySelectorAll('.lane canvas')) {
            const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            for (const word of new Uint32Array(data.buffer)) {
              const name = words.get(word);
              if (name) counts[name] = (counts[name] ?? 0) + 1;
            }
          }
          return Object.keys(counts).filter(name => counts[name] >= 20);
        }""",
        colours,
    )
    return set(found)


@pytest.mark.parametrize("theme", THEMES)
def test_every_kind_is_drawn_sharp_in_its_theme(server: Live, browser: Any, theme: str) -> None:
    names = ("prefill", "draft", "accepted", "rejected", "verify")
    colours = {name: "#" + "".join(f"{round(255 * c):02x}" for c in palette(theme)[name]) for name in names}
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=theme, device_scale_factor=2)
    page = context.new_page()
    page.set_default_timeout(HANGS * 1000)
    page.goto(server.url)
    status(page, "live")
    server.load(2)
    seen: set[str] = set()
    end = time.monotonic() + HANGS
    while seen != set(names):
        page.wait_for_timeout(150)
        seen |= drawn(page, colours)
        assert time.monotonic() < end, f"never drawn in {theme}: {set(names) - seen}"
    width, shown = page.evaluate("[document.querySelector('.lane canvas')].flatMap(c => [c.width, c.clientWidth])")
    assert width == 2 * shown
    context.close()


def test_pause_stops_and_resumes(server: Live, browser: Any) -> None:
    with opened(browser, server.url) as page:
        server.load(3)
        wait_for(lambda: cells(page) > 30, "lanes")
        page.click("#pause")
        status(page, "paused")
        assert page.get_attribute("#pause", "aria-pressed") == "true"
        wait_for(lambda: server.monitor.is_idle, "the paused page to leave the stream")
        before = page.inner_text("main")
        page.wait_for_timeout(700)
        assert page.inner_text("main") == before, "a paused page changes"
        page.click("#pause")
        status(page, "live")
        until(page, "before => document.querySelector('main').innerText !== before", before)
        count = cells(page)
        wait_for(lambda: cells(page) != count, "lanes to go on")
        server.load(0)


def test_hover_and_keyboard_tell_the_same(server: Live, browser: Any) -> None:
    with opened(browser, server.url) as page:
        server.load(3)
        wait_for(lambda: cells(page) > 200, "cells")
        page.keyboard.press("Space")
        status(page, "paused")
        server.load(0)
        for _ in range(3):
            page.keyboard.press("+")
        lane = page.locator(".lane canvas").first
        box = lane.bounding_box()
        page.mouse.move(box["x"] + box["width"] - 4, box["y"] + 10)
        hovered = text(page, "#tip")
        assert re.match(r"step [\d,]+: (draft|verify|plain decoding|prefill)", hovered)
        page.mouse.move(5, 5)
        assert page.is_hidden("#tip")
        page.focus("#lanes")
        page.keyboard.press("End")
        assert text(page, "#tip") == hovered
        seen = set()
        for _ in range(30):
            page.keyboard.press("ArrowLeft")
            seen.add(text(page, "#tip").split("\n")[0].split(": ")[1].split(",")[0])
        assert {"draft", "verify"} <= seen
        assert text(page, "#lane-detail").startswith("Request request-")
        page.keyboard.press("ArrowDown")
        assert page.locator(".lane.chosen").count() == 1
        page.keyboard.press("Escape")
        assert page.is_hidden("#tip")


@pytest.mark.parametrize("theme", THEMES)
def test_keyboard_reaches_everything_and_shows_where_it_is(server: Live, browser: Any, theme: str) -> None:
    with opened(browser, server.url, theme) as page:
        status(page, "live")
        server.load(1)
        until(page, "document.querySelectorAll('.lane').length > 0")
        server.load(0)
        page.wait_for_selector("#empty", state="visible")
        reached = []
        for _ in range(20):
            page.keyboard.press("Tab")
            at = page.evaluate(
                """() => { const e = document.activeElement, s = getComputedStyle(e);
                  return [e.id || e.className || e.tagName, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2,
                    (e.getAttribute('aria-label') || e.innerText || e.labels?.[0]?.innerText || '').trim()]; }"""
            )
            if at[0] in ("BODY", "HTML"):
                break
            reached.append(at[0])
            assert at[1], f"no focus ring on {at[0]}"
            assert at[2], f"no name on {at[0]}"
        assert reached[:5] == ["skip", "pause", "zoom-out", "zoom-in", "lanes"]
        assert reached[5:] == ["curl", "copy", "chat-clear", "chat-log", "chat-input", "chat-send", "SUMMARY"]
        page.focus("summary")
        page.keyboard.press("Enter")
        for name in ("chat-max", "chat-temperature", "api-key"):
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.id") == name
        page.focus("#chat-input")
        page.keyboard.type("a b")
        assert page.input_value("#chat-input") == "a b"
        status(page, "live")  # blanks in the box are text, not a pause


def test_chat_streams_and_stops(server: Live, browser: Any) -> None:
    server.pace = 0.05  # the answer must not be complete before a slow browser has pressed Stop
    with opened(browser, server.url, size=SIZES[1], complaints=1) as page:  # of the refusal
        status(page, "live")
        page.click("summary")
        page.fill("#chat-max", "900")
        page.fill("#chat-input", "Tell me")
        page.press("#chat-input", "Enter")
        assert text(page, ".message.user") == "Tell me"
        until(page, "(document.querySelector('.message.assistant')?.textContent.length ?? 0) > 3")
        lengths = [len(page.inner_text(".message.assistant"))]
        until(page, "n => document.querySelector('.message.assistant').innerText.length > n + 20", lengths[0])
        assert page.locator(".message.streaming").count() == 1, "the answer did not come in pieces"
        until(page, "document.querySelectorAll('.lane').length === 1")
        page.click("#chat-send")  # Stop
        until(page, "!document.querySelector('.streaming')")
        assert "stopped" in text(page, ".message .stats")
        until(page, "document.querySelector('.lane.ended .counts')?.textContent.includes('abort')")
        page.fill("#chat-max", "5")
        page.fill("#chat-input", "And again")
        page.click("#chat-send")
        until(page, "document.querySelectorAll('.message .stats').length === 2")
        assert page.locator(".message .stats").nth(1).inner_text().startswith("5 tokens")
        page.fill("#chat-max", "99999")
        page.fill("#chat-input", "word " * 400)
        page.click("#chat-send")
        page.wait_for_selector(".message.error")
        assert "max_model_len" in text(page, ".message.error")
        fits(page)
        page.click("#chat-clear")
        assert page.locator(".message").count() == 0


def test_watchers_come_and_go(server: Live, browser: Any) -> None:
    wait_for(lambda: server.monitor.is_idle, "the pages of earlier tests to be seen leaving")
    server.load(2)
    with (
        opened(browser, server.url) as page,
        httpx.stream("GET", server.url + "live/events", timeout=120) as other,
        httpx.stream("GET", server.url + "live/events", timeout=120) as unread,
    ):
        status(page, "live")
        names: list[str] = []
        lines = other.iter_lines()  # kept: a dropped iterator would close the stream
        while len(names) < 5:
            line = next(lines)
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
        assert names == ["snapshot"] + ["delta"] * 4
        assert unread.headers["content-type"].startswith("text/event-stream")
        wait_for(lambda: server.monitor.num_watchers == 3, "all three to be counted")
        other.close()
        wait_for(lambda: server.monitor.num_watchers == 2, "the server to see that one left")
    wait_for(lambda: server.monitor.is_idle, "the server to see that all left")
    server.load(0)


def test_static_files_and_nothing_else(server: Live) -> None:
    with httpx.Client(base_url=server.url) as client:
        page = client.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for name in ("app.js", "style.css", "icon.svg"):
            assert client.get(f"/static/{name}").status_code == 200
        for name in ("../live.py", "..%2flive.py", "%2e%2e/live.py", "none.js", "", "app.js/", "....//live.py"):
            assert client.get(f"/static/{name}").status_code in (307, 404), name
    for path in STATIC.iterdir():
        text = path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), f"{path.name} names an outside address"


def test_the_page_waits_for_the_model(browser: Any) -> None:
    monitor = live.LiveMonitor()
    with served(None, monitor) as server, opened(browser, server.url + "/", complaints=99) as page:
        status(page, "reconnecting")
        assert "the model is being loaded" in text(page, "#status")
        llm = engine(drafting_model(), on_step=monitor.on_step)
        server.loop.call_soon_threadsafe(attach, server.app, llm)
        status(page, "live")
        until(page, "document.getElementById('chat-model').textContent === 'tiny'")
    llm.shutdown()


def test_api_key_is_asked_for(browser: Any) -> None:
    with (
        live_server(settings={"api_key": "sesame"}) as server,
        opened(browser, server.url, complaints=9) as page,  # of the refusals
    ):
        status(page, "reconnecting")
        assert "API key" in text(page, "#status")
        page.click("summary")
        page.fill("#api-key", "sesame")
        page.keyboard.press("Tab")
        status(page, "live")
        page.fill("#chat-max", "4")
        page.fill("#chat-input", "Hi")
        page.click("#chat-send")
        page.wait_for_selector(".message .stats")


def test_an_engine_that_stops_and_a_server_that_comes_back(browser: Any) -> None:
    with live_server(method="sparsespec") as server, opened(browser, server.url, complaints=99) as page:
        port = server.server.port
        server.load(2)
        until(page, "document.querySelectorAll('.lane').length === 2")
        assert text(page, "#speed-up") == "n/a"
        server.server.llm.shutdown()
        status(page, "stopped")
        assert "Engine stopped" in text(page, "#status")
        page.reload()
        status(page, "stopped")
        # the browser's context goes with the first server, so look from a page of its own
        context = browser.new_context()
        later = context.new_page()
        later.goto(server.url)
        status(later, "stopped")
    status(later, "stopped")
    with live_server(port=port) as server:
        until(later, "document.getElementById('status').dataset.state === 'live'")
        assert text(later, "#running") == "0"
    status(later, "stopped")
    until(later, "document.getElementById('status').dataset.state === 'reconnecting'")
    context.close()


# ---- colours


def palette(theme: str) -> dict[str, tuple[float, float, float]]:
    """The style sheet's colours, 0 to 1."""
    blocks = re.findall(r":root \{(.*?)\}", (STATIC / "style.css").read_text(), re.DOTALL)
    found = re.findall(r"--([\w-]+): #([0-9a-f]{6})", blocks[THEMES.index(theme)])
    return {name: tuple(int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)) for name, code in found}  # type: ignore[misc]


def linear(colour: tuple[float, ...]) -> list[float]:
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]


def luminance(colour: tuple[float, ...]) -> float:
    r, g, b = linear(colour)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """WCAG 2."""
    bright, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_text_is_readable(theme: str) -> None:
    colours = palette(theme)
    for ink, paper in (
        *(("text", "panel"), ("text", "page"), ("muted", "panel"), ("muted", "page"), ("text", "button")),
        *(("text", "bubble"), ("muted", "button"), ("bad", "panel"), ("primary-text", "primary"), ("panel", "text")),
    ):
        assert contrast(colours[ink], colours[paper]) >= 4.5, f"{ink} on {paper}"
    for mark in ("accepted", "rejected", "verify", "prefill", "focus"):
        least = 2.5 if mark in ("accepted", "prefill") else 3.0
        assert contrast(colours[mark], colours["panel"]) >= least, mark


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def lab(rgb: list[float]) -> list[float]:
    """CIE Lab (D65) of linear RGB."""
    r, g, b = (min(max(c, 0.0), 1.0) for c in rgb)
    x, y, z = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    f: Callable[[float], float] = lambda t: t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116  # noqa: E731
    return [116 * f(y) - 16, 500 * (f(x) - f(y)), 200 * (f(y) - f(z))]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("kind", BLINDNESS)
def test_cells_stay_apart_for_colour_blind_eyes(theme: str, kind: str) -> None:
    colours = palette(theme)
    seen = {}
    for name in ("draft", "accepted", "rejected", "verify"):
        rgb = linear(colours[name])
        seen[name] = lab([sum(m * c for m, c in zip(row, rgb, strict=True)) for row in BLINDNESS[kind]])
    for a, b in combinations(seen, 2):
        distance = sum((p - q) ** 2 for p, q in zip(seen[a], seen[b], strict=True)) ** 0.5
        assert distance > 20, f"{a} and {b} look alike ({distance:.0f})"
