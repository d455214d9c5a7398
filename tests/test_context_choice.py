"""Context sets chosen by kernels that read scores where a backend left them, against the same choice in torch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aspire_llm.attention.backend import StoredScores
from aspire_llm.context.ranking import choose_into
from aspire_llm.context.selectors import make_selector
from aspire_llm.context.state import ContextState

pytest.importorskip("triton")
pytestmark = pytest.mark.kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COLUMNS = 320
SCORED = (1, 3, 4, 6)  # layers that leave scores


@dataclass
class LeftScores:
    """A plan whose layers have run."""

    store: Tensor  # float32 [len(SCORED), rows, COLUMNS]
    in_place: bool

    def scores_of(self, layers: tuple[int, ...], rows: Tensor, longest: int) -> Tensor:
        places = torch.tensor([SCORED.index(layer) for layer in layers], device=rows.device)
        return self.store[:, :, :longest][places[:, None], rows[None, :]]

    def score_store(self, layers: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
        places = torch.tensor([SCORED.index(layer) for layer in layers], device=self.store.device)
        return (self.store, places) if self.in_place else None

    @property
    def row_reads(self) -> Tensor:
        raise AssertionError("a selector has no business with how much was read")


def ints(*shape: int, fill: int = -1) -> Tensor:
    return torch.full(shape, fill, dtype=torch.int32, device=DEVICE)


def oracle(row: list[float], length: int, count: int, sinks: int, recent: int, forced: bool) -> list[int]:
    special = {i for i in range(length) if i < sinks or i >= length - recent}
    sought = [i for i in range(length) if forced or i not in special]
    return sorted(sorted(sought, key=lambda i: (i not in special, -row[i], i))[:count])


def scores_like(kind: str, gen: torch.Generator, rows: int) -> Tensor:
    """Distinct; full of ties; or probabilities, nearly all of them tiny and many of them 0."""
    drawn = torch.rand(len(SCORED), rows, COLUMNS, generator=gen)
    if kind == "ties":
        return (drawn * 4).floor()
    return drawn if kind == "distinct" else (drawn**30).masked_fill(drawn < 0.3, 0.0)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_positions_are_chosen_in_place(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 4), "rows of the step")
    num_slots = 6
    rows = data.draw(st.permutations(range(num_rows)), "rows")[: data.draw(st.integers(1, num_rows))]
    slots = data.draw(st.permutations(range(num_slots)), "slots")[: len(rows)]
    layers = tuple(data.draw(st.permutations(SCORED), "layers")[: data.draw(st.integers(1, 3))])
    into = data.draw(st.permutations(range(4)), "layers of sets")[: len(layers)]
    lengths = [data.draw(st.integers(0, 300), "length") for _ in rows]
    longest = max(1, *lengths, data.draw(st.integers(1, COLUMNS), "longest"))
    count = data.draw(st.integers(1, 80), "count")
    forced = data.draw(st.booleans(), "forced")
    sinks, recent = min(4, count // 4), min(data.draw(st.sampled_from([0, 8, 32])), count // 4)
    kind = data.draw(st.sampled_from(["distinct", "ties", "probabilities"]), "scores")
    left = scores_like(kind, torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), "seed")), num_rows)
    for row, length in zip(rows, lengths, strict=True):
        left[:, row, length:] = 1e30  # what lies past a row's end must not matter

    def chosen(in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
        plan = LeftScores(left.to(DEVICE), in_place)
        sets, set_lengths, tails = ints(4, num_slots, 100), ints(4, num_slots), ints(num_slots)
        choose_into(
            sets, set_lengths, torch.tensor(into, device=DEVICE),
            StoredScores(plan, torch.tensor(rows, device=DEVICE), longest), layers,
            torch.tensor(slots, device=DEVICE), torch.tensor(lengths, device=DEVICE), count,
            sinks=sinks, recent=recent, forced=forced, tail_starts=tails,
        )  # fmt: skip
        return sets.cpu(), set_lengths.cpu(), tails.cpu()

    sets, set_lengths, tails = chosen(in_place=True)
    torch_sets, torch_lengths, torch_tails = chosen(in_place=False)
    assert torch.equal(set_lengths, torch_lengths)
    assert torch.equal(tails, torch_tails)
    for layer, place in zip(layers, into, strict=True):
        for row, slot, length in zip(rows, slots, lengths, strict=True):
            n = int(set_lengths[place, slot])
            want = oracle(left[SCORED.index(layer), row].tolist(), length, count, sinks, recent, forced)
            assert sets[place, slot, :n].tolist() == want
            if kind == "distinct":
                assert sorted(torch_sets[place, slot, :n].tolist()) == want
            assert (sets[place, slot, n:] == -1).all()
    for place in range(4):
        for slot in range(num_slots):
            if place not in into or slot not in slots:
                assert set_lengths[place, slot] == -1
                assert (sets[place, slot] == -1).all()


@pytest.mark.parametrize(("name", "share"), [("verified", 0.5), ("refreshed", 0.5), ("refreshed", 1.0)])
@pytest.mark.parametrize("windows", [(None,) * 3, (None, 16, None, None)])
def test_selectors_make_the_same_sets_of_scores_in_place(
    name: str, share: float, windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SCORED", tuple(i for i, window in enumerate(windows) if window is None))
    gen = torch.Generator().manual_seed(len(windows))
    num_slots, budget = 5, 24
    made = [
        make_selector(
            name, windows=windows, refresh_layers=[0, 2], num_slots=num_slots, budget=budget, verified_share=share, device=DEVICE
        )
        for _ in range(2)
    ]  # fmt: skip
    states = [ContextState(len(windows), num_slots, budget, DEVICE) for _ in range(2)]
    lengths = torch.tensor([3, 20, 37, 64, 150])
    for step in range(5):
        order = torch.randperm(num_slots, generator=gen)[: 5 if step == 0 else 3]
        if step % 2 == 0:
            lengths[order] += torch.randint(1, 9, order.shape, generator=gen)
        left = scores_like("distinct", gen, num_slots).to(DEVICE)
        rows = torch.randperm(num_slots, generator=gen)[: len(order)].to(DEVICE)
        slots, now = order.to(DEVICE), lengths[order].to(DEVICE)
        for in_place, selector, state in zip((True, False), made, states, strict=True):
            scores = StoredScores(LeftScores(left, in_place), rows, int(now.max()))
            if step % 2 == 0:
                selector.renew(state, slots, now, scores, [step == 0] * len(order))
            selector.refresh(state, slots, now, scores)
        ours, theirs = states
        assert torch.equal(ours.tail_starts, theirs.tail_starts)
        assert torch.equal(ours.set_lengths, theirs.set_lengths)
        for layer in SCORED:
            for slot in range(num_slots):
                n = int(ours.set_lengths[layer, slot])
                assert sorted(ours.sets[layer, slot, :n].tolist()) == sorted(theirs.sets[layer, slot, :n].tolist())
                assert len(set(ours.sets[layer, slot, :n].tolist())) == n
