"""The documentation: links lead somewhere, commands and options exist, code compiles, tables say what the code says."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from aspire_llm.cli.parser import make_parser, parse
from aspire_llm.config import METHODS, EngineConfig
from aspire_llm.request import SamplingParams

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FILES = [*PAGES, ROOT / "README.md"]
FENCE = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+(?:\([^()]*\))?)\)")
INCLUDE = re.compile(r'^--8<-- "([\w.]+):(\w+)"$', re.MULTILINE)
PROGRAM = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?aspire-llm ")
# options in running text that are not of our command line: those of others, and those that are said to be missing
OTHERS_OPTIONS = {"--no-deps", "--deterministic", "--strict"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> Iterator[tuple[str, str]]:
    for found in FENCE.finditer(path.read_text(encoding="utf-8")):
        yield found[1], found[2]


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def slug(heading: str) -> str:
    """The anchor of a heading, as Python-Markdown makes it (GitHub's agree for the headings here)."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors(path: Path) -> set[str]:
    return {slug(found[1]) for found in re.finditer(r"^#+ (.+?)\s*$", prose(path), re.MULTILINE)}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_links_and_anchors_resolve(path: Path) -> None:
    for found in LINK.finditer(prose(path)):
        target = found[1]
        if re.match(r"https?://|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{target}: no such file"
        assert there.is_relative_to(DOCS) or path == ROOT / "README.md", f"{target}: outside the site"
        if anchor:
            assert anchor in anchors(there), f"{target}: no such heading; there are {sorted(anchors(there))}"


def site() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return loaded


def nav_files(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, list):
                yield from nav_files(value)
            else:
                yield value


def test_the_navigation_has_every_page_once() -> None:
    """Results are completed by the hook, the others by hand."""
    named = list(nav_files(site()["nav"]))
    assert len(named) == len(set(named))
    for file in named:
        assert (DOCS / file).is_file(), f"mkdocs.yml names {file}, which is not there"
    pages = {str(page.relative_to(DOCS)) for page in PAGES}
    assert pages - set(named) <= {page for page in pages if page.startswith("results/")}


# ---- commands


def commands(text: str) -> Iterator[str]:
    """Lines that run aspire-llm, without what a shell would take: pipes, redirections, comments."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        for part in re.split(r"\s(?:\||&&|;|>|<)\s", line.split("  #")[0]):
            if PROGRAM.match(part.strip()):
                yield PROGRAM.sub("", part.strip())


COMMANDS = [
    pytest.param(command, id=f"{name_of(path)}: {command[:60]}")
    for path in FILES
    for language, text in blocks(path)
    if language in ("", "sh", "bash", "shell", "console")
    for command in commands(text)
    if "…" not in command
]


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_docs_parse(command: str) -> None:
    arguments = shlex.split(command)
    if {"--help", "--version"} & set(arguments):
        with pytest.raises(SystemExit, match="0"):
            parse(arguments)
    else:
        parse(arguments)


def known_options(parser: argparse.ArgumentParser) -> set[str]:
    known = set()
    for action in parser._actions:
        known |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                known |= known_options(command)
    return known


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_options_in_the_text_exist(path: Path) -> None:
    known = known_options(make_parser()) | OTHERS_OPTIONS
    for code in re.finditer(r"`([^`\n]+)`", prose(path)):
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", code[1]):
            assert option in known or option.endswith("-"), f"{option} is no option of aspire-llm"


def test_other_options_are_not_ours() -> None:
    """An option that has come to be needs no exception, and what is said about it must change."""
    assert not OTHERS_OPTIONS & (known_options(make_parser()) - {"--deterministic"})


# ---- code


def included(text: str) -> str:
    """With the sections of examples that it includes, as the site shows it."""

    def section(found: re.Match[str]) -> str:
        example = (DOCS / "examples" / found[1]).read_text(encoding="utf-8")
        inside = re.search(
            rf"^ *# --8<-- \[start:{found[2]}\]\n(.*?)^ *# --8<-- \[end:{found[2]}\]", example, re.MULTILINE | re.DOTALL
        )
        assert inside is not None, f"{found[1]} has no section {found[2]}"
        lines = inside[1].splitlines()
        margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
        return "\n".join(line[margin:] for line in lines)

    return INCLUDE.sub(section, text)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_python_of_the_docs_compiles(path: Path) -> None:
    for language, text in blocks(path):
        if language in ("python", "py"):
            compile(included(text), name_of(path), "exec")


def test_the_examples_keep_their_promise_of_thirty_lines() -> None:
    for example, section in (("own_selector.py", "selector"), ("own_policy.py", "policy")):
        assert len(included(f'--8<-- "{example}:{section}"').strip().splitlines()) <= 32


# ---- what the docs say of the code


def test_the_table_of_methods_is_the_presets() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \| (\S+) \| `(\w+)` \| ([^|]+) \|", (DOCS / "methods.md").read_text(), re.MULTILINE
    )
    assert [row[0] for row in rows] == list(METHODS)
    for name, context, policy, drafts in rows:
        preset = METHODS[name]
        assert context.strip("`") == (preset.context or "-")
        assert policy == preset.policy
        if policy in ("lockstep", "staggered"):
            assert int(drafts) == preset.draft_tokens


def reference_hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_hook", DOCS / "hooks" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_option_and_its_default() -> None:
    page = reference_hook().on_page_markdown((DOCS / "reference.md").read_text())
    for model in (EngineConfig, SamplingParams):
        for name, field in model.model_fields.items():
            if name != "bad_words_token_ids":
                row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
                default = field.get_default(call_default_factory=True)
                assert (f"`{default}`" in row) or default is None or default in ((), {}), row
    assert "| `max_draft_tokens` | int, ≥ 1, ≤ 64 | `16` | most drafts between two verifications |" in page
    assert "class RequestMetrics:" in page
    assert "<!--" not in page


# ---- the site


class Assets(HTMLParser):
    """Everything that a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.found.append(values.get("src") or "")
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.found.append(values.get("href") or "")


def test_the_site_builds_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES) - 1
    for page in pages:
        assets = Assets()
        assets.feed(page.read_text(encoding="utf-8"))
        outside = [asset for asset in assets.found if re.match(r"(https?:)?//", asset)]
        assert not outside, f"{page.name}: {outside}"
    reference = (tmp_path / "reference.html").read_text(encoding="utf-8")
    assert "gpu_memory_utilization" in reference
    assert "Decode a batch to its end" in reference  # a docstring


@pytest.mark.parametrize("path", sorted((DOCS / "images").glob("*.svg")), ids=name_of)
def test_pictures_are_readable_in_dark_and_light_and_without_eyes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in text
    assert "<title" in text
    assert "<desc" in text
    light, dark = text.split("@media", 1)
    assert set(re.findall(r"\.(\w+)\{", light)) - {"b", "s", "c", "e"} == set(
        re.findall(r"\.(\w+)\{", dark.split("</style>")[0])
    )
    assert not re.search(r'(?:href|src)="|url\(|@import', text)
