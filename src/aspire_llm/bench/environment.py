"""Where a benchmark ran: machine, versions, commit."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("aspire-llm", "torch", "transformers", "triton", "numpy")


def report(command: str, started: str) -> dict[str, Any]:
    """What every benchmark's JSON says of where it comes from. started: the time, ISO 8601."""
    return {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "command": command,
        "started": started,
    }


def machine() -> dict[str, Any]:
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
    }


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The git commit this code is of, with "+changes" where files differ from it; None where it is not in a repository."""
    here = Path(__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None  # installed somewhere below an unrelated repository, or below none
    head = _git(here.parent, "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+changes" if _git(here.parent, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
