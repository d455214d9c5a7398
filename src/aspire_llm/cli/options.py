"""Command-line options made from the fields of EngineConfig and SamplingParams, which stay the one place that defines them.

`max_model_len` becomes `--max-model-len`; a bool also `--no-…`; lists are comma-separated, lists of texts are repeated
options. Values are checked by the models themselves; only options that were given are passed on.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from aspire_llm.config import EngineConfig
from aspire_llm.request import SamplingParams
from aspire_llm.serving.settings import ServerSettings

SAMPLING_HELP: Mapping[str, str] = {
    "n": "continuations of each prompt",
    "temperature": "0: greedy",
    "top_p": "sample from the likeliest tokens that together have this probability",
    "top_k": "sample from so many likeliest tokens; 0: all",
    "min_p": "leave out tokens less likely than this share of the likeliest one's probability",
    "seed": "of the random numbers; default: another one for each prompt",
    "max_tokens": "most tokens of output",
    "min_tokens": "no end before so many tokens",
    "stop": "text that ends the output; may be repeated",
    "stop_token_ids": "tokens that end the output, comma-separated",
    "ignore_eos": "go on past the end-of-text token",
    "include_stop_str_in_output": "keep the stop text in the output",
    "logprobs": "log-probabilities of so many likeliest tokens (into --json)",
    "prompt_logprobs": "the same of the prompt's tokens (into --json)",
    "presence_penalty": "off the logit of every token that has come",
    "frequency_penalty": "off the logit of a token for each time it has come",
    "repetition_penalty": "divides the logits of tokens that have come; 1: none",
    "bad_words": "text that must not come; may be repeated",
    "allowed_token_ids": "the only tokens that may come, comma-separated",
    "skip_special_tokens": "leave special tokens out of the text",
    "draft": "--no-draft: decode without speculation",
}
# what a command line cannot say, or the engine fills in by itself
NOT_OPTIONS = frozenset({"logits_processors", "bad_words_token_ids", "structured_outputs", "logit_bias"})


def add_engine_options(parser: argparse.ArgumentParser, *, exclude: Collection[str] = ()) -> None:
    _add_fields(parser.add_argument_group("engine options"), "engine", EngineConfig, {}, exclude, {})


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, to be checked by `make_config`."""
    return _given(args, "engine", EngineConfig)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    _add_fields(parser.add_argument_group("server options"), "server", ServerSettings, {}, (), {})


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """The server options that were given, to be checked by `make_settings`."""
    return _given(args, "server", ServerSettings)


def add_sampling_options(parser: argparse.ArgumentParser, *, defaults: Mapping[str, Any]) -> None:
    """`defaults`: those of the command where they are not SamplingParams' own."""
    _add_fields(
        parser.add_argument_group("sampling options"), "sampling", SamplingParams, SAMPLING_HELP, NOT_OPTIONS, defaults
    )


def sampling_params(args: argparse.Namespace, *, defaults: Mapping[str, Any]) -> SamplingParams:
    """Raises UserError."""
    return SamplingParams(**{**defaults, **_given(args, "sampling", SamplingParams)})


def comma_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _add_fields(
    group: argparse._ArgumentGroup,
    prefix: str,
    model: type[BaseModel],
    helps: Mapping[str, str],
    exclude: Collection[str],
    defaults: Mapping[str, Any],
) -> None:
    for name, field in model.model_fields.items():
        if name in exclude:
            continue
        kind = _kind(field.annotation)
        text = (field.description or helps[name]).replace("%", "%%")
        default = defaults.get(name, field.default)
        if default not in (None, ()) and "default" not in text and kind != "flag":
            text += f" (default {default})"
        settings: dict[str, Any] = {"dest": f"{prefix}.{name}", "default": None, "help": text}
        if kind == "flag":
            settings["action"] = argparse.BooleanOptionalAction
            settings["help"] += f" (default {'on' if default else 'off'})"
        elif kind == "texts":
            settings.update(action="append", metavar="TEXT")
        else:
            settings["metavar"] = {"integer": "N", "number": "X", "integers": "N,N,…"}.get(kind, name.upper())
        group.add_argument("--" + name.replace("_", "-"), **settings)


def _given(args: argparse.Namespace, prefix: str, model: type[BaseModel]) -> dict[str, Any]:
    values = vars(args)
    given = {}
    for name, field in model.model_fields.items():
        value = values.get(f"{prefix}.{name}")
        if value is not None:
            given[name] = _convert(value, field)
    return given


def _convert(value: Any, field: FieldInfo) -> Any:
    """Text to what the field holds, where it can be; else the text itself, for the model to refuse by name."""
    kind = _kind(field.annotation)
    if kind == "integers":
        return tuple(_number(part, int) for part in comma_list(value))
    if kind == "integer":
        return _number(value, int)
    if kind == "number":
        return _number(value, float)
    return tuple(value) if kind == "texts" else value


def _number(text: str, to: type[int] | type[float]) -> Any:
    try:
        return to(text)
    except ValueError:
        return text


def _kind(annotation: Any) -> str:
    """flag, integer, number, text, choice, integers or texts: the first that the annotation allows besides None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kind(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return _kind(next(arg for arg in get_args(annotation) if arg is not type(None)))
    if origin is Literal:
        return "choice"
    if origin is tuple:
        return "integers" if _kind(get_args(annotation)[0]) == "integer" else "texts"
    return {bool: "flag", int: "integer", float: "number"}.get(annotation, "text")
