"""Long-context LLM decoding by asynchronous, batched self-speculation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aspire_llm.engine.async_llm import AsyncLLM
    from aspire_llm.engine.llm import LLM
    from aspire_llm.errors import UserError
    from aspire_llm.request import CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "UserError", "__version__"]

_HOMES = {
    "AsyncLLM": "aspire_llm.engine.async_llm",
    "LLM": "aspire_llm.engine.llm",
    "UserError": "aspire_llm.errors",
    "CompletionOutput": "aspire_llm.request",
    "RequestOutput": "aspire_llm.request",
    "SamplingParams": "aspire_llm.request",
}


def __getattr__(name: str) -> Any:
    """Import on first use: policies and the command line's help need no torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'aspire_llm' has no attribute {name!r}")
