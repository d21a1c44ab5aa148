"""One attention layer with grouped keys (GQA) written as multi-head latent attention (MLA), in closed form.

The idea is TransMLA's (arXiv:2502.07864): a rotation about one frequency treats the keys of all heads alike, so any
invertible map that mixes the heads *within* a frequency, undone in the queries, leaves every score as it was. Of the
`num_kv_heads` mixed keys of a frequency, the one that carries most of the scores keeps its rotary embedding and becomes
MLA's shared key; the others lose theirs. Two steps differ from the paper. The map need not be orthogonal: keys are
weighed by the queries that meet them, by a singular value decomposition of whitened queries against whitened keys. And
the latent's RMSNorm, which GQA does not have, is made an identity: the layer's input is RMS-normalised itself, so in an
*orthonormal* basis the latent has the same length for every token, except for the directions left out, in which the
input hardly ever points. Everything is computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

_SMALLEST_EIGENVALUE = 1e-10
"""Relative to the largest of its matrix; directions below carry nothing, and nothing may be divided by them."""


class MlaShape(NamedTuple):
    """Sizes of the converted layer; the defaults are DeepSeek-V2's, which kernels are built for.

    What the layer does not need of a size is filled with zeros.
    """

    latent_rank: int = 512
    nope_dim: int = 128
    value_dim: int = 128


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """A layer to convert; its input norm's weight is already multiplied into the three projections.

    `query` is `[num_heads, head_dim, hidden]`, `key` and `value` are `[num_kv_heads, head_dim, hidden]`, `output` is
    `[hidden, num_heads * head_dim]`; float64, on the CPU. Dimensions `j` and `j + head_dim // 2` of a head turn
    together.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The weights of DeepSeek-V2's layer for an input norm of weight one; the latent norm's weight is one too."""

    q_proj: torch.Tensor
    """`[num_heads * (nope_dim + head_dim), hidden]`."""
    kv_a_proj: torch.Tensor
    """`[latent_rank + head_dim, hidden]`, pairs of the shared key interleaved."""
    kv_b_proj: torch.Tensor
    """`[num_heads * (nope_dim + value_dim), latent_rank]`."""
    o_proj: torch.Tensor
    """`[hidden, num_heads * value_dim]`."""
    missing_energy: float
    """Share of the input's energy outside the latent: by how much the squares of the latent's lengths can differ."""


class SharedKeys(NamedTuple):
    """How the heads' keys are split: `key = spread * (mix @ key) + rest @ key` for every frequency; all complex."""

    mix: torch.Tensor
    """`[num_freqs, num_kv_heads]`: the shared key as a mixture of the heads' keys."""
    spread: torch.Tensor
    """`[num_freqs, num_kv_heads]`: how much of the shared key is in a head's own key."""
    rest: torch.Tensor
    """`[num_freqs, num_kv_heads, num_kv_heads]`: the part that keeps no rotary embedding."""


def convert(layer: GroupedAttention, moments: torch.Tensor, shape: MlaShape) -> LatentAttention:
    """The layer as MLA; scores differ by the rotation of what `SharedKeys.rest` leaves, values not at all.

    Args:
        layer: The weights.
        moments: `[hidden, hidden]` float64, the mean of `x x^T` over inputs `x` of mean square one (normalised, without
            the norm's weight).
        shape: Sizes; `latent_rank` must hold all keys and values, `nope_dim` and `value_dim` a head.

    Raises:
        ValueError: A size is too small.
    """
    num_heads, head_dim, hidden = layer.query.shape
    group = num_heads // len(layer.key)
    if shape.latent_rank < 2 * layer.key.numel() // hidden or min(shape.nope_dim, shape.value_dim) < head_dim:
        raise ValueError(f"shape={shape!r}: too small for {len(layer.key)} KV heads of {head_dim} dimensions.")
    query, key = _as_complex(layer.query), _as_complex(layer.key)
    shared = share_keys(query, key, moments)

    basis = _latent_basis(torch.cat([layer.key.flatten(0, 1), layer.value.flatten(0, 1)]), moments, shape.latent_rank)
    latent_energy = torch.trace(basis @ moments @ basis.T)
    # The norm makes the latent's mean square one: its usual length is given back behind it.
    scale = torch.sqrt(latent_energy / shape.latent_rank)

    # Each query head meets its own share of the shared key. The factor makes up for the wider head's softmax scale.
    widening = ((shape.nope_dim + head_dim) / head_dim) ** 0.5
    spread = shared.spread.T.repeat_interleave(group, dim=0).conj()
    turning_query = _interleaved(query * spread[..., None]) * widening
    resting_query = _padded(layer.query, shape.nope_dim) * widening
    resting_key = _halves(torch.einsum("fij,jfh->ifh", shared.rest, key)).repeat_interleave(group, dim=0)
    value = layer.value.repeat_interleave(group, dim=0)
    expanded = torch.cat([_padded(resting_key, shape.nope_dim), _padded(value, shape.value_dim)], dim=1)
    output = layer.output.view(hidden, num_heads, head_dim).transpose(1, 2)
    return LatentAttention(
        q_proj=torch.cat([resting_query, turning_query], dim=1).flatten(0, 1),
        kv_a_proj=torch.cat([basis, _interleaved(torch.einsum("fi,ifh->fh", shared.mix, key)[None])[0]]),
        kv_b_proj=expanded.flatten(0, 1) @ basis.T * scale,
        o_proj=_padded(output.permute(2, 1, 0), shape.value_dim).permute(2, 0, 1).flatten(1),
        missing_energy=1.0 - float(latent_energy / torch.trace(moments)),
    )


