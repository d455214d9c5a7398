"""Result files: which benchmark wrote them, and where their numbers come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aspire_llm.bench.report.kernels import kernels_section
from aspire_llm.bench.report.legacy import in_todays_shape, is_legacy
from aspire_llm.bench.report.offline import offline_section
from aspire_llm.bench.report.parts import WIDTHS, Provenance, Report, Section
from aspire_llm.bench.report.quality import accept_section, accuracy_section
from aspire_llm.bench.report.serve import serve_section
from aspire_llm.config import read_text
from aspire_llm.errors import UserError

SECTIONS: Mapping[str, Callable[[Mapping[str, Any]], Section]] = {
    "offline": offline_section,
    "serve": serve_section,
    "accept": accept_section,
    "accuracy": accuracy_section,
    "kernels": kernels_section,
}
UNKNOWN = "not recorded"


def read_report(paths: Sequence[str], title: str) -> Report:
    """Raises UserError naming the first file that is none of ours, or is broken."""
    sections: list[Section] = []
    provenance: list[Provenance] = []
    for path in paths:
        data = _load(path)
        with _whole(path):
            results = list(_results(path, data))
            for result in results:
                section = SECTIONS[result["kind"]](result)
                for picture in section.pictures:
                    for width in WIDTHS.values():  # so that broken records are found with their file
                        picture.draw(width)
                sections.append(section)
            provenance.append(provenance_of(Path(path).name, data))
    return Report(title, sections, provenance)


def _load(path: str) -> Mapping[str, Any]:
    text = read_text(path, "result file")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"result file {path!r} is not JSON: {error.msg} in line {error.lineno}") from None
    except RecursionError:
        raise UserError(f"result file {path!r} is nested too deeply") from None
    if not isinstance(data, dict):
        raise UserError(f"result file {path!r} holds no object, so no benchmark wrote it")
    return data


def _results(path: str, data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    kind = data.get("kind")
    if isinstance(kind, str) and kind in SECTIONS:
        yield data
    elif "kind" not in data and is_legacy(data):
        yield from in_todays_shape(data)
    else:
        known = ", ".join(SECTIONS)
        what = f"kind {kind!r} is unknown" if "kind" in data else "it does not say which benchmark wrote it"
        raise UserError(f"result file {path!r}: {what}; known: {known}")


@contextmanager
def _whole(path: str) -> Iterator[None]:
    """What goes wrong while a file is read is the file's fault."""
    try:
        yield
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"result file {path!r} is broken: {error} is missing") from None
    except (TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"result file {path!r} is broken: {' '.join(str(error).split())}") from None


def provenance_of(file: str, data: Mapping[str, Any]) -> Provenance:
    """From `environment`, or from the fields of older files."""
    of = data.get("environment", data)
    machine = of.get("machine", of.get("gpu", UNKNOWN))
    if isinstance(machine, Mapping):
        gpus = machine.get("gpus") or []
        parts = [", ".join(gpus), machine.get("cpu"), f"{machine['cores']} cores" if machine.get("cores") else None]
        threads = f"{machine['threads']} threads" if machine.get("threads") else None
        memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if machine.get("memory_bytes") else None
        machine = ", ".join(str(part) for part in (*parts, threads, memory, machine.get("system")) if part)
    versions = of.get("versions") or {name: of[name] for name in ("torch", "triton") if name in of}
    return Provenance(
        file=file,
        machine=str(machine),
        versions=", ".join(f"{name} {version}" for name, version in versions.items()) or UNKNOWN,
        commit=str(of.get("commit") or UNKNOWN),
        command=str(of.get("command") or UNKNOWN),
        started=str(of.get("started") or UNKNOWN),
    )
