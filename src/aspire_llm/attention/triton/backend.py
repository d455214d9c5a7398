"""The Triton attention backend: buffers made once, a few launches a layer, and no word from the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from aspire_llm.attention.backend import AttentionBatch
from aspire_llm.attention.triton.attend import attend_kernel
from aspire_llm.attention.triton.combine import combine_kernel, probe_kernel, scores_kernel
from aspire_llm.attention.triton.store import store_kernel
from aspire_llm.attention.triton.work import PIECE_FIELDS, token_kernel, work_kernel
from aspire_llm.cache.pool import KVPool
from aspire_llm.errors import UserError
from aspire_llm.models.decoder import PagedAttend
from aspire_llm.models.ops import LayerCache
from aspire_llm.request import RowKind

LOG2_E = 1.4426950408889634
HEAD_DIMS = (64, 96, 128, 256)
PAGE_SIZES = (16, 32, 64)
TILE_ROWS = 64  # packed rows of every tile but the last kind
REGISTERS_OF_THREE = 168  # of a thread, that three programs of four warps have room on a multiprocessor of 65,536
WIDE_ROWS = 72  # packed rows of a row's only tile, at most (128 in one tile were slower on an H200: registers spill)


@dataclass(frozen=True, slots=True)
class Tuning:
    """block_n: keys a step. narrow_depth, wide_depth: steps fetched ahead, in tiles of up to 32 rows and in larger ones.
    programs: pieces of work aimed at, over all KV heads; two waves of what runs at once. min_blocks: least blocks of a piece.
    registers: most of a thread, on NVIDIA; None for what the compiler takes. score_programs: those that normalise scores, six an
    SM, as many as its registers hold, each with all KV heads of its positions on their way."""

    block_n: int = 64
    narrow_depth: int = 2
    wide_depth: int = 2
    warps: int = 4
    programs: int = 528
    min_blocks: int = 2
    registers: int | None = None
    score_programs: int = 792

    @staticmethod
    def default(head_dim: int, device: torch.device) -> Tuning:
        if device.type != "cuda":
            return Tuning(block_n=16, programs=8, score_programs=12)
        # Two programs run on a multiprocessor at once. Small heads leave registers for a third, which makes verifications and
        # drafts 5-11 % faster (H200); NVIDIA's compiler must be told.
        three = head_dim <= 64 and torch.version.hip is None
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        at_once = (3 if three else 2) * multiprocessors
        return Tuning(
            block_n=64 if head_dim <= 128 else 32,
            programs=2 * at_once,
            registers=REGISTERS_OF_THREE if three else None,
            score_programs=6 * multiprocessors,
        )

    @property
    def launch_options(self) -> dict[str, int]:
        """Of the attention kernel; `maxnreg` is unknown to compilers of other vendors."""
        return {"num_warps": self.warps} | ({} if self.registers is None else {"maxnreg": self.registers})


def key_passes(num_tokens: int, group: int, *, deterministic: bool = False) -> int:
    """Tiles of a row of so many tokens, each of which reads all of its keys. group: query heads of a KV head."""
    if num_tokens * group <= (TILE_ROWS if deterministic else WIDE_ROWS):
        return 1
    return -(-num_tokens // (TILE_ROWS // group))


@dataclass(slots=True)
class TritonPlan:
    batch: AttentionBatch
    layer_scores: Tensor  # float32 [score layers, max rows, max_len]
    score_index: dict[int, int]  # layer -> its place in layer_scores
    reads: Tensor  # int32 [L, max rows]
    score_layers: frozenset[int]
    score_places: dict[tuple[int, ...], Tensor]  # the backend's, kept between plans
    layers_run: list[int] = field(default_factory=list)

    @property
    def drafts_alone(self) -> bool:
        """Whether only draft rows are scored, and so only refresh layers."""
        return all(self.batch.kinds[row] is RowKind.DRAFT for row in self.batch.scored_rows)

    @property
    def scores(self) -> Mapping[int, Tensor]:
        """As `AttentionPlan.scores`; views of the backend's buffers, valid until its next plan, max_len wide."""
        rows = self.batch.scored_rows
        if not rows:
            return {}
        drafts = any(self.batch.kinds[row] == RowKind.DRAFT for row in rows)
        result = {}
        for layer in self.layers_run:
            if layer in self.score_index and (drafts or layer in self.score_layers):
                whole = self.layer_scores[self.score_index[layer]]
                if rows == tuple(range(rows[0], rows[0] + len(rows))):
                    result[layer] = whole[rows[0] : rows[0] + len(rows)]
                else:
                    result[layer] = whole[torch.tensor(rows, device=whole.device)]
        return result

    def scores_of(self, layers: tuple[int, ...], rows: Tensor, longest: int) -> Tensor:
        """As `AttentionPlan.scores_of`; a copy."""
        scores, places = self.score_store(layers)
        return scores[:, :, :longest][places[:, None], rows[None, :]]

    def score_store(self, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As `AttentionPlan.score_store`."""
        places = self.score_places.get(layers)
        if places is None:  # once for each choice of layers
            places = torch.tensor([self.score_index[layer] for layer in layers], device=self.layer_scores.device)
            self.score_places[layers] = places
        return self.layer_scores, places

    @property
    def row_reads(self) -> Tensor:
        """As `AttentionPlan.row_reads`, of every row of the batch, padding included."""
        ran = self.reads if len(self.layers_run) == self.reads.shape[0] else self.reads[self.layers_run]
        return ran.sum(0, dtype=torch.int64)

    @property
    def kv_tokens_read(self) -> dict[RowKind, int]:
        """As `AttentionPlan.kv_tokens_read`. Waits for the device."""
        reads: dict[RowKind, int] = defaultdict(int)
        per_row = self.reads[self.layers_run, : len(self.batch.kinds)].sum(0).tolist()
        for kind, count in zip(self.batch.kinds, per_row, strict=True):
            reads[kind] += count
        return reads


@dataclass(frozen=True, slots=True)
class StepAttention(PagedAttend):
    """Attention of one step, as a decoder takes it."""

    backend: TritonBackend
    plan: TritonPlan

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.backend.run(self.plan, layer, q, k, v)

    def cache(self, layer: int) -> LayerCache:
        return self.backend.cache(layer)

    def stored(self, layer: int, q: Tensor) -> Tensor:
        return self.backend.run_stored(self.plan, layer, q)


class TritonBackend:
    """Attention by Triton kernels over `pool`; every buffer is made here, so that `plan` and `run` can be captured in a graph.

    num_heads: query heads. scale: of the logits, 1/sqrt(D) for most models. windows: sliding window of each layer or None.
    refresh_layers: where sparse rows read everything and are scored. score_layers: where dense rows are scored.
    max_tokens, max_rows: of a step. max_len: longest request, in tokens. max_scored_tokens: most tokens of a row that have
    score weight; of more than two, the row's keys are read again for them.
    deterministic: every tile computed by the same instructions and split at fixed positions, so that a token's result
    has the same bits whatever shares its row or its step. nominal_len: the length that these positions are chosen for, max_len
    if not given; backends that must agree to the bit need the same one.
    `plan` writes buffers that `run` reads: one step at a time.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        num_heads: int,
        scale: float,
        windows: Sequence[int | None],
        max_tokens: int,
        max_rows: int,
        max_len: int,
        refresh_layers: Sequence[int] = (),
        score_layers: Sequence[int] = (),
        max_scored_tokens: int = 2,
        deterministic: bool = False,
        nominal_len: int | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        keys = pool.k[0]
        device = keys.device
        self.pool = pool
        self.kv_heads, _, self.head_dim = keys.shape
        if num_heads % self.kv_heads or not 1 <= num_heads // self.kv_heads <= 16:
            raise UserError(f"{num_heads} query heads over {self.kv_heads} KV heads: the group must be 1 to 16")
        if device.type == "cuda" and self.head_dim not in HEAD_DIMS:
            raise UserError(f"head size {self.head_dim}: the Triton kernels do {HEAD_DIMS}")
        if pool.page_size not in PAGE_SIZES:
            raise UserError(f"page size {pool.page_size}: the Triton kernels do {PAGE_SIZES}", "block_size")
        self.num_heads, self.group = num_heads, num_heads // self.kv_heads
        self.windows = tuple(0 if window is None else window for window in windows)
        self.max_tokens, self.max_rows, self.max_len = max_tokens, max_rows, max_len
        self.refresh_layers, self.score_layers = frozenset(refresh_layers), frozenset(score_layers)
        self.scale = scale
        self.tuning = tuning or Tuning.default(self.head_dim, device)
        self.deterministic = deterministic
        self.rows = TILE_ROWS if deterministic else WIDE_ROWS
        block_n = self.tuning.block_n
        # A windowed tile starts where its own window does, so what lies in its window must never be split.
        widest = max([0, *(min(window, max_len) + TILE_ROWS + block_n for window in self.windows if window)])
        split = max(1024, -(-(nominal_len or max_len) // 16), widest)
        self.fixed_blocks = -(-split // block_n) if deterministic else 0
        self.programs = max(1, self.tuning.programs // self.kv_heads)  # for one KV head

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        layers = len(self.windows)
        max_pieces = self.most_pieces(max_tokens, max_rows)
        self.window_table = torch.tensor(self.windows, dtype=torch.int32, device=device)
        self.refresh_table = ints(layers)
        self.refresh_table[sorted(self.refresh_layers)] = 1
        self.score_table = ints(layers)
        self.score_table[sorted(self.score_layers)] = 1
        self.token_parts = ints(max_tokens, 4)
        self.token_place = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.row_entries = ints(max_rows, 2)
        self.pieces = ints(layers, max_pieces, int(PIECE_FIELDS.value))
        self.num_pieces = ints(layers)
        self.reads, self.score_ends = ints(layers, max_rows), ints(layers, max_rows, 2)
        parts = max_pieces * self.kv_heads
        self.part_acc = torch.empty(parts, self.rows, self.head_dim, dtype=torch.float32, device=device)
        self.part_max = torch.empty(parts, self.rows, dtype=torch.float32, device=device)
        self.part_sum = torch.empty(parts, self.rows, dtype=torch.float32, device=device)
        self.lse = torch.zeros(max_tokens, num_heads, dtype=torch.float32, device=device)

        scored = sorted(self.refresh_layers | self.score_layers)
        self.score_index = {layer: i for i, layer in enumerate(scored)}
        self.score_places: dict[tuple[int, ...], Tensor] = {}
        self.max_scored_tokens = max_scored_tokens
        self.max_entries = min(max_tokens, max_scored_tokens * max_rows) if scored else 1
        self.score_len = -(-max_len // block_n) * block_n if scored else 1
        self.entry_token = ints(self.max_entries)
        self.score_rows, self.num_scored = ints(layers, max_rows, 8), ints(layers)
        self.cell = triton.next_power_of_2(self.group)
        lines = (max_rows if scored else 1, self.kv_heads)
        self.score_x = torch.empty(*lines, self.score_len, 2 * self.cell, dtype=torch.float16, device=device)
        self.score_ref = torch.empty(*lines, 2 * self.cell, dtype=torch.float32, device=device)
        self.layer_scores = torch.zeros(len(scored), max_rows, max_len, dtype=torch.float32, device=device)

    def most_pieces(self, num_tokens: int, num_rows: int) -> int:
        """Most pieces for one KV head that so many tokens in so many rows can make."""
        tiles = min(num_tokens, num_rows + num_tokens // (TILE_ROWS // self.group))
        if self.fixed_blocks:
            return tiles * -(-self.max_len // (self.fixed_blocks * self.tuning.block_n))
        return tiles + 2 * self.programs  # as far as sparse tiles may be cut

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        """Make the work lists of every layer on the device. Two launches."""
        num_tokens, num_rows = batch.positions.shape[0], batch.slots.shape[0]
        if num_tokens > self.max_tokens or num_rows > self.max_rows:
            raise UserError(
                f"a step of {num_tokens} tokens in {num_rows} rows: made for {self.max_tokens} in {self.max_rows}"
            )
        if self.score_index and batch.num_scored_tokens > self.max_scored_tokens * num_rows:
            raise UserError(
                f"{batch.num_scored_tokens} scored tokens in {num_rows} rows, at most {self.max_scored_tokens} a row",
                "max_scored_tokens",
            )
        block_r = triton.next_power_of_2(max(16, self.max_rows))
        token_kernel[(1,)](
            batch.row_offsets, batch.slots, batch.positions, batch.score_weights, batch.page_table,
            self.token_place, self.entry_token, self.row_entries,
            num_rows, num_tokens, self.max_entries, batch.page_table.stride(0),
            PAGE=self.pool.page_size, BLOCK_T=512, BLOCK_R=block_r, STEPS=block_r.bit_length() - 1, num_warps=8,
        )  # fmt: skip
        work_kernel[(len(self.windows),)](
            batch.row_offsets, batch.slots, batch.starts, batch.sparse, self.row_entries, self.entry_token,
            batch.set_lengths, batch.tail_starts, self.window_table, self.refresh_table, self.score_table,
            self.pieces, self.num_pieces, self.reads, self.score_ends,
            self.score_rows, self.num_scored,
            num_rows, self.max_rows, self.pieces.shape[1], batch.set_lengths.stride(0), self.programs,
            GROUP=self.group, BLOCK_N=self.tuning.block_n, MAX_PACKED=self.rows, FIXED_BLOCKS=self.fixed_blocks,
            MIN_BLOCKS=self.tuning.min_blocks, BLOCK_R=block_r, num_warps=1 if block_r <= 64 else 4,
        )  # fmt: skip
        return TritonPlan(batch, self.layer_scores, self.score_index, self.reads, self.score_layers, self.score_places)

    def run(self, plan: TritonPlan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `Backend.run`. q, k and v may be strided views (of one qkv matrix, say), contiguous in D."""
        self.store(layer, k, v)
        return self.run_stored(plan, layer, q)

    def run_stored(self, plan: TritonPlan, layer: int, q: Tensor) -> Tensor:
        """As `run`, with K and V in the cache already."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.attend(plan, layer, q, out)
        plan.layers_run.append(layer)
        return out

    def attention(self, plan: TritonPlan) -> StepAttention:
        """As `Backend.attention`; the decoder may store K and V itself."""
        return StepAttention(self, plan)

    def cache(self, layer: int) -> LayerCache:
        """Where the planned step's K and V belong."""
        pool = self.pool
        key_factor, value_factor = 1.0 / pool.key_scales[layer], 1.0 / pool.value_scales[layer]
        return LayerCache(pool.k[layer], pool.v[layer], self.token_place, key_factor, value_factor)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        keys, values = self.pool.k[layer], self.pool.v[layer]
        store_kernel[(k.shape[0],)](
            k, v, keys, values, self.token_place,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            1.0 / self.pool.key_scales[layer], 1.0 / self.pool.value_scales[layer],
            KV_HEADS=self.kv_heads, H_PAD=triton.next_power_of_2(self.kv_heads),
            D=self.head_dim, D_PAD=triton.next_power_of_2(self.head_dim),
        )  # fmt: skip

    def attend(self, plan: TritonPlan, layer: int, q: Tensor, out: Tensor) -> None:
        """Attention alone, K and V being in the cache, into out [T, query heads, D]; and the scores where they are wanted."""
        if q.shape[0] == 0:
            return
        scored = layer in self.refresh_layers if plan.drafts_alone else layer in self.score_index
        scored = scored and bool(plan.batch.scored_rows)
        self._attend(plan.batch, layer, q, out, scored)
        self._combine(plan.batch, layer, out)
        if scored:
            self._score(plan.batch, layer, q)

    def _attend(self, batch: AttentionBatch, layer: int, q: Tensor, out: Tensor, scored: bool) -> None:
        keys, values = self.pool.k[layer], self.pool.v[layer]
        max_pieces = self.most_pieces(q.shape[0], batch.slots.shape[0])
        attend_kernel[(max_pieces * self.kv_heads,)](
            q, keys, values, out, self.lse, self.part_acc, self.part_max, self.part_sum, self.token_parts,
            self.pieces[layer], self.num_pieces[layer], batch.page_table, batch.sets[layer],
            self.score_x, self.score_ref,
            self.num_heads, batch.page_table.stride(0), batch.sets.stride(1),
            q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            out.stride(0), out.stride(1), self.score_len,
            self.scale * LOG2_E * self.pool.key_scales[layer], self.pool.value_scales[layer],
            KV_HEADS=self.kv_heads, GROUP=self.group, D=self.head_dim, D_PAD=triton.next_power_of_2(self.head_dim),
            PAGE=self.pool.page_size, BLOCK_N=self.tuning.block_n, WINDOW=self.windows[layer], SCORED=scored, ROWS=self.rows,
            MIN_ROWS=TILE_ROWS if self.deterministic else 16,
            NARROW_DEPTH=self.tuning.narrow_depth, WIDE_DEPTH=self.tuning.wide_depth,
            COLUMNS=max(8, 2 * self.cell), CELL=self.cell, TOKENS_PAD=triton.next_power_of_2(self.rows // self.group),
            **self.tuning.launch_options,
        )  # fmt: skip

    def _combine(self, batch: AttentionBatch, layer: int, out: Tensor) -> None:
        group_pad, dim_pad = triton.next_power_of_2(self.group), triton.next_power_of_2(self.head_dim)
        # Few programs take more pieces at once; many share the registers. (But a sum must not depend on the step's tokens.)
        few = out.shape[0] * self.kv_heads <= 2 * self.tuning.programs and not self.deterministic
        elements = 4096 if few else 2048
        combine_kernel[(out.shape[0], self.kv_heads)](
            self.part_acc, self.part_max, self.part_sum, self.token_parts, batch.row_offsets, out, self.lse,
            batch.slots.shape[0], self.num_heads, out.stride(0), out.stride(1), self.pool.value_scales[layer],
            KV_HEADS=self.kv_heads, GROUP=self.group, G_PAD=group_pad, D=self.head_dim, D_PAD=dim_pad, ROWS=self.rows,
            AT_ONCE=max(1, min(16, elements // (group_pad * dim_pad))), num_warps=2,
        )  # fmt: skip

    def _score(self, batch: AttentionBatch, layer: int, q: Tensor) -> None:
        scores = self.layer_scores[self.score_index[layer]]
        block_r = triton.next_power_of_2(max(16, self.max_rows))
        width = max(64, min(256, 1024 // self.cell))
        programs = min(self.tuning.score_programs, triton.cdiv(self.max_len, width) * batch.slots.shape[0])
        scores_kernel[(programs,)](
            self.score_x, self.score_ref, self.lse, batch.score_weights, batch.positions,
            self.score_rows[layer], self.num_scored[layer], scores, self.max_len, self.score_len,
            KV_HEADS=self.kv_heads, GROUP=self.group, CELL=self.cell, WIDTH=width,
            WINDOW=self.windows[layer], BLOCK_R=block_r, num_warps=4,
        )  # fmt: skip
        if self.max_scored_tokens > 2:
            keys = self.pool.k[layer]
            probe_kernel[(programs,)](
                q, keys, self.lse, batch.score_weights, batch.positions, batch.slots, batch.page_table, self.entry_token,
                self.score_rows[layer], self.num_scored[layer], scores, self.max_len, batch.page_table.stride(0),
                q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), self.scale * LOG2_E * self.pool.key_scales[layer],
                KV_HEADS=self.kv_heads, GROUP=self.group, D=self.head_dim, D_PAD=triton.next_power_of_2(self.head_dim),
                PAGE=self.pool.page_size, COLUMNS=max(16, triton.next_power_of_2(self.group)), WIDTH=64,
                WINDOW=self.windows[layer], BLOCK_R=block_r, num_warps=4,
            )  # fmt: skip
