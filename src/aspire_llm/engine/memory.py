"""How many pages of KV cache there is room for: on a GPU, beside everything else that the engine will need."""

from __future__ import annotations

import psutil
import torch
from torch import Tensor

from aspire_llm.cache.pool import KVPool
from aspire_llm.config import EngineConfig
from aspire_llm.context.state import ContextState
from aspire_llm.engine.numerics import require_triton
from aspire_llm.engine.slots import SlotState
from aspire_llm.errors import UserError
from aspire_llm.models.config import DecoderConfig
from aspire_llm.scheduler.scheduler import Limits

CPU_CACHE_SHARE = 0.4  # of the free memory, when kv_cache_memory is not given
LIBRARY_BYTES = 512 << 20  # of a GPU: kernels as they are loaded, workspaces of its libraries, the allocator's slack
SET_COPIES = 3  # of the context sets: the sets themselves, and the two parts that some are made of
LOGIT_BYTES = 8  # of a logit beside itself: a copy in float32, and what is made of it
META = torch.device("meta")


def choose_num_pages(
    config: EngineConfig, page_bytes: int, pages_per_request: int, device: torch.device, beside: int
) -> int:
    """Pages of `page_bytes`, at most those of `max_num_seqs` requests. beside: bytes to be left free on a GPU
    (`bytes_beside_pages`). UserError where what is asked for does not fit."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        available = max(0, int(free - total * (1 - config.gpu_memory_utilization)) - beside)
        share, option = 1.0, "gpu_memory_utilization"
        advice = "lower max_num_seqs, max_model_len or max_num_batched_tokens, or raise gpu_memory_utilization"
    else:
        available, share, option = psutil.virtual_memory().available, CPU_CACHE_SHARE, "kv_cache_memory"
        advice = "lower block_size"
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory > available:
            raise UserError(
                f"kv_cache_memory={config.kv_cache_memory} needs {gib(config.kv_cache_memory)} and {gib(available)} are free; "
                "lower kv_cache_memory",
                "kv_cache_memory",
            )
        if config.kv_cache_memory < page_bytes:
            raise UserError(
                f"kv_cache_memory={config.kv_cache_memory} is less than one page of {page_bytes} bytes; "
                "raise it or lower block_size",
                "kv_cache_memory",
            )
        return config.kv_cache_memory // page_bytes
    wanted = config.max_num_seqs * pages_per_request
    affordable = int(available * share) // page_bytes
    if affordable < 1:
        raise UserError(f"a page of KV cache needs {gib(page_bytes)} and {gib(available)} are free; {advice}", option)
    return min(wanted, affordable)


def bytes_beside_pages(
    shape: DecoderConfig,
    limits: Limits,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    budget: int,
    decoded_tokens: int,
    graph_tokens: int,
) -> int:
    """Bytes that the engine allocates beside weights and pages, so that its widest step fits: permanent buffers (exactly, from
    their shapes), then activations of that step and of the graphs, and logits.

    budget: positions of a context set. decoded_tokens: most tokens of a step that get logits. graph_tokens: of the widest
    captured step. UserError where Triton, whose buffers these are, is not there.
    """
    require_triton()
    from aspire_llm.attention.triton.backend import TritonBackend, Tuning

    scored = [layer for layer, window in enumerate(shape.windows) if window is None] if config.drafts else []
    pool = KVPool(1, shape.num_kv_heads, shape.head_dim, 1, config.block_size, dtype, META)
    backend = TritonBackend(
        pool,
        num_heads=shape.num_heads,
        scale=1.0,
        windows=shape.windows,
        max_tokens=limits.widest_step,
        max_rows=limits.max_num_seqs + 1,
        max_len=limits.max_model_len + limits.max_draft_tokens + 1,
        refresh_layers=scored[:1],
        score_layers=scored,
        deterministic=config.deterministic,
        nominal_len=config.max_model_len or shape.max_position_embeddings,
        tuning=Tuning.default(shape.head_dim, device),
    )
    slots = SlotState(limits.max_num_seqs, limits.max_model_len, limits.max_draft_tokens, config.block_size, META)
    contexts = ContextState(shape.num_layers, limits.max_num_seqs + 1, budget if config.drafts else 1, META)
    permanent = tensor_bytes(backend) + tensor_bytes(slots) + SET_COPIES * tensor_bytes(contexts)
    heads = 2 * (shape.num_heads + shape.num_kv_heads)  # queries, keys and values, and what attention makes of them
    # the residual and its norm, each before and after; gate and up, and their product
    width = 4 * shape.hidden_size + heads * shape.head_dim + 3 * shape.intermediate_size
    activations = (limits.widest_step + graph_tokens) * width * dtype.itemsize
    logits = (decoded_tokens * (dtype.itemsize + LOGIT_BYTES) + graph_tokens * dtype.itemsize) * shape.vocab_size
    return permanent + activations + logits + LIBRARY_BYTES


def tensor_bytes(holder: object) -> int:
    """Of the tensors that are attributes of `holder`."""
    return sum(value.nbytes for value in vars(holder).values() if isinstance(value, Tensor))


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
