"""`LLM`: the engine as a Python object, with the names that vLLM users know."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from aspire_llm.config import EngineConfig, make_config
from aspire_llm.context.selectors import SelectorFactory
from aspire_llm.engine.build import Cache, build_engine, load
from aspire_llm.engine.engine import Engine, Step
from aspire_llm.engine.garbage import rare_collections
from aspire_llm.engine.inputs import InputProcessor, Message, Prompt
from aspire_llm.engine.metrics import EngineMetrics, Metric
from aspire_llm.engine.outputs import request_output
from aspire_llm.errors import UserError
from aspire_llm.models.load import LoadedModel
from aspire_llm.policy.base import Policy
from aspire_llm.policy.cost import CostModel
from aspire_llm.policy.hindsight import Truth
from aspire_llm.request import Request, RequestOutput, SamplingParams

OnStep = Callable[[Step], None]

logger = logging.getLogger("aspire_llm.engine")


class LLM:
    """A model and an engine that decodes batches of prompts.

    Options are those of `EngineConfig`, as keywords:

        llm = LLM("smollm2-135m", method="aspire")
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=128)):
            print(output.outputs[0].text)

    - `loaded`, `cache`: another LLM's `model` and `cache`, to compare methods on the same prompts without loading or
      prefilling twice. Only one of the two may have work at a time.
    - `cost`: another LLM's `engine.cost` on this machine, to start from instead of measuring at start-up.
    - `policy_object`: a `Policy` to use instead of the method's.
    - `selector_factory`: makes the `Selector` to use instead of the method's.
    - `truth`: for policy "hindsight", which is told the continuation.

    Raises UserError for bad options.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        loaded: LoadedModel | None = None,
        cache: Cache | None = None,
        cost: CostModel | None = None,
        policy_object: Policy | None = None,
        selector_factory: SelectorFactory | None = None,
        truth: Truth | None = None,
        **options: Any,
    ) -> None:
        self.config: EngineConfig = make_config(model=model, **options)
        self.model = loaded if loaded is not None else load(self.config)
        built = build_engine(
            self.config,
            self.model,
            cache,
            cost=cost,
            policy=policy_object,
            selector_factory=selector_factory,
            truth=truth,
        )
        self.engine: Engine = built.engine
        for line in built.startup:
            logger.info(line)
        self.cache: Cache = built.cache  # to hand to another LLM of the same model while this one is idle
        selector = self.engine.runner.selector
        self.metrics = EngineMetrics(
            self.engine.scheduler,
            self.engine.cost,
            prefix_caching=self.config.enable_prefix_caching,
            num_refresh_layers=len(selector.refresh_layers) if selector is not None else 0,
        )
        self.inputs = InputProcessor(
            self.model.tokenizer, self.model.config.vocab_size, self.model.eos_token_ids, self.config.seed
        )

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, of transformers; None where it has none."""
        return self.model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Decode a batch to its end; outputs in the order of the prompts.

        - `prompts`: text, token ids, {"prompt": …} or {"prompt_token_ids": …}, or a list of these.
        - `sampling_params`: one for all, or one each.
        - `on_step`: called after every engine step.

        Raises UserError if any prompt or parameter is bad; nothing is started then.
        """
        many = prompt_list(prompts)
        params = sampling_params if sampling_params is not None else SamplingParams()
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise UserError(f"sampling_params has {len(each)} entries for {len(many)} prompts; give one, or one each")
        groups = [self.inputs.requests(prompt, p) for prompt, p in zip(many, each, strict=True)]
        return self.run(groups, [p if isinstance(p, str) else None for p in many], on_step)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, of one conversation (a list of {"role", "content"}) or a list of conversations."""
        conversations: Sequence[Any] = messages if messages and not isinstance(messages[0], dict) else [messages]
        prompts = [self.inputs.chat_token_ids(c, **(chat_template_kwargs or {})) for c in conversations]
        return self.generate(prompts, sampling_params, on_step=on_step)

    def run(
        self, groups: Sequence[list[Request]], prompts: Sequence[str | None], on_step: OnStep | None
    ) -> list[RequestOutput]:
        """Drive the engine until every request of every group (the continuations of one prompt) is done."""
        requests = [request for group in groups for request in group]
        self.engine.validate(requests)
        try:
            for request in requests:
                self.engine.add(request)
            with rare_collections():
                while self.engine.has_work:
                    step = self.engine.step()
                    self.metrics.on_step(step)
                    if on_step is not None:
                        on_step(step)
        except BaseException:  # the user's interrupt, say: leave nothing behind
            for request in requests:
                self.engine.abort(request)
            raise
        return [
            request_output(group[0].request_id.removesuffix("-0"), prompt, group)
            for group, prompt in zip(groups, prompts, strict=True)
        ]

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms as they are now, under vLLM's names."""
        return self.metrics.snapshot()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.engine.scheduler.pages.reset_prefix_cache()


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A lone prompt as a list of one. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not prompts:
        raise UserError("prompts is empty; at least 1 is needed", "prompts")
    if isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))
