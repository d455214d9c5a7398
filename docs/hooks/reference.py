"""What the reference takes from the code at build time, so that it cannot go out of date.

A line `<!-- options: EngineConfig -->` becomes a table of the options, `<!-- source: policy/base.py RequestView -->` a
class as it stands in the code, with the comments of its fields. Pages of results that the navigation does not name are
added to it.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as bounds
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from aspire_llm.cli.options import SAMPLING_HELP
from aspire_llm.config import EngineConfig
from aspire_llm.request import SamplingParams

MODELS: dict[str, type[BaseModel]] = {"EngineConfig": EngineConfig, "SamplingParams": SamplingParams}
INTERNAL = frozenset({"bad_words_token_ids"})  # filled in by the engine
OTHER_HELP = {  # fields that the command line does not have
    "logit_bias": "token id to what is added to its logit, in [-100, 100]",
    "logits_processors": "change the logits; see above",
    "structured_outputs": "what the output must look like",
}
MAX_SEED = 2**63
PACKAGE = Path(__file__).parents[2] / "src" / "aspire_llm"
SOURCE = re.compile(r"^<!-- source: (\S+) (\w+) -->$", re.MULTILINE)


def on_config(config: Any) -> Any:
    results = next(entry["Results"] for entry in config["nav"] if "Results" in entry)
    named = {page for entry in results for page in (entry.values() if isinstance(entry, dict) else [entry])}
    found = sorted(f"results/{path.name}" for path in Path(config["docs_dir"], "results").glob("*.md"))
    results.extend(page for page in found if page not in named)
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    for name, model in MODELS.items():
        markdown = markdown.replace(f"<!-- options: {name} -->", table(model))
    return SOURCE.sub(lambda found: source(found[1], found[2]), markdown)


def source(path: str, name: str) -> str:
    """A class without its methods, as a block of code."""
    text = (PACKAGE / path).read_text(encoding="utf-8")
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = [node for node in found.body if isinstance(node, ast.FunctionDef)]
    end = min((min([m.lineno, *(d.lineno for d in m.decorator_list)]) - 1 for m in methods), default=found.end_lineno)
    start = min([found.lineno, *(d.lineno for d in found.decorator_list)]) - 1
    lines = "\n".join(text.splitlines()[start:end]).rstrip()
    return f"```python\n{lines}\n```"


def table(model: type[BaseModel]) -> str:
    lines = ["| option | values | default | |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        if name not in INTERNAL:
            text = field.description or SAMPLING_HELP.get(name) or OTHER_HELP[name]
            values = ", ".join([kind(field.annotation), *limits(field)])
            lines.append(f"| `{name}` | {values} | {default(field)} | {text} |")
    return "\n".join(lines)


def kind(annotation: Any) -> str:
    """A type as a reader wants it, None left out: int, list of str, `auto` or `dummy`."""
    origin, arguments = get_origin(annotation), [a for a in get_args(annotation) if a is not type(None)]
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Annotated, Union, UnionType):
        return kind(arguments[0])
    if origin is tuple:
        return f"list of {kind(arguments[0])}"
    if origin is not None:
        return "function" if origin is get_origin(Callable[..., Any]) else origin.__name__
    return str(annotation.__name__)


def limits(field: FieldInfo) -> list[str]:
    found = []
    for limit in field.metadata:
        match limit:
            case bounds.Ge(ge) if abs(ge) < MAX_SEED:
                found.append(f"≥ {ge}")
            case bounds.Gt(gt):
                found.append(f"> {gt}")
            case bounds.Le(le) if abs(le) < MAX_SEED - 1:
                found.append(f"≤ {le}")
            case _:
                pass
    return found


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "" if value is None or value in ((), {}) else f"`{value}`"
