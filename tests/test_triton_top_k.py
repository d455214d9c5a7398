import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_llm.attention.triton.top_k import merge_sets, top_k
from aspire_llm.errors import UserError

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def oracle(row: torch.Tensor, length: int, k: int, n_sinks: int, n_recent: int) -> list[int]:
    forced = {i for i in range(length) if i < n_sinks or i >= length - n_recent}
    order = sorted(range(length), key=lambda i: (i not in forced, -row[i].item(), i))
    return sorted(order[:k])


def run(scores: torch.Tensor, lengths: list[int], k: int, **forced: int) -> list[list[int]]:
    rows = scores.shape[0]
    out = torch.full((rows, k), -1, dtype=torch.int32, device=DEVICE)
    counts = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
    top_k(
        scores.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE), k, out=out, counts=counts, **forced
    )
    return [row[:n].tolist() for row, n in zip(out.cpu(), counts.tolist(), strict=True)]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=4),
    st.integers(1, 70),
    st.integers(0, 2**31),
    st.sampled_from("uts"),
)
def test_top_k_of_rows_of_any_length(lengths, k, seed, kind):
    gen = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(lengths), 310, generator=gen)
    if kind == "t":  # ties everywhere
        scores = (scores * 4).floor()
    elif kind == "s":  # signs, and what lies past the end is larger than anything before it
        scores = scores - 0.5
    for row, length in zip(scores, lengths, strict=True):
        row[length:] = 1e30
    n_sinks, n_recent = min(4, k // 2), min(16, k - k // 2)
    got = run(scores, lengths, k, n_sinks=n_sinks, n_recent=n_recent)
    assert got == [oracle(row, n, k, n_sinks, n_recent) for row, n in zip(scores, lengths, strict=True)]


def test_a_long_row():
    scores = torch.rand(1, 131072, generator=torch.Generator().manual_seed(0)) ** 8
    got = run(scores, [131072 - 5], 512, n_sinks=4, n_recent=32)
    best = scores[0, 4 : 131072 - 37].topk(512 - 36).indices + 4
    assert got[0] == sorted({0, 1, 2, 3, *best.tolist(), *range(131072 - 37, 131072 - 5)})


@pytest.mark.parametrize("ties", [False, True])
def test_winners_of_many_chunks_are_merged_in_several_turns(ties):
    scores = torch.rand(1, 70000, generator=torch.Generator().manual_seed(0))
    if ties:
        scores = (scores * 50).floor()
    length = 70000 - 5
    got = run(scores, [length], 2048, n_sinks=4, n_recent=32, forced=False)
    others = scores[0, 4 : length - 32]
    best = others.sort(descending=True, stable=True).indices[:2048] + 4
    assert got[0] == sorted(best.tolist())


def test_infinities_and_nan_fill_a_row_without_harm():
    scores = torch.tensor([[float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0]])
    assert run(scores, [7], 7) == [[0, 1, 2, 3, 4, 5, 6]]
    assert run(scores[:, 2:], [5], 2) == [[0, 4]]
    (some,) = run(scores, [7], 3)
    assert len(set(some)) == 3


def test_more_forced_than_wanted_is_refused():
    with pytest.raises(UserError, match="cannot hold 4 sinks and 8 recent"):
        run(torch.rand(1, 20), [20], 10, n_sinks=4, n_recent=8)


positions = st.lists(st.integers(0, 60), max_size=20, unique=True).map(sorted)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(positions, positions), min_size=2, max_size=2),
    st.tuples(positions, positions),
    st.tuples(st.integers(0, 61), st.integers(0, 61)),
)
def test_union_of_two_lists(first, second, limits):
    """Two layers, two slots, both layers served by the second of two other lists; their sets lie in layers 2 and 0 of three."""

    def pack(lists: list[list[list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full((len(lists), 2, 20), 7, dtype=torch.int32)  # what lies past the end must not matter
        for i, layer in enumerate(lists):
            for s, values in enumerate(layer):
                out[i, s, : len(values)] = torch.tensor(values, dtype=torch.int32)
        return out.to(DEVICE), torch.tensor(
            [[len(v) for v in layer] for layer in lists], dtype=torch.int32, device=DEVICE
        )

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    a, a_lengths = pack([list(layer) for layer in first])
    b, b_lengths = pack([[[], []], list(second)])
    out, out_lengths = torch.full((3, 2, 40), -1, dtype=torch.int32, device=DEVICE), ints(*[-1] * 6).view(3, 2)
    merge_sets(
        a, a_lengths, b, b_lengths, ints(1, 1), ints(1, 0), ints(*limits), layers=ints(2, 0), out=out, out_lengths=out_lengths
    )  # fmt: skip
    assert (out_lengths[1] == -1).all()
    assert (out[1] == -1).all()
    for layer, place in enumerate((2, 0)):
        for slot in range(2):
            want = sorted({p for p in (*first[layer][slot], *second[slot]) if p < limits[slot]})
            assert out[place, slot, : out_lengths[place, slot]].tolist() == want


def test_union_with_lists_of_no_room():
    first = torch.tensor([[[1, 5, 9]]], dtype=torch.int32, device=DEVICE)
    none = torch.zeros(1, 1, 0, dtype=torch.int32, device=DEVICE)
    zero, three = (torch.tensor([[n]], dtype=torch.int32, device=DEVICE) for n in (0, 3))
    out = torch.zeros(1, 1, 3, dtype=torch.int32, device=DEVICE)
    merge_sets(first, three, none, zero, zero[0], zero[0], three[0] + 5, out=out, out_lengths=(n := zero.clone()))
    assert out[0, 0, : n[0, 0]].tolist() == [1, 5]
