"""Serve a model over HTTP, as OpenAI's API.

Options come from the command line, or with the same names from a YAML file (--config); the command line wins.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aspire_llm.cli.options import add_engine_options, add_server_options, engine_options, server_options
from aspire_llm.config import EngineConfig, make_config
from aspire_llm.errors import UserError
from aspire_llm.serving.settings import ServerSettings, make_settings, read_config

if TYPE_CHECKING:
    from aspire_llm.engine.async_llm import AsyncLLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML file with options under the same names")
    parser.add_argument("--print-config", action="store_true", help="show every option as it would be used, and end")
    add_server_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> None:
    config, settings = resolve(args)
    if args.print_config:
        print(as_yaml(config, settings), end="")
        return
    try:
        from aspire_llm.serving.server import serve
    except ImportError as error:
        raise UserError(f"serve needs {error.name}: pip install 'aspire-llm[serve]'") from None
    from aspire_llm.serving.logs import start_logging

    start_logging(settings.log_level, settings.log_format)

    def load(on_step: Callable[..., None] | None) -> AsyncLLM:
        from aspire_llm.engine.async_llm import AsyncLLM

        return AsyncLLM(**config.model_dump(), on_step=on_step)

    serve(settings, load)


def resolve(args: argparse.Namespace) -> tuple[EngineConfig, ServerSettings]:
    """Defaults, then the file, then the command line. Raises UserError."""
    engine, server = read_config(args.config) if args.config is not None else ({}, {})
    given = engine_options(args)
    if args.model is not None:
        if given.get("model", args.model) != args.model:
            raise UserError(f"MODEL {args.model!r} and --model {given['model']!r}: give one", "model")
        given["model"] = args.model
    return make_config(**{**engine, **given}), make_settings(**{**server, **server_options(args)})


def as_yaml(config: EngineConfig, settings: ServerSettings) -> str:
    """A file for --config, but for the keys, which are hidden."""
    import yaml

    both: dict[str, Any] = {**config.model_dump(mode="json"), **settings.model_dump(mode="json")}
    return str(yaml.safe_dump(both, sort_keys=False, allow_unicode=True))
