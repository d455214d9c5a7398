"""The direction of imports, as docs/design.md gives it: a package may import those before it, never one behind it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import aspire_llm

ROOT = Path(aspire_llm.__file__).parent
ORDER = [
    "errors",
    "config",
    "request",
    "models",
    "cache",
    "attention",
    "context",
    "policy",
    "scheduler",
    "sampling",
    "engine",
    "serving",
    "bench",
    "analysis",
    "cli",
]
ENTRY_POINTS = {"__init__", "__main__"}  # of the whole package; they stand outside the order
NO_TORCH = [*(ROOT / "policy").rglob("*.py"), ROOT / "cache" / "pages.py"]
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Dotted names of every module that the file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            if node.module == "aspire_llm":
                yield from (f"aspire_llm.{alias.name}" for alias in node.names)


def part(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def test_every_part_has_its_place() -> None:
    assert {part(path) for path in FILES} - ENTRY_POINTS <= set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    here = part(path)
    if here in ENTRY_POINTS:
        return
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "aspire_llm" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) <= ORDER.index(here), f"{here} imports {name}"


@pytest.mark.parametrize("path", NO_TORCH, ids=lambda path: str(path.relative_to(ROOT)))
def test_policies_and_the_page_allocator_need_no_torch(path: Path) -> None:
    """Nor does anything of ours that they import."""
    seen: set[Path] = set()
    todo = [path]
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in imported(file):
            assert name.split(".")[0] not in {"torch", "transformers", "triton"}, f"{file} imports {name}"
            if name.startswith("aspire_llm."):
                module = ROOT.joinpath(*name.split(".")[1:])
                todo += [p for p in (module.with_suffix(".py"), module / "__init__.py") if p.is_file()]


def test_no_file_is_named_utils() -> None:
    assert not [path for path in FILES if "util" in path.stem]
