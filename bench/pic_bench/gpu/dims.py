"""The published dimensions of the models that `gpu_prefill` builds with random weights, and tiny ones for tests.

RoPE is plain: YaRN and llama3 scaling change frequencies, not work.
"""

from __future__ import annotations

from pathlib import Path
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
    rope_dim: int
    nope_dim: int = 0
    """Dimensions of a query and key that do not turn; 0 with grouped-query attention."""
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


MODELS: Final = msgspec.json.decode(Path(__file__).with_name("models.json").read_bytes(), type=dict[str, Dims])
TINY: Final = tuple(name for name in MODELS if name.startswith("tiny"))
"""For tests, and for a look at the benchmark on a CPU."""
