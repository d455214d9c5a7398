"""Calibration at start-up."""

from __future__ import annotations

import pytest

from aspire_llm.config import make_config
from aspire_llm.engine.build import build_engine
from tiny import tiny_model


@pytest.mark.parametrize("pages", [150, 151])  # half of an odd number of pages is not a whole number of them
def test_a_cache_of_an_odd_number_of_pages_is_calibrated_too(pages):
    model = tiny_model(max_position_embeddings=1024)
    page = 4 * model.config.kv_bytes_per_token(model.decoder.dtype)
    config = make_config(
        model="tiny", max_model_len=500, max_num_seqs=2, block_size=4, kv_cache_memory=pages * page, budget=8
    )
    built = build_engine(config, model)
    assert built.cache.pages.num_pages == pages
    built.engine.check()  # what calibration borrowed is back
