import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_llm.attention.triton.backend import TritonBackend, Tuning, key_passes
from aspire_llm.errors import UserError
from aspire_llm.request import RowKind
from triton_oracle import RowSpec, Scene, attend, make_scene

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM = 64 if DEVICE == "cuda" else 16  # of heads, where it does not matter: the smallest
PREFILL, DRAFT, VERIFY = RowKind.PREFILL, RowKind.DRAFT, RowKind.VERIFY
SMALL = Tuning(block_n=16, programs=8, min_blocks=1)


def backend(scene: Scene, **options) -> TritonBackend:
    batch = scene.batch
    defaults = {
        "num_heads": scene.q.shape[1],
        "scale": scene.scale,
        "windows": [None] * len(scene.pool.k),
        "max_tokens": scene.q.shape[0] + 3,
        "max_rows": batch.slots.shape[0] + 2,
        "max_len": batch.page_table.shape[1] * scene.pool.page_size,
        "tuning": SMALL,
    }
    return TritonBackend(scene.pool, **{**defaults, **options})


def check(scene: Scene, made: TritonBackend, *, tolerance: float = 1e-5) -> None:
    """Every layer's output and scores against the oracle, and finite zeros for padding tokens."""
    plan = made.plan(scene.batch)
    total = sum(scene.batch.num_tokens)
    for layer, window in enumerate(made.windows):
        out = made.run(plan, layer, scene.q, scene.k, scene.v)
        dense = layer in made.refresh_layers
        expected, scores = attend(scene, layer, window=window or None, dense=dense)
        torch.testing.assert_close(out[:total].cpu().double(), expected, rtol=tolerance, atol=tolerance)
        assert (out[total:] == 0).all()
        for place, row in enumerate(scene.batch.scored_rows):
            marked = scene.specs[row].kind == DRAFT
            if layer in (made.refresh_layers if marked else made.score_layers):
                got = plan.scores[layer][place].cpu().double()
                torch.testing.assert_close(got[: scores.shape[1]], scores[row], rtol=2e-3, atol=1e-6)
                assert (got[scores.shape[1] :] == 0).all()
            elif layer in plan.scores:
                assert (plan.scores[layer][place] == 0).all()


MIXED = [
    RowSpec(VERIFY, 0, 1),  # the very first token
    RowSpec(VERIFY, 15, 1),  # last of a page
    RowSpec(VERIFY, 16, 1),  # first of a page
    RowSpec(DRAFT, 40, 1, tail_start=37, set_positions=(0, 1, 5, 15, 16, 36)),
    RowSpec(DRAFT, 47, 1, tail_start=47, set_positions=tuple(range(0, 46, 3))),  # the tail is the token alone
    RowSpec(DRAFT, 20, 1, tail_start=16),  # no set at all
    RowSpec(DRAFT, 3, 1, tail_start=0),  # no set, and the tail is everything
    RowSpec(DRAFT, 64, 1, tail_start=33, set_positions=tuple(range(33))),  # set and tail together are everything
    RowSpec(DRAFT, 70, 5, tail_start=68, set_positions=(0, 9, 67)),  # several tokens under a sparse view
    RowSpec(VERIFY, 30, 5),
    RowSpec(VERIFY, 90, 8),
    RowSpec(VERIFY, 50, 17),
    RowSpec(VERIFY, 20, 33),
    RowSpec(VERIFY, 0, 0),  # padding row
    RowSpec(PREFILL, 0, 37),
    RowSpec(PREFILL, 25, 40),
]


@pytest.mark.parametrize(("num_heads", "kv_heads"), [(1, 1), (3, 1), (8, 2), (7, 1), (16, 1)])
def test_every_kind_of_row_in_one_launch(num_heads, kv_heads):
    scene = make_scene(MIXED, num_heads=num_heads, kv_heads=kv_heads, dim=DIM, padding=2, device=DEVICE)
    check(scene, backend(scene, tuning=Tuning(block_n=16 if kv_heads == 2 else 32, programs=6, min_blocks=1)))


