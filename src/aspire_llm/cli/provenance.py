"""How and when a command was started, for the files that it writes."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime


def command_line() -> str:
    return shlex.join(["aspire-llm", *sys.argv[1:]])


def now() -> str:
    """ISO 8601, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
