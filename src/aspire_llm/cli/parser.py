"""The argument parser, made of the modules under `cli/commands`.

A command is a module there: its docstring is its help, `add_arguments(parser)` declares its options, `run(args)` does its
work. A package there is a group of commands (`bench offline`). Modules are found, not listed, and must import nothing heavy
(torch, transformers) before `run`, so that `--help` stays quick.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from aspire_llm import __version__
from aspire_llm.cli import commands
from aspire_llm.errors import UserError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UserErrors: one line, no usage."""

    def __init__(self, **settings: object) -> None:
        super().__init__(
            allow_abbrev=False,  # a shortened option would change meaning when another is added
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **settings,  # type: ignore[arg-type]
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help tells more)")


def make_parser() -> Parser:
    parser = Parser(
        prog="aspire-llm", description="Long-context LLM decoding by asynchronous, batched self-speculation."
    )
    parser.add_argument("--version", action="version", version=f"aspire-llm {__version__}")
    _add_commands(parser, commands)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The chosen command's arguments; `run` is its function. Raises UserError."""
    args, unknown = make_parser().parse_known_args(argv)
    if unknown:
        raise UserError(_about_unknown(unknown[0], args.parser))
    return args


def _add_commands(parser: argparse.ArgumentParser, package: ModuleType) -> None:
    choices = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        text = (module.__doc__ or "").strip()
        command = choices.add_parser(
            found.name.replace("_", "-"), help=text.split("\n")[0].rstrip("."), description=text
        )
        if found.ispkg:
            _add_commands(command, module)
        else:
            module.add_arguments(command)
            command.set_defaults(run=module.run, parser=command)


def _about_unknown(argument: str, parser: argparse.ArgumentParser) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r} ({parser.prog} --help tells more)"
    name = argument.split("=")[0]
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown option {name}{hint} ({parser.prog} --help lists the known ones)"
