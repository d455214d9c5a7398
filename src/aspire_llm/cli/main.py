"""Entry point: finds the command, runs it, and turns what goes wrong into a line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from aspire_llm.cli.parser import parse
from aspire_llm.errors import UserError

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PIPE_CLOSED = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run `aspire-llm` with `argv` (default: the process's own) and return its exit code.

    0: done; 2: bad input, with one line `error: …` on stderr; 130: interrupted; 141: the reader of the output went away.
    """
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        args.run(args)
        sys.stdout.flush()
        return 0
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # what is still buffered must not fail again when the interpreter flushes it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
