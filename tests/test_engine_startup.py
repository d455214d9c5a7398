"""What is said at start-up: the calibrated terms, and on a GPU how near they are to its roofline."""

from __future__ import annotations

import logging

import pytest
import torch

from aspire_llm import LLM
from aspire_llm.cache.pool import KVPool
from aspire_llm.engine.startup import (
    LEAST_READ_BYTES,
    Ceilings,
    measure_ceilings,
    shown,
    startup_report,
    step_parameters,
)
from aspire_llm.policy.cost import CostModel
from tiny import tiny_model


def pool_of(num_pages: int = 4) -> KVPool:
    return KVPool(2, 2, 8, num_pages, 16, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_that_a_step_reads(tied: bool) -> None:
    decoder = tiny_model(tie_word_embeddings=tied).decoder
    read, table = sum(p.numel() for p in step_parameters(decoder)), decoder.embedding.numel()
    assert read == sum(p.numel() for p in decoder.parameters()) - (0 if tied else table)
    assert read > table  # the head is read, whether it is the table or not


def test_terms_stand_beside_what_the_device_can_do() -> None:
    model = tiny_model()
    weights = sum(p.numel() for p in step_parameters(model.decoder))
    kv_bytes = 2 * 2 * 2 * 8 * 2  # K and V, layers, heads, head size, bytes
    ceilings = Ceilings(read_bytes_per_s=4e12, operations_per_s=8e14)
    floor, kv_floor = 4 * weights / 4e12, kv_bytes / 4e12
    cost = CostModel(2.0 * floor, 1e-6, 1.25 * kv_floor, per_check=1.25 * kv_floor, verify_step=1e-3)
    calibrated, roofline, reached = startup_report(cost, model.decoder, pool_of(), ceilings)
    assert f"{1e9 * cost.fixed:.3g} ns a step" in calibrated
    assert "1 us a token" in calibrated
    assert "1 ms where drafts are verified" in calibrated
    assert "reads 4 TB/s, products 800 TFLOP/s" in roofline
    assert f"{1e9 * floor:.3g} ns for" in roofline
    assert "50% of that reading weights, 80% reading K and V, 40% in verifications" in reached
    assert startup_report(cost, model.decoder, pool_of(), None) == (calibrated,)
    unknown = startup_report(CostModel(0.0, 1e-6, 1e-9), model.decoder, pool_of(), ceilings)
    assert "not known" in unknown[2]


def test_seconds_are_shown_in_their_unit() -> None:
    assert [shown(s) for s in (0.0, 3.3e-8, 1e-6, 0.0052, 2.5)] == ["0 ns", "33 ns", "1 us", "5.2 ms", "2.5 s"]


def test_no_ceilings_are_measured_of_a_cpu() -> None:
    large = pool_of(num_pages=1 << 19)  # never written, so it takes no memory
    assert sum(layer.nbytes for layer in large.k) > LEAST_READ_BYTES
    assert measure_ceilings(large, torch.float32) is None


def test_a_drafting_engine_says_what_it_measured(caplog: pytest.LogCaptureFixture) -> None:
    options = {"max_num_seqs": 2, "max_model_len": 500, "block_size": 16, "kv_cache_memory": 1 << 20}
    with caplog.at_level(logging.INFO, "aspire_llm.engine"):
        LLM("tiny", loaded=tiny_model(), method="aspire", budget=16, **options)
        said = [record.getMessage() for record in caplog.records]
        LLM("tiny", loaded=tiny_model(), method="plain", **options)
    assert len(said) == 1
    assert said[0].startswith("calibrated: ")
    assert [record.getMessage() for record in caplog.records] == said  # plain decoding weighs nothing
