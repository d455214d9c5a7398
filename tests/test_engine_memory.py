"""Room for the KV cache on a GPU: beside what the engine's widest step takes. No GPU is needed to say how much that is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from aspire_llm.attention.triton.backend import TritonBackend
from aspire_llm.cache.pool import KVPool
from aspire_llm.config import EngineConfig
from aspire_llm.engine.build import most_decoded, resolve
from aspire_llm.engine.memory import META, bytes_beside_pages, choose_num_pages, tensor_bytes
from aspire_llm.errors import UserError
from aspire_llm.models.config import DecoderConfig
from aspire_llm.scheduler.scheduler import Limits
from tiny import tiny_config

pytestmark = pytest.mark.kernel
GIB = 1 << 30
CPU = torch.device("cpu")


def beside(shape: DecoderConfig, limits: Limits, method: str = "aspire", decoded: int = 64) -> int:
    config = EngineConfig(
        model="tiny", method=method, max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len
    )
    return bytes_beside_pages(shape, limits, config, CPU, torch.bfloat16, 512, decoded, graph_tokens=decoded)


def test_buffers_without_memory_are_as_large_as_those_with() -> None:
    shape = tiny_config()
    for device in (CPU, META):
        pool = KVPool(shape.num_layers, shape.num_kv_heads, shape.head_dim, 4, 16, torch.float32, device)
        backend = TritonBackend(
            pool, num_heads=shape.num_heads, scale=1.0, windows=shape.windows, max_tokens=40, max_rows=5, max_len=64,
            refresh_layers=[1], score_layers=[0, 1],
        )  # fmt: skip
        held = tensor_bytes(backend)
        if device == CPU:
            there = held
    assert held == there > 0


def test_what_the_widest_step_takes_grows_with_it() -> None:
    shape = replace(tiny_config(), vocab_size=50_000)
    limits = Limits(32, 2048, 4096, 16, min_last_chunk=1)
    least = beside(shape, limits)
    assert least > GIB // 2
    for larger in (
        replace(limits, max_num_seqs=64),
        replace(limits, max_num_batched_tokens=8192),
        replace(limits, max_model_len=32_768),
    ):
        assert beside(shape, larger) > least
    assert beside(replace(shape, vocab_size=150_000), limits) == least + 64 * 100_000 * (2 + 8 + 2)
    assert beside(shape, replace(limits, max_draft_tokens=0), "plain") < least  # no scores, no sets


def test_a_batch_in_step_has_logits_of_all_its_drafts_at_once() -> None:
    limits = Limits(100, 2048, 4096, 16, min_last_chunk=1)
    assert most_decoded(limits, "lockstep", 6, 400) == 700
    assert most_decoded(limits, "confidence", 6, 400) == 500  # the bound on verified tokens, and the others' drafts
    assert most_decoded(limits, "confidence", 6, 4000) == 1700
    assert most_decoded(limits, "hindsight", 6, 400) == 1700
    assert most_decoded(replace(limits, max_draft_tokens=0), "autoregressive", 0, 400) == 100


def test_pages_leave_room_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    gpu = torch.device("cuda")
    config = EngineConfig(model="tiny", max_num_seqs=1000, gpu_memory_utilization=0.75)
    assert choose_num_pages(config, GIB // 4, 100, gpu, beside=10 * GIB) == 4 * (60 - 20 - 10)
    assert choose_num_pages(config, GIB // 4, 1, gpu, beside=39 * GIB) == 4
    with pytest.raises(UserError, match="raise gpu_memory_utilization"):
        choose_num_pages(config, GIB // 4, 100, gpu, beside=40 * GIB)
    given = config.model_copy(update={"kv_cache_memory": 31 * GIB})
    assert choose_num_pages(given, GIB, 100, gpu, beside=9 * GIB) == 31
    with pytest.raises(UserError, match=r"31\.00 GiB and 30\.00 GiB are free"):
        choose_num_pages(given, GIB, 100, gpu, beside=10 * GIB)


@pytest.mark.parametrize("method", ["plain", "aspire", "vegas", "magicdec-snapkv"])
def test_an_engine_on_a_gpu_leaves_that_room(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A GPU of two multiprocessors, as far as the sizes are asked for."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 2 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))
    shape = tiny_config(head_dim=64)
    config = EngineConfig(model="tiny", method=method, max_num_seqs=4000, block_size=16)
    made = resolve(config, shape, torch.device("cuda"), torch.bfloat16, None)
    pool = made.num_pages * 16 * shape.kv_bytes_per_token(torch.bfloat16)
    assert 0 < pool < 0.9 * 2 * GIB - GIB // 2
    assert made.limits.max_model_len == made.max_model_len
