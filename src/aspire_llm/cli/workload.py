"""What the measuring commands share: a model, prompts for it, and the drafting context that an engine would use."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aspire_llm.cli.commands.bench.offline import length_range, whole_number
from aspire_llm.cli.options import add_engine_options, engine_options
from aspire_llm.config import EngineConfig, make_config
from aspire_llm.errors import UserError

if TYPE_CHECKING:
    from aspire_llm.analysis.recorder import Drafts, Method, Recorder
    from aspire_llm.cli.progress import ProgressBars
    from aspire_llm.models.load import LoadedModel

DEFAULT_REQUESTS = 4
MODEL_OPTIONS = frozenset({"model", "tokenizer", "load_format", "device", "dtype"})
CONTEXT_OPTIONS = frozenset({"context", "budget", "refresh_layers", "profile"})


def add_workload_options(parser: argparse.ArgumentParser, engine: frozenset[str] = MODEL_OPTIONS) -> None:
    """engine: which engine options the command takes."""
    parser.add_argument(
        "--dataset", metavar="FILE", help="where prompts come from: a text file or .jsonl (default: shipped tasks)"
    )
    parser.add_argument("--prompt-tokens", metavar="N-M", help="lengths of the pieces that a text is cut into")
    parser.add_argument("--requests", metavar="N", help=f"how many prompts (default {DEFAULT_REQUESTS})")
    parser.add_argument("--seed", metavar="N", help="chooses the places in the text, or the rows (default 0)")
    add_engine_options(parser, exclude=EngineConfig.model_fields.keys() - engine)


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
    seed: int
    prompts: list[list[int]]


def load_workload(args: argparse.Namespace, num_output: int, **defaults: Any) -> Workload:
    """Read the dataset, load the model, choose prompts that leave room for `num_output` tokens. defaults: engine options
    where the command's are not the engine's own. Raises UserError."""
    requests = whole_number("--requests", args.requests or str(DEFAULT_REQUESTS), 1)
    seed = whole_number("--seed", args.seed or "0", 0)
    lengths = length_range(args.prompt_tokens) if args.prompt_tokens is not None else None
    config = make_config(**{**defaults, **engine_options(args)})
    # torch is imported from here on
    from aspire_llm.bench.datasets import read_dataset
    from aspire_llm.bench.presets import default_dataset, demo_dataset
    from aspire_llm.engine.build import load
    from aspire_llm.engine.inputs import InputProcessor

    if args.dataset is not None:
        dataset, name = read_dataset(args.dataset, lengths), args.dataset
    elif lengths is not None:
        dataset, name = default_dataset(lengths), "shipped text"
    else:
        dataset, name = demo_dataset(), "shipped tasks"
    model = load(config)
    room = model.config.max_position_embeddings - num_output
    if room < 1:
        raise UserError(
            f"{num_output} tokens of output: the model's context of {model.config.max_position_embeddings} "
            "leaves no room for a prompt"
        )
    inputs = InputProcessor(model.tokenizer, model.config.vocab_size, model.eos_token_ids, config.seed)
    return Workload(config, model, name, seed, dataset.prompts(inputs, requests, room, seed))


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
