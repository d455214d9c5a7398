"""Triton attention over head sizes, groups and cache dtypes, and the bits of its deterministic mode; through the interpreter
made exact where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from aspire_llm.attention.triton.backend import Tuning
from exact_interpreter import exact_interpreter  # noqa: F401
from test_triton_attention import DEVICE, DIM, DRAFT, PREFILL, VERIFY, backend, check, weighted
from triton_oracle import RowSpec, Scene, make_scene

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("exact_interpreter")]
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dim", "group", "dtype"),
    [
        (64, 1, torch.float16), (64, 3, torch.bfloat16), (64, 16, FP8),
        (96, 2, torch.bfloat16), (96, 7, FP8), (96, 8, torch.float16),
        (128, 4, FP8), (128, 5, torch.float16), (128, 12, torch.bfloat16),
        (256, 1, FP8), (256, 6, torch.float16), (256, 16, torch.bfloat16),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)  # fmt: skip
def test_head_sizes_groups_and_dtypes(dim: int, group: int, dtype: torch.dtype) -> None:
    specs = [
        weighted(RowSpec(VERIFY, 63, 1)),
        RowSpec(DRAFT, 70, 1, tail_start=66, set_positions=(0, 3, 31, 64)),
        weighted(RowSpec(VERIFY, 40, 5)),
        RowSpec(VERIFY, 20, -(-66 // group) if group > 2 else 17),  # more packed rows than a tile of 64
        RowSpec(PREFILL, 0, 9),
    ]
    scales = {"key_scale": 0.5, "value_scale": 4.0} if dtype == FP8 else {}
    scene = make_scene(specs, num_heads=group, kv_heads=1, dim=dim, dtype=dtype, device=DEVICE, **scales)
    scene.q, scene.k, scene.v = (t.to(torch.bfloat16 if dtype == FP8 else dtype) for t in (scene.q, scene.k, scene.v))
    tuning = Tuning(block_n=64 if dim <= 128 else 32, programs=4, min_blocks=1)
    check(scene, backend(scene, score_layers=[0], tuning=tuning), tolerance=3e-2 if scales else 1e-2)


def one_by_one(scene: Scene, row: int, token: int, **options: object) -> torch.Tensor:
    """Attention of one token of a row, by a backend and in a step of its own."""
    spec, before = scene.specs[row], sum(scene.batch.num_tokens[:row])
    lone = make_scene(
        [RowSpec(VERIFY, spec.start + token, 1)], num_heads=scene.q.shape[1], kv_heads=scene.k.shape[1],
        dim=scene.q.shape[2], page_size=scene.pool.page_size, device=DEVICE,
    )  # fmt: skip
    width = lone.batch.page_table.shape[1]
    lone.batch.page_table[int(lone.batch.slots[0])] = scene.batch.page_table[int(scene.batch.slots[row])][:width]
    lone.pool = scene.pool
    at = slice(before + token, before + token + 1)
    made = backend(lone, **options)
    return made.run(made.plan(lone.batch), 0, scene.q[at], scene.k[at], scene.v[at])[0]


@pytest.mark.parametrize("window", [None, 40, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_deterministic_bits_do_not_depend_on_the_row(window: int | None, dtype: torch.dtype) -> None:
    """Tokens before, at and after a split, first and last of their row, beside other rows: as if alone."""
    specs = [RowSpec(PREFILL, 0, 9), RowSpec(VERIFY, 1021, 6), RowSpec(VERIFY, 1290, 17), RowSpec(VERIFY, 30, 1)]
    scene = make_scene(specs, num_heads=4, kv_heads=1, dim=DIM, page_size=64, dtype=dtype, device=DEVICE)
    options = {
        "windows": [window], "deterministic": True, "max_tokens": 64, "max_rows": 8, "nominal_len": 2048,
        "tuning": Tuning(block_n=64, programs=8),
    }  # fmt: skip
    made = backend(scene, max_len=1400, **options)
    whole = made.run(made.plan(scene.batch), 0, scene.q, scene.k, scene.v)
    if window is None:  # float32 shows the last bit: where the splits lie, it does change something
        loose = backend(scene, max_len=1400, **{**options, "deterministic": False})
        assert not torch.equal(loose.run(loose.plan(scene.batch), 0, scene.q, scene.k, scene.v), whole)
    for row, token in ((0, 0), (0, 8), (1, 0), (1, 2), (1, 3), (1, 5), (2, 0), (2, 16), (3, 0)):
        alone = one_by_one(scene, row, token, max_len=1500, **options)  # another length of buffers, the same splits
        assert torch.equal(alone, whole[sum(scene.batch.num_tokens[:row]) + token]), (row, token)
