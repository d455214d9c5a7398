"""The command line: `aspire-llm COMMAND …`. A command is one file under `cli/commands`."""

from aspire_llm.cli.main import main

__all__ = ["main"]