@pytest.mark.parametrize(("dim", "page_size", "block_n"), [(64, 32, 16), (96, 16, 32), (128, 64, 64), (256, 32, 32)])
def test_head_sizes_pages_and_blocks(dim, page_size, block_n):
    specs = [
        RowSpec(VERIFY, 63, 2),
        RowSpec(DRAFT, 100, 1, tail_start=97, set_positions=(0, 3, 64, 96)),
        RowSpec(VERIFY, 70, 17),
        RowSpec(VERIFY, 127, 1),
    ]
    scene = make_scene(specs, num_heads=4, kv_heads=1, dim=dim, page_size=page_size, device=DEVICE)
    check(scene, backend(scene, tuning=Tuning(block_n=block_n, programs=6, min_blocks=1)))


def test_windows_are_kept_by_every_kind_of_row():
    scene = make_scene(MIXED, num_heads=4, kv_heads=1, dim=DIM, num_layers=2, device=DEVICE)
    check(scene, backend(scene, windows=[8, 33]))


def weighted(spec: RowSpec) -> RowSpec:
    n = spec.num_tokens
    last = 1.0 if n == 1 else 0.5
    first = (0.5,) if n > 1 else ()
    return RowSpec(
        spec.kind, spec.start, n, spec.tail_start, spec.set_positions, (*first, *([0.0] * (n - 2)), last) if n else ()
    )


def test_scores_are_mean_probabilities():
    specs = [weighted(spec) if i not in (2, 10) else spec for i, spec in enumerate(MIXED)]
    prompt = RowSpec(PREFILL, 10, 25, weights=(0.0,) * 20 + (0.2,) * 5)  # the last queries of a prompt
    scene = make_scene(
        [*specs[:9], *specs[10:14], prompt], num_heads=4, kv_heads=1, dim=DIM, num_layers=3, padding=1, device=DEVICE
    )
    check(scene, backend(scene, refresh_layers=[1], score_layers=[0, 1], max_scored_tokens=20))


def test_scores_of_wide_tiles_and_of_windows():
    tokens = {60: 17, 3: 20, 31: 18, 40: 25, 100: 32, 7: 33, 0: 19}
    specs = [weighted(RowSpec(VERIFY, start, count)) for start, count in tokens.items()]
    scene = make_scene(specs, num_heads=4, kv_heads=1, dim=DIM, num_layers=2, device=DEVICE)
    check(scene, backend(scene, windows=[None, 24], score_layers=[0, 1]))


