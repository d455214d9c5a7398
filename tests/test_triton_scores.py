"""Scores where rows with one scored token, which leave half as much for each position, lie beside rows with two."""

from __future__ import annotations

import pytest
import torch

from aspire_llm.attention.triton.backend import Tuning
from exact_interpreter import exact_interpreter  # noqa: F401
from test_triton_attention import DEVICE, DIM, DRAFT, PREFILL, VERIFY, backend, check, weighted
from triton_oracle import RowSpec, make_scene

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("exact_interpreter")]
FP8 = torch.float8_e4m3fn


def rows(group: int) -> list[RowSpec]:
    """One and two scored tokens in turns, in narrow, wide and several tiles; and a prompt's end, with more."""
    return [
        weighted(RowSpec(DRAFT, 75, 1, tail_start=70, set_positions=(0, 5, 69))),
        weighted(RowSpec(VERIFY, 50, 3)),
        weighted(RowSpec(VERIFY, 0, 1)),
        RowSpec(VERIFY, 90, 2),
        weighted(RowSpec(VERIFY, 33, 17)),
        RowSpec(VERIFY, 41, 4, weights=(0.0, 0.7, 0.0, 0.0)),
        RowSpec(PREFILL, 4, 64 // group + 3, weights=(*([0.0] * (64 // group + 2)), 1.0)),
        weighted(RowSpec(PREFILL, 20, 64 // group + 2)),  # its two lie in different tiles
        RowSpec(PREFILL, 0, 9, weights=(0.0,) * 4 + (0.2,) * 5),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=["float32", "fp8"])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 16])
def test_rows_of_one_and_of_two_scored_tokens(group: int, dtype: torch.dtype) -> None:
    scales = {"key_scale": 0.5, "value_scale": 2.0} if dtype == FP8 else {}
    scene = make_scene(
        rows(group), num_heads=2 * group, kv_heads=2, dim=DIM, padding=2, num_layers=2, dtype=dtype, device=DEVICE, **scales
    )  # fmt: skip
    tuning = Tuning(block_n=16, programs=8, min_blocks=1)
    options = {"refresh_layers": [0], "score_layers": [0, 1], "windows": [None, 40], "max_scored_tokens": 5}
    check(scene, backend(scene, tuning=tuning, **options), tolerance=1e-4)


def test_a_row_that_had_two_leaves_nothing_in_a_row_of_one() -> None:
    """The same buffers, where a position lies elsewhere in each step."""
    made = None
    for step, count in enumerate((2, 1, 2, 1)):
        spec = weighted(RowSpec(VERIFY, 80 - 20 * step, count))
        specs = [spec, weighted(RowSpec(VERIFY, 17, 3 - count))]
        scene = make_scene(specs, num_heads=8, kv_heads=2, dim=DIM, seed=step, device=DEVICE)
        made = made or backend(scene, score_layers=[0])
        made.pool = scene.pool
        check(scene, made)
