"""Files of rows and their formats: JSON lines, or one JSON array, in the shapes that data sets come in."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from aspire_llm.bench.datasets import Lengths
from aspire_llm.bench.workloads.longbench import longbench_prompt, longbench_v2_prompt
from aspire_llm.bench.workloads.rows import Row, RowDataset
from aspire_llm.config import read_text
from aspire_llm.errors import UserError

Json = Mapping[str, Any]

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
FEW_SHOT = frozenset(
    {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
)  # LongBench's, to be continued as text


def openai_row(row: Json, where: str) -> Row:
    """{"prompt": text}, {"messages": [{"role", "content"}, …]}, or a line of the batch API with one of these as "body"."""
    body = row["body"] if isinstance(row.get("body"), dict) else row
    if isinstance(body.get("prompt"), str):
        if not body["prompt"]:
            raise UserError(f"{where} has an empty prompt")
        return Row(text=body["prompt"])
    messages = body.get("messages")
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return Row(messages=[{**message, "content": _content(message["content"], where)} for message in messages])
    raise UserError(f'{where} must have "prompt" (text) or "messages" (a list of {{"role", "content"}})')


def sharegpt_row(row: Json, where: str) -> Row:
    """{"conversations": [{"from", "value"}, …]}: everything before the last answer, which is the answer."""
    turns = row.get("conversations")
    if not isinstance(turns, list) or not all(
        isinstance(t, dict) and isinstance(t.get("value"), str) and isinstance(t.get("from"), str) for t in turns
    ):
        raise UserError(f'{where} must have "conversations" (a list of {{"from", "value"}})')
    if any(turn["from"] not in ROLES for turn in turns):
        return Row(unusable="rows with a speaker who is neither user nor assistant")
    messages = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
    answers: tuple[str, ...] = ()
    while messages and messages[-1]["role"] != "user":
        answers = (messages.pop()["content"],)
    while messages and messages[0]["role"] == "assistant":  # a conversation cut out of a longer one
        messages.pop(0)
    if not messages:
        return Row(unusable="rows without a user's turn")
    return Row(messages=messages, answers=answers)


def longbench_row(row: Json, where: str) -> Row:
    """{"input", "context", "answers", "dataset", …}, or LongBench v2's {"context", "question", "choice_A", …, "answer"}."""
    if isinstance(row.get("context"), str) and isinstance(row.get("question"), str) and "choice_A" in row:
        choices = {letter: str(row.get(f"choice_{letter}", "")) for letter in "ABCD"}
        text = longbench_v2_prompt(row["context"], row["question"], choices)
        return Row(text=text, ask=True, answers=_answers(row.get("answer"), where), task="longbench-v2")
    if not isinstance(row.get("context"), str) or not isinstance(row.get("input"), str):
        raise UserError(f'{where} must have "context" and "input" (texts), as LongBench\'s rows have')
    task = str(row.get("dataset") or "")
    text = longbench_prompt(task, row["context"], row["input"])
    return Row(text=text, ask=task not in FEW_SHOT, answers=_answers(row.get("answers"), where), task=task or None)


def aime_row(row: Json, where: str) -> Row:
    """{"prompt", "answer"}: a problem whose answer is a number."""
    if not isinstance(row.get("prompt"), str) or not row["prompt"] or "answer" not in row:
        raise UserError(f'{where} must have "prompt" (text) and "answer"')
    return Row(text=row["prompt"], ask=True, answers=(str(row["answer"]),), task="aime")


def livecodebench_row(row: Json, where: str) -> Row:
    """{"prompt", "question_id", …}: a programming problem; its tests are not run."""
    if not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise UserError(f'{where} must have "prompt" (text)')
    return Row(text=row["prompt"], ask=True, task="livecodebench")


def ruler_row(row: Json, where: str) -> Row:
    """{"input", "outputs"}: RULER's rows; every output must come."""
    if not isinstance(row.get("input"), str) or not row["input"]:
        raise UserError(f'{where} must have "input" (text) and "outputs"')
    return Row(text=row["input"], answers=_answers(row.get("outputs"), where), task="ruler")


FORMATS: Mapping[str, Callable[[Json, str], Row]] = {
    "openai": openai_row,
    "sharegpt": sharegpt_row,
    "longbench": longbench_row,
    "aime": aime_row,
    "livecodebench": livecodebench_row,
    "ruler": ruler_row,
}


def recognise(row: Json) -> str | None:
    """The format of a file with this row; None: none that is known."""
    keys = row.keys()
    if "messages" in keys or "body" in keys:
        return "openai"
    if "conversations" in keys:
        return "sharegpt"
    if "context" in keys and ("input" in keys or "choice_A" in keys):
        return "longbench"
    if "input" in keys and "outputs" in keys:
        return "ruler"
    if "prompt" in keys:
        if "question_id" in keys or "contest_id" in keys:
            return "livecodebench"
        return "aime" if "answer" in keys else "openai"
    return None


def read_rows(path: str, named: str | None = None, lengths: Lengths | None = None) -> RowDataset:
    """named: the format, else that of the first row. Raises UserError naming the file (and line) at fault."""
    text = read_text(path, "dataset")
    if not text.strip():
        raise UserError(f"dataset {path!r} is empty")
    found = _array(text, path) if text.lstrip().startswith("[") and not path.endswith(".jsonl") else _lines(text, path)
    if not found:
        raise UserError(f"dataset {path!r} is empty")
    where, first = found[0]
    name = named or recognise(first)
    if name is None:
        raise UserError(
            f'{where} is of no known shape: it has {", ".join(map(repr, first)) or "nothing"}; known are "prompt", "messages", '
            f'"conversations", "context" with "input" (formats {", ".join(FORMATS)})'
        )
    read = FORMATS[name]
    return RowDataset(path, [read(row, where) for where, row in found], name, lengths)


def _lines(text: str, path: str) -> list[tuple[str, Json]]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        where = f"line {number} of dataset {path!r}"
        if line.strip():
            rows.append((where, _object(_parse(line, where), where)))
    return rows


def _array(text: str, path: str) -> list[tuple[str, Json]]:
    rows = _parse(text, f"dataset {path!r}")
    wheres = [f"row {number} of dataset {path!r}" for number in range(1, len(rows) + 1)]
    return [(where, _object(row, where)) for where, row in zip(wheres, rows, strict=True)]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg}") from None


def _object(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object")
    return value


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list)
    )


def _content(content: str | list[Any], where: str) -> str:
    """A message's text; of a list of parts, that of all."""
    if isinstance(content, str):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(f'{where} has a part of content that is not {{"type": "text", "text"}}')
    return "".join(part["text"] for part in content)


def _answers(value: Any, where: str) -> tuple[str, ...]:
    """A list of answers, one answer, or (as some copies of LongBench have it) a list written out as Python does."""
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
    if value is None:
        return ()
    if isinstance(value, str | int | float):
        return (str(value),)
    if isinstance(value, list) and all(isinstance(answer, str | int | float) for answer in value):
        return tuple(map(str, value))
    raise UserError(f"{where} has answers that are not texts")
