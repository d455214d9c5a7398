"""The server's log: lines of text, or one JSON object a line. Prompts, outputs and keys never appear in it."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

FIELDS = ("request_id", "client", "method", "path", "status", "seconds")  # of an access record, as `extra`


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update({name: getattr(record, name) for name in FIELDS if hasattr(record, name)})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True, default=str)


def start_logging(level: str, form: Literal["text", "json"]) -> None:
    """Send our and uvicorn's records to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name in ("aspire_llm", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = name != "aspire_llm" and name != "uvicorn"
        logger.setLevel(level.upper())
    for name in ("aspire_llm", "uvicorn"):
        logging.getLogger(name).addHandler(handler)