@pytest.mark.parametrize("group", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_passes_over_the_keys_are_what_is_told_to_policies(group: int, deterministic: bool) -> None:
    lengths = [1, 2, 4, 5, 9, 10, 11, 16, 17, 18, 19, 24, 25, 33]
    scene = make_scene([RowSpec(VERIFY, 50, n) for n in lengths], num_heads=group, kv_heads=1, dim=DIM, device=DEVICE)
    made = backend(scene, deterministic=deterministic)
    made.plan(scene.batch)
    begun = [
        piece[2] for piece in made.pieces[0, : int(made.num_pieces[0])].tolist() if piece[6] == 0
    ]  # slots of tiles
    passes = [key_passes(n, group, deterministic=deterministic) for n in lengths]
    assert [begun.count(slot) for slot in scene.batch.slots.tolist()] == passes


def test_a_shorter_step_leaves_nothing_of_the_longer_one():
    long = make_scene(
        [weighted(RowSpec(VERIFY, 90, 2)), weighted(RowSpec(VERIFY, 40, 1))],
        num_heads=2,
        kv_heads=1,
        dim=DIM,
        device=DEVICE,
    )
    made = backend(long, score_layers=[0])
    check(long, made)
    short = make_scene([weighted(RowSpec(VERIFY, 20, 2))], num_heads=2, kv_heads=1, dim=DIM, seed=1, device=DEVICE)
    made.pool = short.pool
    check(short, made)


def test_buffers_serve_any_step_within_their_bounds():
    scenes = [
        make_scene(MIXED[a:b], num_heads=4, kv_heads=1, dim=DIM, padding=pad, seed=a, device=DEVICE)
        for a, b, pad in ((3, 9, 0), (0, 3, 4), (9, 13, 1), (14, 16, 0), (13, 14, 2))
    ]
    made = backend(make_scene(MIXED, num_heads=4, kv_heads=1, dim=DIM, device=DEVICE), max_len=112)
    for scene in scenes:
        made.pool = scene.pool
        check(scene, made)


@pytest.mark.parametrize("programs", [2, 100])
def test_any_number_of_pieces(programs):
    specs = [
        RowSpec(VERIFY, 200, 1),
        RowSpec(VERIFY, 300, 17),
        RowSpec(DRAFT, 90, 1, 60, tuple(range(0, 60, 2))),
        RowSpec(VERIFY, 5, 3),
    ]
    scene = make_scene(specs, num_heads=4, kv_heads=1, dim=DIM, device=DEVICE)
    check(scene, backend(scene, tuning=Tuning(block_n=16, programs=programs, min_blocks=1)))


def test_deterministic_bits_do_not_depend_on_the_batch():
    """A token alone, in a verification, and beside other rows: the same bits."""
    lone = make_scene([RowSpec(VERIFY, 1500, 5)], num_heads=4, kv_heads=1, dim=DIM, page_size=64, device=DEVICE)
    options = {"max_tokens": 64, "max_rows": 8, "max_len": 1600, "tuning": Tuning(block_n=64, programs=8)}
    made = backend(lone, deterministic=True, **options)
    whole = made.run(made.plan(lone.batch), 0, lone.q, lone.k, lone.v)
    made.store(0, lone.k, lone.v)
    for j in range(5):
        one = make_scene([RowSpec(VERIFY, 1500 + j, 1)], num_heads=4, kv_heads=1, dim=DIM, page_size=64, device=DEVICE)
        one.batch.page_table[int(one.batch.slots[0])] = lone.batch.page_table[int(lone.batch.slots[0])][
            : one.batch.page_table.shape[1]
        ]
        out = made.run(made.plan(one.batch), 0, lone.q[j : j + 1], lone.k[j : j + 1], lone.v[j : j + 1])
        # BLAS, which the interpreter multiplies with, rounds by where a row stands; the device does not.
        if DEVICE == "cuda" or j == 0:
            assert torch.equal(out[0], whole[j])
        torch.testing.assert_close(out[0], whole[j], rtol=1e-6, atol=1e-6)
    check(lone, backend(lone, deterministic=True, **options))
    mixed = make_scene(MIXED[8:14], num_heads=4, kv_heads=1, dim=DIM, device=DEVICE)
    check(mixed, backend(mixed, deterministic=True))


def test_half_precision_caches():
    # The interpreter multiplies bfloat16 as integers: there only on the device.
    for dtype in (torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float16,):
        scene = make_scene(MIXED[3:12], num_heads=4, kv_heads=1, dim=DIM, dtype=dtype, device=DEVICE)
        check(scene, backend(scene), tolerance=2e-2)


def test_fp8_cache_with_scales():
    options = {"dtype": torch.float8_e4m3fn, "key_scale": 0.5, "value_scale": 2.0, "device": DEVICE}
    scene = make_scene(MIXED[3:12], num_heads=4, kv_heads=1, dim=DIM, **options)
    check(scene, backend(scene), tolerance=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_pieces_cover_every_key_once_and_fit(data: st.DataObject) -> None:
    """Drafts alone or beside verifications, however many programs are aimed at."""
    specs = []
    for _ in range(data.draw(st.integers(1, 9), "drafts")):
        length = data.draw(st.integers(1, 200), "length")
        count = data.draw(st.integers(0, length), "set")
        specs.append(RowSpec(DRAFT, length, 1, tail_start=length, set_positions=tuple(range(count))))
    for _ in range(data.draw(st.integers(0, 2), "verifications")):
        specs.append(RowSpec(VERIFY, data.draw(st.integers(0, 200), "start"), data.draw(st.integers(1, 20), "tokens")))
    tuning = Tuning(block_n=16, programs=data.draw(st.integers(1, 40)), min_blocks=data.draw(st.integers(1, 3)))
    scene = make_scene(specs, num_heads=4, kv_heads=1, dim=DIM, set_width=200, device=DEVICE)
    made = backend(scene, tuning=tuning)
    made.plan(scene.batch)
    num_pieces = int(made.num_pieces[0])
    assert num_pieces <= made.most_pieces(scene.batch.positions.shape[0], len(specs))
    covered: dict[int, list[range]] = {}  # by a tile's first token: stretches of key indices
    for piece in made.pieces[0, :num_pieces].tolist():
        covered.setdefault(piece[0], []).append(range(piece[6], piece[7]))
    offset = 0
    for spec in specs:
        tokens = [t for t in range(spec.num_tokens) if offset + t in covered]
        assert tokens[0] == 0
        for first, after in zip(tokens, [*tokens[1:], spec.num_tokens], strict=True):
            keys = spec.start + after if spec.kind == VERIFY else len(spec.set_positions) + spec.num_tokens
            assert [i for stretch in covered.pop(offset + first) for i in stretch] == list(range(keys))
        offset += spec.num_tokens
    assert not covered


def test_strided_queries_and_keys():
    scene = make_scene(MIXED[:6], num_heads=4, kv_heads=2, dim=DIM, device=DEVICE)
    fused = torch.cat([scene.q, scene.k, scene.v], dim=1)  # [T, 8, D]: one qkv matrix
    scene.q, scene.k, scene.v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    check(scene, backend(scene))


def test_reads_are_counted_by_kind():
    specs = [RowSpec(VERIFY, 10, 3), RowSpec(DRAFT, 40, 1, 38, (0, 1, 2, 3)), RowSpec(PREFILL, 0, 20)]
    scene = make_scene(specs, num_heads=2, kv_heads=1, dim=DIM, num_layers=3, device=DEVICE)
    made = backend(scene, windows=[None, None, 8], refresh_layers=[1])
    plan = made.plan(scene.batch)
    for layer in range(3):
        made.run(plan, layer, scene.q, scene.k, scene.v)
    assert plan.kv_tokens_read == {VERIFY: 13 + 13 + 10, DRAFT: (4 + 3) + 41 + 8, PREFILL: 20 + 20 + 20}


def test_refusals():
    scene = make_scene(MIXED[:3], num_heads=4, kv_heads=2, dim=DIM, device=DEVICE)
    with pytest.raises(UserError, match="group"):
        backend(scene, num_heads=5)
    narrow = backend(scene, max_rows=2)
    with pytest.raises(UserError, match="3 rows"):
        narrow.plan(scene.batch)
    many = make_scene([RowSpec(PREFILL, 0, 9, weights=(1.0,) * 9)], num_heads=2, kv_heads=1, dim=DIM, device=DEVICE)
    with pytest.raises(UserError, match="9 scored tokens"):
        backend(many, score_layers=[0], max_scored_tokens=8).plan(many.batch)


class Multiprocessors:
    multi_processor_count = 132


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("hip", [None, "6.2"])
def test_registers_leave_room_for_the_programs_that_work_is_cut_for(
    head_dim: int, hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Multiprocessors())
    monkeypatch.setattr(torch.version, "hip", hip)
    tuning = Tuning.default(head_dim, torch.device("cuda"))
    at_once = tuning.programs // 2 // Multiprocessors.multi_processor_count
    given = tuning.launch_options.get("maxnreg", 255)
    assert at_once == (3 if head_dim == 64 and hip is None else 2)
    assert at_once * 32 * tuning.warps * given <= 65536
    assert ("maxnreg" in tuning.launch_options) == (given < 255)
