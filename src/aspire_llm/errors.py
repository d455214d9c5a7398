"""The one kind of error a user can cause."""

from __future__ import annotations

from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError


class UserError(ValueError):
    """Bad input: one line that names the value and what is allowed.

    The command line prints it and exits with code 2; the server answers 400. `parameter` is the option or field at fault.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


def explain(error: ValidationError, model: type[BaseModel]) -> UserError:
    """The first fault that pydantic found in `model`'s input, as one line: parameter, value, what is allowed."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):  # raised by a validator of ours: already says it all
        return cause
    location = first["loc"]
    name = str(location[0]) if location else None
    if first["type"] == "extra_forbidden":
        allowed = ", ".join(field.alias or key for key, field in model.model_fields.items())
        return UserError(f"unknown parameter {name!r}: allowed are {allowed}", name)
    if first["type"] == "missing":
        return UserError(f"parameter {name!r} is missing", name)
    wanted = first["msg"].removeprefix("Input should be ")
    if first["type"] in ("string_too_short", "too_short"):
        wanted = "not empty"
    elif (
        first["type"] in ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
        and name in model.model_fields
    ):
        wanted = _interval(model.model_fields[name].metadata) or wanted
    return UserError(f"{'.'.join(map(str, location))} = {_brief(first['input'])}: must be {wanted}", name)


def _interval(metadata: list[Any]) -> str:
    """The bounds of a field as an interval, such as "in (0, 1]"; empty where it has none."""
    low, high = "(-inf", "inf)"
    for bound in metadata:
        match bound:
            case Ge(ge):
                low = f"[{ge}"
            case Gt(gt):
                low = f"({gt}"
            case Le(le):
                high = f"{le}]"
            case Lt(lt):
                high = f"{lt})"
            case _:
                pass
    return "" if (low, high) == ("(-inf", "inf)") else f"in {low}, {high}"


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
