"""The whole engine on the Triton kernels (through the interpreter where there is no GPU) against plain decoding in torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from aspire_llm.config import EngineConfig
from aspire_llm.engine.build import most_decoded, resolve, widest_graph
from aspire_llm.engine.finish import Finish
from aspire_llm.engine.forward import EagerForward
from aspire_llm.engine.graphs import graph_sizes, padded_size, step_to_capture
from aspire_llm.engine.slot_ops import StepRows
from aspire_llm.engine.upload import Array
from aspire_llm.request import RowKind, SamplingParams
from tiny import always_draft_to, plain_tokens, prompts_of, requests_for, run, tiny_engine, tiny_model

pytest.importorskip("triton")
pytestmark = pytest.mark.kernel


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the tiny float32 model is for the interpreter; a GPU has its own tests"
)
@pytest.mark.parametrize("method", ["aspire", "vegas", "magicdec-snapkv", "magicdec-window"])
def test_tokens_equal_plain(method: str) -> None:
    model = tiny_model(windows=(None, 24) if method == "vegas" else (None, None))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = prompts_of([5, 37, 50])
    expected = plain_tokens(model, prompts, params)
    options = {
        "block_size": 16,
        "max_num_seqs": 3,
        "max_model_len": 64,
        "attention_backend": "triton",
        "max_draft_tokens": 4,
    }
    engine = tiny_engine(model, method=method, policy=always_draft_to(3), **options)
    requests = requests_for(model, prompts, params)
    assert run(engine, requests) == expected
    assert sum(r.stats.num_accepted_tokens for r in requests) > 0


def test_every_size_maps_to_a_captured_one() -> None:
    """vllm#53407: padding never leaves the captured sizes, and never adds more than 8 tokens or an eighth."""
    for widest in range(1, 700):
        sizes = graph_sizes(widest)
        assert sizes == sorted(set(sizes))
        for tokens in range(1, widest + 1):
            size = padded_size(sizes, tokens)
            assert size in sizes
            assert tokens <= size < tokens + max(8, tokens / 8 + 1)
        assert padded_size(sizes, sizes[-1] + 1) == sizes[-1] + 1
    assert len(graph_sizes(512)) <= 50


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny float32 model is for the interpreter")
@pytest.mark.parametrize("kind", [RowKind.VERIFY, RowKind.DRAFT])
def test_capturing_leaves_the_pages_alone(kind: RowKind) -> None:
    """An engine may be made while another one's prefixes lie in the pages that they share."""
    options = {"block_size": 16, "max_num_seqs": 3, "max_model_len": 64, "attention_backend": "triton"}
    runner = tiny_engine(tiny_model(), method="aspire", **options).runner
    runner.sampler.on_kernels = runner.state.on_kernels = True
    forward = runner._forward
    assert isinstance(forward, EagerForward)
    pool = forward._backend.pool
    pages = [*pool.k, *pool.v]
    for cache in pages:
        cache.normal_()
    before = [cache.clone() for cache in pages]
    step, without_rows = step_to_capture(8, kind, 4, 3, scored=True)

    def run_with(arrays: Sequence[Array]) -> None:
        there = [torch.from_numpy(array) for array in arrays]
        ran = forward.run(step, there)
        end = Finish(runner.decoder, runner.sampler, runner.state)
        end(StepRows(*there[:-1]), ran.hidden, ran.positions, ran.attention)

    run_with(without_rows)
    assert all(torch.equal(now, then) for now, then in zip(pages, before, strict=True))
    assert not runner.state.computed.any()
    assert not runner.state.pending.any()
    run_with(step.arrays)  # the row itself would write
    assert not all(torch.equal(now, then) for now, then in zip(pages, before, strict=True))


@pytest.mark.parametrize(
    ("method", "max_num_seqs", "widest"),
    # plain: a token each; vegas: all of them verify six drafts at once, up to a limit; aspire: the bound on verified tokens
    [("plain", 300, 300),
     ("vegas", 256, 1792), ("vegas", 32, 512), ("vegas", 500, 2048), ("aspire", 32, 512), ("aspire", 256, 1280)],
)  # fmt: skip
def test_the_widest_captured_step_is_that_of_the_policy(method: str, max_num_seqs: int, widest: int) -> None:
    config = EngineConfig(model="tiny", method=method, max_num_seqs=max_num_seqs, max_model_len=64)
    made = resolve(config, tiny_model().config, torch.device("cpu"), torch.float32, None)
    bound = max(192, 4 * max_num_seqs)  # a GPU's
    decoded = most_decoded(made.limits, made.policy, made.draft_tokens, bound)
    assert widest_graph(made.limits, decoded) == widest
