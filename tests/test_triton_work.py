"""How a step is cut into pieces, at lengths and programs of a real GPU: the choices that an H200 was fastest with."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_llm.attention.triton.work import PIECE_FIELDS, token_kernel, work_kernel
from aspire_llm.request import RowKind
from exact_interpreter import exact_interpreter  # noqa: F401

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("exact_interpreter")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, PROGRAMS = 64, 66  # of an H200, for each of 8 KV heads: half of them run at once
MOST_PIECES = 600


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=DEVICE)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=16), st.integers(0, 5))
def test_tokens_know_their_rows(counts: list[int], padding: int) -> None:
    """Rows of no tokens among them, and as many rows as the kernel has room for."""
    offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
    tokens, size = offsets[-1] + padding, len(counts)
    row_entries = zeros(size, 2)
    pages = torch.arange(size, dtype=torch.int32, device=DEVICE)[:, None].repeat(1, 64)  # every row has one of its own
    positions, weights = torch.arange(tokens, device=DEVICE), torch.ones(tokens, device=DEVICE)
    places = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    token_kernel[(1,)](
        ints(*offsets), ints(*range(size)), positions, weights, pages, places, zeros(tokens + 1), row_entries,
        size, tokens, tokens, 64, PAGE=16, BLOCK_T=16, BLOCK_R=16, STEPS=4,
    )  # fmt: skip
    at = [row * 16 + t % 16 for row, (a, b) in enumerate(pairwise(offsets)) for t in range(a, b)]
    assert places.tolist() == at + [-1] * padding
    assert row_entries.tolist() == [[a, b] if a < b else [0, 0] for a, b in pairwise(offsets)]


Rows = tuple[int, RowKind, int, int]  # how many, of which kind, at what length, with how many tokens (a draft: its set)


def cut(*groups: Rows, programs: int = PROGRAMS) -> tuple[tuple[int, int], tuple[int, int]]:
    """Number and largest size, in blocks, of dense and of sparse pieces of one layer of Qwen3-8B's shape."""
    rows = [(kind, length, n) for count, kind, length, n in groups for _ in range(count)]
    drafts = [kind == RowKind.DRAFT for kind, *_ in rows]
    tokens = [1 if draft else n for draft, (_, _, n) in zip(drafts, rows, strict=True)]
    starts = [length - n for (_, length, _), n in zip(rows, tokens, strict=True)]

    offsets, size = [sum(tokens[:i]) for i in range(len(rows) + 1)], len(rows)
    sets = ints(*[n if draft else 0 for draft, (_, _, n) in zip(drafts, rows, strict=True)])
    pieces, count = zeros(1, MOST_PIECES, PIECE_FIELDS.value), zeros(1)
    work_kernel[(1,)](
        ints(*offsets), ints(*range(size)), ints(*starts), torch.tensor(drafts, device=DEVICE), zeros(size, 2), zeros(1),
        sets.view(1, -1), ints(*starts), zeros(1), zeros(1), zeros(1), pieces, count,
        zeros(1, size), zeros(1, size, 2), zeros(1, size, 8), zeros(1), size, size, MOST_PIECES, size, programs,
        GROUP=4, BLOCK_N=BLOCK, MAX_PACKED=72, FIXED_BLOCKS=0, MIN_BLOCKS=2, BLOCK_R=triton.next_power_of_2(size),
    )  # fmt: skip
    made = pieces[0, : int(count[0])].cpu()
    blocks = -(-(made[:, 7] - made[:, 6]) // BLOCK)
    found = [blocks[(made[:, 9] != 0) == sparse].tolist() for sparse in (False, True)]
    return (len(found[0]), max(found[0], default=0)), (len(found[1]), max(found[1], default=0))


def mixed(verifications: int, tokens: int) -> tuple[Rows, Rows]:
    drafts = 32 - verifications
    return (verifications, RowKind.VERIFY, 16384, tokens), (drafts, RowKind.DRAFT, 16384, 512)


@pytest.mark.parametrize(
    ("verifications", "tokens", "pieces"),
    # 1 and 2: the drafts take the time; 4, 7, 10, 11, 16: one full wave of programs; 12: an idle quarter costs little; 20: two
    [(1, 12, 12), (2, 12, 18), (4, 17, 32), (5, 11, 25), (7, 9, 28), (9, 9, 27), (10, 9, 30), (11, 9, 33), (12, 13, 24),
     (16, 9, 32), (20, 9, 60), (32, 17, 32)],
)  # fmt: skip
def test_verifications_beside_drafts(verifications: int, tokens: int, pieces: int) -> None:
    dense, sparse = cut(*mixed(verifications, tokens))
    assert dense == (pieces, -(-256 // (pieces // verifications)))
    assert sparse == ((32 - verifications, 9) if verifications < 32 else (0, 0))


def test_long_sets_are_cut_finer_to_fill_gaps() -> None:
    verify = (16, RowKind.VERIFY, 16384, 1)
    assert cut(verify, (16, RowKind.DRAFT, 16384, 2048)) == ((32, 128), (32, 17))


def test_short_rows_are_not_cut_where_others_are_long() -> None:
    (count, longest), _ = cut((1, RowKind.VERIFY, 90_000, 9), (8, RowKind.VERIFY, 300, 9))
    assert count - 8 == -(-1407 // longest)  # the short ones whole
    assert 28 <= count <= 33


@pytest.mark.parametrize("programs", [1, 2, 7, 66])
@pytest.mark.parametrize("verifications", [1, 3, 16])
def test_never_more_than_there_is_room_for(programs: int, verifications: int) -> None:
    (dense, _), (sparse, _) = cut(*mixed(verifications, 9), (4, RowKind.DRAFT, 16384, 4000), programs=programs)
    assert dense + sparse <= 36 + 2 * programs  # `TritonBackend.most_pieces`
