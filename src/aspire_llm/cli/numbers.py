"""Numbers on the command line, checked: a UserError names the option, what was given and what is allowed."""

from __future__ import annotations

import re

from aspire_llm.cli.options import comma_list
from aspire_llm.config import parse_size
from aspire_llm.errors import UserError


def whole_number(option: str, text: str, least: int) -> int:
    value: int | None
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least:
        raise UserError(f"{option} {text}: must be a whole number, at least {least}")
    return value


def whole_numbers(option: str, text: str, least: int) -> tuple[int, ...]:
    """Comma-separated, at least one, none twice."""
    numbers = tuple(whole_number(option, part, least) for part in comma_list(text))
    if not numbers or len(set(numbers)) < len(numbers):
        raise UserError(f"{option} {text!r}: must be one number or several different ones, separated by commas")
    return numbers


def length_range(text: str, option: str = "--prompt-tokens") -> tuple[int, int]:
    """ "4000-6000", "4000", "16K-18K" or "16-18K": K stands for 1,024, after the last number for both."""
    match = re.fullmatch(r"(\d+)([kK]?)(?:-(\d+)([kK]?))?", text)
    if match is not None:
        low = parse_size(match[1] + (match[2] or match[4] or ""))
        high = parse_size(match[3] + (match[4] or "")) if match[3] else low
        if 1 <= int(low) <= int(high):
            return int(low), int(high)
    raise UserError(f"{option} {text}: must be N or N-M tokens (such as 4000-6000 or 16-18K), with 1 <= N <= M")
