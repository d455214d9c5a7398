"""The whole engine on a real model and real text: tokens as transformers gives them, log-probabilities as a rescoring does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aspire_llm import LLM, SamplingParams
from aspire_llm.bench.datasets import shipped_text
from aspire_llm.config import METHODS
from aspire_llm.models.convert import converted_folder
from aspire_llm.models.find import find_model
from aspire_llm.policy.cost import CostModel
from dense_attention import dense_attention

pytestmark = pytest.mark.model
LENGTHS = (40, 300, 620)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("smollm2-135m", method="plain", max_num_seqs=4, max_model_len=1024, kv_cache_memory="400M")


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[list[int]]:
    tokens = plain.get_tokenizer()(shipped_text("jargon_lexicon.txt")[50_000:58_000])["input_ids"]
    return [tokens[i * 500 : i * 500 + n] for i, n in enumerate(LENGTHS)]


def drafting(plain: LLM, method: str, **options: Any) -> LLM:
    """An engine on the same model and cache. Its costs favour drafts, so that they are made whatever the machine does."""
    return LLM(
        "smollm2-135m", method=method, loaded=plain.model, cache=plain.cache, cost=CostModel(1.0, 1e-6, 1e-4),
        max_num_seqs=4, max_model_len=1024, budget=128, **options,
    )  # fmt: skip


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_every_method_equals_transformers(plain: LLM, prompts: list[list[int]]) -> None:
    from transformers import AutoModelForCausalLM

    location = find_model("smollm2-135m")
    oracle = AutoModelForCausalLM.from_pretrained(converted_folder(location.path, location.sha256), dtype=torch.float32)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = []
    for prompt in prompts:
        text = oracle.generate(torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False)
        expected.append(text[0, len(prompt) :].tolist())
    del oracle
    assert tokens_of(plain, prompts, params) == expected
    for method, preset in METHODS.items():
        if preset.context is None:
            continue
        outputs = drafting(plain, method).generate(prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == expected, method
        stats = [o.metrics.speculative_decoding for o in outputs if o.metrics is not None]
        assert sum(s["num_accepted_draft_tokens"] for s in stats) > 0, method


def test_logprobs_equal_a_rescoring(plain: LLM, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=20, ignore_eos=True, logprobs=3)
    for output in drafting(plain, "aspire").generate(prompts, params):
        completion = output.outputs[0]
        text = torch.tensor(output.prompt_token_ids + completion.token_ids)
        decoder = plain.model.decoder
        hidden = decoder(text, torch.arange(len(text)), dense_attention(decoder.config, [len(text)]))
        start = len(output.prompt_token_ids)
        reference = torch.log_softmax(decoder.logits(hidden[start - 1 : -1]), dim=-1)
        assert completion.logprobs is not None
        for row, entry in zip(reference, completion.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            assert [p for _, p in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.5, "min_p": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 1},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"temperature": 0.0, "bad_words": ["the", "of"], "logit_bias": {"28": 100.0}},
        {"temperature": 0.0, "min_tokens": 16, "max_tokens": 16},
        {"temperature": 0.0, "stop": ["e"], "include_stop_str_in_output": True},
        {"temperature": 0.0, "max_tokens": 1},
    ],
    ids=lambda p: "+".join(p),
)
def test_parameters_at_their_edges(plain: LLM, prompts: list[list[int]], params: dict[str, Any]) -> None:
    """Drafted and plain decoding give the same tokens and text, and each parameter does what it says."""
    sampling = SamplingParams(**{"max_tokens": 16, **params})
    expected = plain.generate(prompts, sampling)
    for ours, theirs in zip(drafting(plain, "aspire").generate(prompts, sampling), expected, strict=True):
        a, b = ours.outputs[0], theirs.outputs[0]
        assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (
            b.token_ids,
            b.text,
            b.finish_reason,
            b.stop_reason,
        )
        if params.get("top_k") == 1 or "min_p" in params or params.get("top_p") == 1e-6:
            greedy = plain.generate([ours.prompt_token_ids], SamplingParams(temperature=0.0, max_tokens=16))
            assert a.token_ids == greedy[0].outputs[0].token_ids  # nothing but the likeliest token is left
        if "stop" in params:
            assert a.text.endswith("e") == (a.finish_reason == "stop")
            assert a.text.count("e") == (a.finish_reason == "stop")
        if "logit_bias" in params:
            assert set(a.token_ids) <= {28, *plain.model.eos_token_ids}
