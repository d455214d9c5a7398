"""From what a user gives (text, token ids, chat messages; parameters) to requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from jinja2 import TemplateError

from aspire_llm.engine.text import StopAwareText
from aspire_llm.errors import UserError
from aspire_llm.request import Request, SamplingParams
from aspire_llm.sampling.bad_words import bad_words_token_ids
from aspire_llm.sampling.detokenize import TokenBytes

Prompt = (
    str | Sequence[int] | Mapping[str, Any]
)  # text, token ids, or {"prompt": …} / {"prompt_token_ids": …} as in vLLM
Message = Mapping[str, Any]  # {"role": …, "content": …}


class InputProcessor:
    """Makes requests. tokenizer: a transformers tokenizer, or None for token ids only."""

    def __init__(
        self,
        tokenizer: Any | None,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        default_seed: int,
        keys: Iterator[int] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._default_seed = default_seed
        self._table = TokenBytes(tokenizer) if tokenizer is not None else None
        self._keys = keys if keys is not None else itertools.count()

    @property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token. Raises UserError without a tokenizer."""
        if self._table is None:
            raise UserError("this model has no tokenizer")
        return self._table

    def requests(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> list[Request]:
        """One request for each of `params.n` continuations. Raises UserError."""
        token_ids = self.token_ids(prompt)
        if params.bad_words:
            words = bad_words_token_ids(params.bad_words, lambda text: self._encode(text, add_special_tokens=False))
            params = params.model_copy(update={"bad_words_token_ids": (*params.bad_words_token_ids, *words)})
        made = []
        for index in range(params.n):
            key = next(self._keys)
            name = request_id if request_id is not None else str(key)
            # continuations of one prompt differ in seed only; without a seed, requests differ by the engine's
            base = params.seed if params.seed is not None else self._default_seed + 1_000_003 * (key + 1)
            made.append(
                Request(
                    request_id=name if params.n == 1 else f"{name}-{index}",
                    key=key,
                    prompt_token_ids=token_ids,
                    params=params,
                    seed=base + index * 0x9E3779B9,
                    arrival=time.monotonic(),
                    eos_token_ids=self.eos_token_ids,
                    stream=StopAwareText(self._table, params) if self._table is not None else None,
                )
            )
        if self._table is None and params.stop:
            raise UserError(f"stop={list(params.stop)} needs a tokenizer, and this model has none", "stop")
        return made

    def token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                prompt = prompt["prompt_token_ids"]
            elif "prompt" in prompt:
                prompt = prompt["prompt"]
            else:
                raise UserError(f"prompt has keys {sorted(prompt)}; 'prompt' or 'prompt_token_ids' is needed", "prompt")
        if isinstance(prompt, str):
            return self._encode(prompt, add_special_tokens=True)
        token_ids: list[int] = list(cast(Sequence[int], prompt))
        if not token_ids:
            raise UserError("prompt is empty; at least 1 token is needed", "prompt")
        for token in token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise UserError(
                    f"prompt token {token!r} is not in the vocabulary; ids from 0 to {self.vocab_size - 1} are",
                    "prompt",
                )
        return token_ids

    def chat_token_ids(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the assistant's turn."""
        if self.tokenizer is None or getattr(self.tokenizer, "chat_template", None) is None:
            raise UserError("this model has no chat template; give the prompt as text or token ids", "messages")
        if not messages:
            raise UserError("messages is empty; at least 1 is needed", "messages")
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
                raise UserError(f"message {message!r} must be a mapping with 'role' and 'content'", "messages")
        options = {"add_generation_prompt": True, **template_options}
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # templates refuse conversations that they have no form for, and trip over odd ones
            raise UserError(f"the chat template refuses these messages: {error}", "messages") from error
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer; give prompts as token ids", "prompt")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("prompt has half of a surrogate pair, which is no text", "prompt") from None
        token_ids = list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        if not token_ids:
            raise UserError("prompt is empty; at least 1 token is needed", "prompt")
        return token_ids
