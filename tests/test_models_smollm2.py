"""The built-in model against transformers on real text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from aspire_llm.models.convert import converted_folder
from aspire_llm.models.find import find_model
from aspire_llm.models.load import LoadedModel, load_model, load_tokenizer
from dense_attention import dense_attention

pytestmark = pytest.mark.model
TEXT = (Path(__file__).parents[1] / "LICENSE").read_text()


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2-135m", dtype=torch.float32, device="cpu")


def test_logits_equal_transformers_on_real_text(smollm2: LoadedModel) -> None:
    location = find_model("smollm2-135m")
    theirs = AutoModelForCausalLM.from_pretrained(
        converted_folder(location.path, location.sha256), dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.tensor(smollm2.tokenizer.encode(TEXT)[:400])
    assert len(tokens) == 400
    hidden = smollm2.decoder(tokens, torch.arange(400), dense_attention(smollm2.config, [400]))
    logits = smollm2.decoder.logits(hidden)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    # The text is predicted far better than chance: weights, rope and tokenizer are right, not merely equal.
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:])
    assert loss < 3.0


def test_facts(smollm2: LoadedModel) -> None:
    config = smollm2.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.max_position_embeddings == 8192
    assert config.kv_bytes_per_token(torch.float32) == 2 * 30 * 3 * 64 * 4
    assert smollm2.eos_token_ids == {smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert load_tokenizer("smollm2-135m").eos_token_ids == smollm2.eos_token_ids


def test_tokenizer_round_trip(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert [tokenizer.decode([i]) for i in tokenizer.encode("in  2024")] == ["in", "  ", "2", "0", "2", "4"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
