"""Generate text from prompts.

The text of a single prompt appears as it is generated; of several, each when it is done, in the order given. Statistics go
to stderr. Decoding is greedy unless --temperature says otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from aspire_llm.cli.options import add_engine_options, add_sampling_options, engine_options, sampling_params
from aspire_llm.cli.output_file import OutputFile
from aspire_llm.config import make_config, read_text
from aspire_llm.errors import UserError
from aspire_llm.request import Request, RequestOutput

if TYPE_CHECKING:
    from aspire_llm.engine.engine import Step
    from aspire_llm.engine.llm import LLM

DEFAULTS = {"temperature": 0.0, "max_tokens": 200}
MOST_AT_ONCE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_argument_group("prompts (at least one; given ones are decoded together)")
    prompts.add_argument(
        "--prompt",
        dest="prompts",
        action="append",
        type=lambda text: ("--prompt", text),
        metavar="TEXT",
        help="may be repeated",
    )
    prompts.add_argument(
        "--prompt-file",
        dest="prompts",
        action="append",
        type=lambda path: ("--prompt-file", path),
        metavar="FILE",
        help="a text file, UTF-8; - is standard input; may be repeated",
    )
    prompts.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message, under the model's chat template"
    )
    prompts.add_argument("--system", metavar="TEXT", help="system message; with --chat")
    parser.add_argument("--json", metavar="FILE", help="write outputs and the statistics of each request")
    add_sampling_options(parser, defaults=DEFAULTS)
    add_engine_options(parser, exclude=("seed",))  # --seed is the requests'


def run(args: argparse.Namespace) -> None:
    params = sampling_params(args, defaults=DEFAULTS)
    prompts = read_prompts(args.prompts or [])
    if args.system is not None and not args.chat:
        raise UserError("--system does nothing without --chat")
    options = {"max_num_seqs": min(len(prompts) * params.n, MOST_AT_ONCE), **engine_options(args)}
    make_config(**options)  # refuse bad options before anything slow is done
    with OutputFile(args.json, "--json") as out:
        from aspire_llm.engine.llm import LLM

        llm = LLM(**options)
        inputs = [conversation(llm, prompt, args.system) if args.chat else prompt for prompt in prompts]
        groups = [llm.inputs.requests(prompt, params) for prompt in inputs]
        printer = Printer(groups)
        outputs = llm.run(groups, prompts, printer)
        printer.finish()
        print_statistics(outputs)
        if args.json is not None:
            out.write_json(
                {"model": llm.config.model, "method": llm.config.method, "outputs": [asdict(o) for o in outputs]}
            )
    failed = [output for output in outputs if output.error is not None]
    if failed:
        raise UserError(f"request {failed[0].request_id} failed: {failed[0].error}")


def read_prompts(given: Sequence[tuple[str, str]]) -> list[str]:
    if not given:
        raise UserError("no prompt; give --prompt TEXT or --prompt-file FILE")
    prompts = []
    for option, value in given:
        if option == "--prompt":
            text = value
        elif value == "-":
            text = sys.stdin.read()
        else:
            text = read_text(value, option)
        if not text:
            where = "--prompt" if option == "--prompt" else f"{option} {value}"
            raise UserError(f"{where} is empty; at least 1 token is needed")
        prompts.append(text)
    return prompts


def conversation(llm: LLM, prompt: str, system: str | None) -> list[int]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.inputs.chat_token_ids([*messages, {"role": "user", "content": prompt}])


class Printer:
    """Writes texts to stdout after each step: of a lone request what is new, of several those that are done and next."""

    def __init__(self, groups: Sequence[Sequence[Request]]) -> None:
        self._requests = [request for group in groups for request in group]
        self._names = [
            f"prompt {i + 1}" + (f", continuation {j + 1}" if len(group) > 1 else "")
            for i, group in enumerate(groups)
            for j in range(len(group))
        ]
        self._written = 0  # characters of a lone request's text, else requests

    def __call__(self, step: Step) -> None:
        if len(self._requests) == 1:
            text = self._text(self._requests[0])
            print(text[self._written :], end="", flush=True)
            self._written = len(text)
            return
        while self._written < len(self._requests) and self._requests[self._written].finished:
            print(f"=== {self._names[self._written]}\n{self._text(self._requests[self._written])}", flush=True)
            self._written += 1

    def finish(self) -> None:
        if len(self._requests) == 1:
            print(flush=True)

    def _text(self, request: Request) -> str:
        if request.stream is None:  # a model without a tokenizer
            return " ".join(map(str, request.output_token_ids))
        return request.stream.text


def print_statistics(outputs: Sequence[RequestOutput]) -> None:
    for i, output in enumerate(outputs):
        metrics = output.metrics
        assert metrics is not None
        tokens = sum(len(completion.token_ids) for completion in output.outputs)
        speculation: dict[str, Any] = metrics.speculative_decoding
        parts = [
            f"{len(output.prompt_token_ids)} prompt tokens",
            f"{tokens} tokens out",
            f"{metrics.time_to_first_token:.1f} s to the first",
        ]
        if metrics.time_per_output_token > 0:
            parts.append(f"then {1 / metrics.time_per_output_token:.1f} tokens/s")
        if speculation["num_draft_tokens"]:
            parts.append(f"mean accepted length {speculation['mean_acceptance_length']:.2f}")
            parts.append(f"{speculation['draft_acceptance_rate']:.0%} of drafts accepted")
        name = f"prompt {i + 1}: " if len(outputs) > 1 else ""
        print(f"[{name}{', '.join(parts)}]", file=sys.stderr)