def share_keys(query: torch.Tensor, key: torch.Tensor, moments: torch.Tensor) -> SharedKeys:
    """The best shared key of every frequency: the part of the scores that it cannot carry has the least mean square.

    Args:
        query: `[num_heads, num_freqs, hidden]`, complex; each KV head is met by as many query heads.
        key: `[num_kv_heads, num_freqs, hidden]`, complex.
        moments: As for `convert`.
    """
    num_kv_heads, num_freqs, _ = key.shape
    moments = moments.to(key.dtype)
    key_energy = torch.einsum("ifh,hg,jfg->fij", key, moments, key.conj())
    query_energy = torch.einsum("nfh,hg,nfg->fn", query, moments, query.conj())
    # A query meets the keys of one head, so the queries' energy has no entries between heads.
    query_energy = torch.diag_embed(query_energy.view(num_freqs, num_kv_heads, -1).sum(-1))
    (query_root, query_inverse), (key_root, key_inverse) = _roots(query_energy), _roots(key_energy)
    left, strength, right = torch.linalg.svd(query_root @ key_root)
    spread = (query_inverse @ left[..., :1])[..., 0] * strength[..., :1]
    mix = (right[..., :1, :] @ key_inverse)[..., 0, :]
    one = torch.eye(num_kv_heads, dtype=key.dtype)
    return SharedKeys(mix=mix, spread=spread, rest=one - spread[..., :, None] * mix[..., None, :])


def _latent_basis(needed: torch.Tensor, moments: torch.Tensor, rank: int) -> torch.Tensor:
    """`[rank, hidden]` orthonormal rows: they span the rows of `needed`, then what the input has most of beside."""
    inside = torch.linalg.svd(needed, full_matrices=True)[2]
    inside, outside = inside[: len(needed)], inside[len(needed) :]
    _, directions = torch.linalg.eigh(outside @ moments @ outside.T)  # ascending
    return torch.cat([inside, directions.T.flip(0)[: rank - len(needed)] @ outside])


def _roots(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The square roots of positive semi-definite matrices, and the inverses of these."""
    values, vectors = torch.linalg.eigh(matrices)
    values = values.clamp_min(float(values.max()) * _SMALLEST_EIGENVALUE)[..., None, :]
    return (vectors * values**0.5) @ vectors.mH, (vectors * values**-0.5) @ vectors.mH


def _as_complex(heads: torch.Tensor) -> torch.Tensor:
    """`[..., head_dim, hidden]` to `[..., head_dim // 2, hidden]`: what turns together is one number."""
    first, second = heads.chunk(2, dim=-2)
    return torch.complex(first, second)


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """The inverse of `_as_complex`."""
    return torch.cat([numbers.real, numbers.imag], dim=-2)


def _interleaved(numbers: torch.Tensor) -> torch.Tensor:
    """Complex `[n, num_freqs, hidden]` to real `[n, 2 * num_freqs, hidden]` as DeepSeek pairs them: side by side."""
    return torch.stack([numbers.real, numbers.imag], dim=-2).flatten(1, 2)


def _padded(heads: torch.Tensor, dim: int) -> torch.Tensor:
    """`[n, head_dim, m]` with zeros behind up to `dim`."""
    return torch.nn.functional.pad(heads, (0, 0, 0, dim - heads.shape[1]))
