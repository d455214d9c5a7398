"""The decoder's products and element-wise steps, and the sampler, as cases to be timed."""

from __future__ import annotations

import torch

from aspire_llm.bench.kernels_attention import repeated
from aspire_llm.bench.kernels_batch import BackendName
from aspire_llm.bench.kernels_shape import Shape
from aspire_llm.bench.kernels_timing import Case
from aspire_llm.models.decoder import choose_ops
from aspire_llm.models.ops import Ops, TorchOps
from aspire_llm.request import RowKind, SamplingParams
from aspire_llm.sampling.batch import SampleBatch
from aspire_llm.sampling.sampler import Sampler

MOST_COPIES = 64
EPS = 1e-6


def make_ops(backend_name: BackendName, device: torch.device, dtype: torch.dtype) -> Ops:
    """As the engine chooses them. For the weights of one case: PackedOps keeps what it repacked, by address."""
    if backend_name == "triton" and device.type != "cuda":
        from aspire_llm.models.kernels import TritonOps

        return TritonOps()
    if backend_name == "reference" and device.type == "cuda":
        return TorchOps()
    return choose_ops(device, dtype)


def product_case(
    name: str, part: str, ops: Ops, size: tuple[int, int], tokens: int, like: torch.Tensor, cold_bytes: int
) -> Case:
    """Tokens times a matrix, as the layer does it: `o` and `down` for `add_norm`, `gate_up` with what follows it.

    Copies of the matrix take turns until they fill `cold_bytes`, so that each is read from memory as a model's are. like: a
    tensor of the dtype and device.
    """
    outputs, inputs = size
    one = outputs * inputs * like.element_size()
    copies = min(MOST_COPIES, max(1, -(-cold_bytes // one)))
    weights = [like.new_empty(outputs, inputs).normal_(0.0, 0.02) for _ in range(copies)]
    x = like.new_empty(tokens, inputs).normal_()
    product = ops.gated if part == "gate_up" else ops.delta if part in ("o", "down") else ops.linear

    def body() -> None:
        for weight in weights:
            product(x, weight)

    written = outputs // 2 if part == "gate_up" else outputs
    moved = one + x.nbytes + tokens * written * like.element_size()
    return Case(name, "product", moved, 2 * tokens * outputs * inputs, body, calls=copies)


def elementwise_cases(ops: Ops, shape: Shape, tokens: int, device: torch.device) -> list[Case]:
    """What stands between the products of a layer; the delta in the form that the products before it leave."""

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=shape.dtype)

    heads = shape.num_heads + shape.num_kv_heads
    x, weight = draw(tokens, shape.hidden_size), draw(shape.hidden_size)
    delta = ops.delta(draw(tokens, shape.num_heads * shape.head_dim), draw(*shape.products["o"]) * 0.02)
    qk = draw(tokens, heads, shape.head_dim)
    q_norm, k_norm = (draw(shape.head_dim), draw(shape.head_dim)) if shape.qk_norm else (None, None)
    angles = torch.rand(tokens, 1, shape.head_dim // 2, device=device) * 6.28
    cos, sin = angles.cos().to(shape.dtype), angles.sin().to(shape.dtype)
    named = {
        # x and delta read; the sum and its norm written
        "add and norm": (4 * x.nbytes, lambda: ops.add_norm(x, delta, weight, EPS)),
        "norm and rope": (2 * qk.nbytes, lambda: ops.norm_rope(qk, shape.num_heads, q_norm, k_norm, cos, sin, EPS)),
    }
    return [
        repeated(Case(f"{name}, {tokens} tokens", "element-wise", moved, 0, body), device)
        for name, (moved, body) in named.items()
    ]


def sampler_cases(shape: Shape, num_rows: int, drafts: int, device: torch.device) -> list[Case]:
    """Choosing tokens of VERIFY rows with `drafts` each. The host takes part, so its time is in the figure."""
    tokens = num_rows * (drafts + 1)
    logits = torch.randn(tokens, shape.vocab_size, device=device).to(
        shape.dtype if device.type == "cuda" else torch.float32
    )
    history = torch.zeros(num_rows, 4 * (drafts + 2), dtype=torch.int64, device=device)
    positions = torch.arange(drafts + 1, device=device).repeat(num_rows)
    batch = SampleBatch(
        kinds=(RowKind.VERIFY,) * num_rows,
        slots=tuple(range(num_rows)),
        num_tokens=(drafts + 1,) * num_rows,
        logits=logits,
        positions=positions,
        history=history,
    )
    cases = []
    for name, params in (
        ("greedy", SamplingParams(temperature=0.0)),
        ("temperature and top-p", SamplingParams(temperature=0.8, top_p=0.95)),
    ):
        sampler = Sampler(num_rows, shape.vocab_size, device, max_draft_tokens=max(1, drafts))
        for slot in range(num_rows):
            sampler.admit(slot, params, seed=slot, prompt_token_ids=[0])
        label = f"{name}, {num_rows} rows of {drafts + 1}"
        cases.append(
            Case(label, "sampler", logits.nbytes, 0, lambda sampler=sampler: sampler.run(batch), capture=False)  # type: ignore[misc]
        )
    return cases
