"""The decoder: flat tokens in, hidden states out; attention is an argument.

Llama, Mistral, Qwen2 and Qwen3 in one module: q, k and v in one matrix, gate and up in one. The arithmetic, rounding
included, is that of transformers' modelling code, which is the oracle of its tests. A forward makes no host
synchronisation, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aspire_llm.models.config import DecoderConfig
from aspire_llm.models.ops import LayerCache, Ops, PackedOps, StoringOps, TorchOps

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, query heads, D], k [T, KV heads, D], v [T, KV heads, D]) -> [T, query heads, D].

q and k have rope applied and come in the decoder's dtype, unscaled: the callee multiplies q·k by `config.attention_scale`.
All three are views with D contiguous and any stride over tokens.
"""


class PagedAttend(ABC):
    """An `Attend` into whose cache the decoder may write keys and values itself, which spares a launch a layer."""

    @abstractmethod
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    @abstractmethod
    def cache(self, layer: int) -> LayerCache:
        """Where the step's keys (rope applied) and values belong."""

    @abstractmethod
    def stored(self, layer: int, q: Tensor) -> Tensor:
        """As the call, with keys and values in the cache already."""


def choose_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    if device.type != "cuda":
        return PackedOps() if dtype == torch.float32 and PackedOps.available() else TorchOps()
    from aspire_llm.models.stream import StreamOps

    return StreamOps(torch.cuda.get_device_properties(device).multi_processor_count)


def weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter that takes no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class DecoderLayer(nn.Module):
    """One layer: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, index: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.index = index
        hidden, head = config.hidden_size, config.head_dim
        qkv = (config.num_heads + 2 * config.num_kv_heads) * head

        def new(*shape: int) -> nn.Parameter:
            return weight(*shape, dtype=dtype, device=device)

        self.input_norm = new(hidden)
        self.qkv = new(qkv, hidden)  # rows: query heads, key heads, value heads
        self.qkv_bias = new(qkv) if config.qkv_bias else None
        self.q_norm = new(head) if config.qk_norm else None
        self.k_norm = new(head) if config.qk_norm else None
        self.o = new(hidden, config.num_heads * head)
        self.o_bias = new(hidden) if config.o_bias else None
        self.post_norm = new(hidden)
        self.gate_up = new(2 * config.intermediate_size, hidden)  # rows: gate, up
        self.down = new(hidden, config.intermediate_size)

    def forward(
        self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """x: [T, hidden], the residual stream; delta: what the layer before adds to it; cos, sin: [T, 1, head_dim / 2].
        Returns the stream before this layer's MLP, and what the MLP adds."""
        eps = self.config.rms_norm_eps
        normed, x = ops.add_norm(x, delta, self.input_norm, eps)
        normed, x = ops.add_norm(x, self.attention(normed, cos, sin, attend, ops), self.post_norm, eps)
        return x, self.mlp(normed, ops)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, ops: Ops) -> Tensor:
        config = self.config
        num_q, num_kv = config.num_heads, config.num_kv_heads
        qkv = ops.linear(x, self.qkv, self.qkv_bias).view(-1, num_q + 2 * num_kv, config.head_dim)
        turn = (num_q, self.q_norm, self.k_norm, cos, sin, config.rms_norm_eps)
        if isinstance(attend, PagedAttend) and isinstance(ops, StoringOps):
            attended = attend.stored(self.index, ops.norm_rope_store(qkv, *turn, attend.cache(self.index)))
        else:
            q, k = ops.norm_rope(qkv[:, : num_q + num_kv], *turn)
            attended = attend(self.index, q, k, qkv[:, num_q + num_kv :])
        return ops.delta(attended.flatten(1), self.o, self.o_bias)

    def mlp(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.delta(ops.gated(x, self.gate_up), self.down)

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Name within the layer, as transformers' checkpoints have it, -> the part of a parameter that holds it."""
        config = self.config
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        gate, up = self.gate_up.chunk(2)
        views: dict[str, Tensor | None] = {
            "input_layernorm.weight": self.input_norm,
            "self_attn.o_proj.weight": self.o,
            "self_attn.o_proj.bias": self.o_bias,
            "self_attn.q_norm.weight": self.q_norm,
            "self_attn.k_norm.weight": self.k_norm,
            "post_attention_layernorm.weight": self.post_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": self.down,
        }
        for suffix, fused in (("weight", self.qkv), ("bias", self.qkv_bias)):
            if fused is not None:
                for name, part in zip("qkv", torch.split(fused, [q_rows, kv_rows, kv_rows]), strict=True):
                    views[f"self_attn.{name}_proj.{suffix}"] = part
        return {name: view for name, view in views.items() if view is not None}


class Decoder(nn.Module):
    """A whole decoder with uninitialised weights; `checkpoint_views` says where a checkpoint's tensors go."""

    rope_inv_freq: Tensor  # float32 [head_dim / 2]

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.embedding = weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, dtype=dtype, device=device) for i in range(config.num_layers)
        )
        self.final_norm = weight(config.hidden_size, dtype=dtype, device=device)
        tied = config.tie_word_embeddings
        self.head = self.embedding if tied else weight(*self.embedding.shape, dtype=dtype, device=device)
        inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=device)
        self.register_buffer("rope_inv_freq", inv_freq, persistent=False)
        self._ops = choose_ops(device, dtype)

    def with_ops(self, ops: Ops) -> Decoder:
        """The same weights, computed with by other operations."""
        twin = copy.copy(self)  # shares every parameter
        twin._ops = ops
        return twin

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @torch.no_grad()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run T tokens, of any mix of sequences, through every layer.

        token_ids: int64 [T], each in [0, vocab_size). positions: int64 [T], of each token in its own sequence.
        attend: see `Attend`; called once a layer, in order.
        Returns [T, hidden] in the decoder's dtype, after the final norm.
        """
        x = F.embedding(token_ids, self.embedding)
        delta = None
        cos, sin = self.rope(positions)
        for layer in self.layers:
            x, delta = layer(x, delta, cos, sin, attend, self._ops)
        return self._ops.add_norm(x, delta, self.final_norm, self.config.rms_norm_eps)[0]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [N, hidden], rows of what `forward` returned. Returns [N, vocab_size]: float32, or on a GPU of the decoder's
        dtype, since they are the step's largest array and whoever reads them widens them as it does."""
        logits = self._ops.linear(hidden, self.head)
        return logits if logits.is_cuda else logits.float()

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, 1, head_dim / 2] in the decoder's dtype: once a step, shared by all layers."""
        angles = (positions.float()[:, None] * self.rope_inv_freq)[:, None]
        factor = self.config.rope_attention_factor
        return (angles.cos() * factor).to(self.dtype), (angles.sin() * factor).to(self.dtype)

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Every tensor of a transformers checkpoint -> the part of a parameter that holds it, ready for `copy_`."""
        views: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.final_norm,
        }
        if not self.config.tie_word_embeddings:
            views["lm_head.weight"] = self.head
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            views |= {f"model.layers.{i}.{name}": view for name, view in layer.checkpoint_views().items()}
        return views
