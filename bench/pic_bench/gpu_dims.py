"""Owns the dimensions of the models that `bench-prefill` builds with random weights: the published ones, and tiny ones.

It must not know torch, weights or attention backends. RoPE is plain: YaRN and llama3 scaling change frequencies, not
work.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["MODELS", "TINY", "Dims"]


class Dims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder with grouped-query attention, or with a latent where `latent` is not 0."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Of the pool; 1 with a latent."""
    vocab: int
    ffn: int
    rope_theta: float
    nope_dim: int
    """Dimensions of a query and key that do not turn; 0 with grouped-query attention."""
    rope_dim: int
    v_dim: int
    latent: int = 0
    experts: int = 0
    """Routed experts of every layer but the first `dense_layers`; 0 for a dense model."""
    top_k: int = 0
    shared_experts: int = 0
    expert_ffn: int = 0
    dense_layers: int = 0

    @property
    def qk_dim(self) -> int:
        """Dimensions of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Dimensions of a pool row's key head, or of the whole row with a latent."""
        return self.latent + self.rope_dim if self.latent else self.qk_dim

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.qk_dim**-0.5


TINY: Final = ("tiny-gqa-dims", "tiny-mla-dims")
"""For tests and for a look at the script on a CPU."""

MODELS: Final = {
    "DeepSeek-V2-Lite": Dims(
        layers=27,
        hidden=2_048,
        heads=16,
        kv_heads=1,
        vocab=102_400,
        ffn=10_944,
        rope_theta=10_000.0,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        latent=512,
        experts=64,
        top_k=6,
        shared_experts=2,
        expert_ffn=1_408,
        dense_layers=1,
    ),
    "Llama-3.1-8B": Dims(
        layers=32,
        hidden=4_096,
        heads=32,
        kv_heads=8,
        vocab=128_256,
        ffn=14_336,
        rope_theta=500_000.0,
        nope_dim=0,
        rope_dim=128,
        v_dim=128,
    ),
    "tiny-gqa-dims": Dims(
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        vocab=512,
        ffn=128,
        rope_theta=10_000.0,
        nope_dim=0,
        rope_dim=16,
        v_dim=16,
    ),
    "tiny-mla-dims": Dims(
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=1,
        vocab=512,
        ffn=128,
        rope_theta=10_000.0,
        nope_dim=16,
        rope_dim=16,
        v_dim=16,
        latent=32,
        experts=8,
        top_k=2,
        shared_experts=1,
        expert_ffn=32,
        dense_layers=1,
    ),
}
