"""What the measuring commands share: a model, prompts for it, and the drafting context that an engine would use."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aspire_llm.cli.numbers import length_range, whole_number
from aspire_llm.cli.options import add_engine_options, engine_options
from aspire_llm.config import EngineConfig, make_config
from aspire_llm.errors import UserError

if TYPE_CHECKING:
    from aspire_llm.analysis.recorder import Drafts, Method, Recorder
    from aspire_llm.bench.datasets import Dataset, Selection
    from aspire_llm.cli.progress import ProgressBars
    from aspire_llm.models.load import LoadedModel

DEFAULT_REQUESTS = 4
MODEL_OPTIONS = frozenset({"model", "tokenizer", "load_format", "device", "dtype"})
CONTEXT_OPTIONS = frozenset({"context", "budget", "refresh_layers", "profile"})


def add_workload_options(parser: argparse.ArgumentParser, engine: frozenset[str] = MODEL_OPTIONS) -> None:
    """engine: which engine options the command takes."""
    add_dataset_options(parser, "shipped tasks")
    parser.add_argument("--requests", metavar="N", help=f"how many prompts (default {DEFAULT_REQUESTS})")
    parser.add_argument("--seed", metavar="N", help="chooses the places in the text, or the rows (default 0)")
    add_engine_options(parser, exclude=EngineConfig.model_fields.keys() - engine)


def add_dataset_options(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--dataset",
        metavar="NAME",
        help="where prompts come from: a file (.jsonl or .json rows, else text), a folder of texts, needles, random, or text "
        f"(shipped) (default: {default})",
    )
    parser.add_argument(
        "--dataset-format",
        metavar="NAME",
        help="of the file: openai, sharegpt, longbench, aime, livecodebench, ruler, text (default: told by its first row)",
    )
    parser.add_argument(
        "--prompt-tokens",
        metavar="N-M",
        help="lengths of prompts, such as 16-18K: rows that have them, or what is cut or made to them",
    )
    parser.add_argument("--needles", metavar="N", help="facts in each prompt of dataset needles (default 8)")


def dataset_of(args: argparse.Namespace, default: str | None) -> Dataset:
    """The dataset that the options name, else the one called `default`; None: the demo's tasks, or, where lengths are
    given, the shipped text. Imports torch. Raises UserError."""
    from aspire_llm.bench.presets import demo_dataset
    from aspire_llm.bench.workloads.named import open_dataset

    lengths = length_range(args.prompt_tokens) if args.prompt_tokens is not None else None
    needles = whole_number("--needles", args.needles, 1) if args.needles is not None else None
    name = args.dataset or default or ("text" if lengths is not None else None)
    if name is not None:
        return open_dataset(name, args.dataset_format, lengths, needles)
    for option, given in (("--dataset-format", args.dataset_format), ("--needles", args.needles)):
        if given is not None:
            raise UserError(f"{option} {given} does nothing without --dataset")
    return demo_dataset()


def skipped_note(skipped: dict[str, int]) -> str:
    """For the console: what of a dataset was left out; empty where nothing was."""
    return "skipped: " + ", ".join(f"{n} {reason}" for reason, n in skipped.items()) if skipped else ""


def add_draft_options(parser: argparse.ArgumentParser, *, starts: int, stride: int) -> None:
    parser.add_argument("--starts", metavar="N", help=f"positions of each output to draft from (default {starts})")
    parser.add_argument("--stride", metavar="N", help=f"from one start to the next (default {stride})")
    parser.add_argument("--first-start", metavar="N", help="output tokens before the first start (default 8)")
    parser.add_argument("--draft-tokens", metavar="N", help="length of each draft (default 16)")
    parser.set_defaults(default_starts=starts, default_stride=stride)


@dataclass(frozen=True, slots=True)
class Places:
    """Where to draft, and how far."""

    starts: tuple[int, ...]
    stride: int
    draft_tokens: int

    @property
    def num_output(self) -> int:
        return self.starts[-1] + self.draft_tokens


def places(args: argparse.Namespace) -> Places:
    """Raises UserError."""
    count = whole_number("--starts", args.starts or str(args.default_starts), 1)
    stride = whole_number("--stride", args.stride or str(args.default_stride), 1)
    first = whole_number("--first-start", args.first_start or "8", 1)
    drafts = whole_number("--draft-tokens", args.draft_tokens or "16", 1)
    return Places(tuple(first + stride * i for i in range(count)), stride, drafts)


@dataclass(frozen=True, slots=True)
class Workload:
    """A loaded model and the prompts it is measured on."""

    config: EngineConfig
    model: LoadedModel
    dataset: str
    format: str
    seed: int
    selection: Selection

    @property
    def prompts(self) -> list[list[int]]:
        return self.selection.prompts


def load_workload(args: argparse.Namespace, num_output: int, **defaults: Any) -> Workload:
    """Read the dataset, load the model, choose prompts that leave room for `num_output` tokens. defaults: engine options
    where the command's are not the engine's own. Raises UserError."""
    requests, seed = requests_and_seed(args)
    config = make_config(**{**defaults, **engine_options(args)})
    # torch is imported from here on
    from aspire_llm.engine.build import load

    dataset = dataset_of(args, None)
    workload = choose_prompts(config, load(config), dataset, requests, seed, num_output)
    if workload.selection.skipped:
        print(skipped_note(workload.selection.skipped), file=sys.stderr)
    return workload


def requests_and_seed(args: argparse.Namespace) -> tuple[int, int]:
    """Raises UserError."""
    return (
        whole_number("--requests", args.requests or str(DEFAULT_REQUESTS), 1),
        whole_number("--seed", args.seed or "0", 0),
    )


def choose_prompts(
    config: EngineConfig, model: LoadedModel, dataset: Dataset, requests: int, seed: int, num_output: int
) -> Workload:
    """Prompts that leave room for `num_output` tokens. Raises UserError."""
    from aspire_llm.engine.inputs import InputProcessor

    context = config.max_model_len or model.config.max_position_embeddings
    if num_output >= context:
        raise UserError(f"{num_output} tokens of output: the model's context of {context} leaves no room for a prompt")
    inputs = InputProcessor(model.tokenizer, model.config.vocab_size, model.eos_token_ids, config.seed)
    selection = dataset.select(inputs, requests, context - num_output, seed)
    return Workload(config, model, dataset.name, dataset.format, seed, selection)


def method_of(workload: Workload) -> Method:
    """The drafting context that an engine with these options would use: profile, then penultimate layer, as there."""
    from aspire_llm.analysis.recorder import Method
    from aspire_llm.context.profile import find_profile
    from aspire_llm.engine.build import drafting_context

    config, model = workload.config, workload.model
    settings = drafting_context(config, find_profile(config.profile, model.fingerprint))
    context = config.context or config.preset.context
    assert context is not None
    if context != "refreshed":
        return Method(context, settings.budget)
    return Method(context, settings.budget, settings.refresh_layers or penultimate(model), settings.verified_share)


def penultimate(model: LoadedModel) -> tuple[int, ...]:
    full = [layer for layer, window in enumerate(model.config.windows) if window is None]
    return tuple(full[max(0, len(full) - 2) :][:1])


def prefilled(workload: Workload, num_output: int, bars: ProgressBars) -> Recorder:
    """A recorder that has decoded every prompt plainly."""
    from aspire_llm.analysis.recorder import Recorder

    recorder = Recorder(workload.model, workload.prompts, num_output)
    most = sum(map(len, workload.prompts)) + len(workload.prompts) * (num_output - 1)
    recorder.decode(lambda n: bars.show("prefill and plain decoding", n, most))
    return recorder


def record(recorder: Recorder, method: Method, where: Places, bars: ProgressBars) -> Drafts:
    """Raises UserError where no output is long enough to be drafted from."""
    requests = range(len(recorder.prompts))
    count = sum(recorder.has_start(r, s, where.draft_tokens) for r in requests for s in where.starts)
    if not count:
        longest = max(map(len, recorder.continuations))
        raise UserError(
            f"--first-start {where.starts[0]} with drafts of {where.draft_tokens}: the model's answers end after at most "
            f"{longest} tokens"
        )
    if min(map(len, recorder.prompts)) <= method.budget:
        raise UserError(
            f"budget {method.budget}: the shortest prompt has {min(map(len, recorder.prompts))} tokens, so nothing would be "
            "left out; take longer prompts or a smaller --budget"
        )
    most = count * where.draft_tokens
    return recorder.record(
        method, where.starts, where.draft_tokens, lambda n: bars.show(f"drafting: {method.name}", n, most)
    )
