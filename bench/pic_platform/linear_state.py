"""Layers of the gated delta rule (Qwen3-Next, Qwen3.5), which SGLang has for accelerators only, in plain PyTorch.

Such a layer keeps of a sequence the last inputs of a short convolution and one matrix a head, its state. Names,
signatures and layouts are those of SGLang's functions in whose place these are; states are
`[num_slots, num_v_heads, v_dim, k_dim]`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch.nn import functional as F

_CHUNK: Final = 64


def install() -> None:
    """Replace the functions of SGLang's Qwen3-Next by those of this module; idempotent."""
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
    from sglang.srt.models import qwen2_moe, qwen3_next

    gdn_backend.causal_conv1d_fn = convolve
    gdn_backend.causal_conv1d_update = convolve_step
    gdn_backend.fused_gdn_gating = gates
    TritonGDNKernel.supports_packed_decode = False
    TritonGDNKernel.extend = extend
    TritonGDNKernel.decode = decode
    hybrid_linear_attn_backend.track_mamba_states_if_needed = track
    hybrid_linear_attn_backend.track_mamba_states_all_layers = partial(track, dim=1)
    FusedRMSNormGated.forward = norm_gated
    qwen3_next.fused_qkvzba_split_reshape_cat = split_projections
    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated
    # Each step pins the mask of the sequences whose states it copies; there is no device to pin it for.
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int],
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
    **_: object,
) -> torch.Tensor:
    """The causal convolution of each channel over new tokens.

    Args:
        x: `[num_channels, num_tokens]`, the sequences one behind the other.
        weight: `[num_channels, width]`.
        bias: `[num_channels]`.
        conv_states: `[num_slots, num_channels, width - 1]`, written in place.
        query_start_loc: Not used; lengths say it.
        seq_lens_cpu: New tokens of each sequence.
        cache_indices: The slot of each sequence.
        has_initial_state: Whether a sequence goes on from its slot.
        activation: `silu`, or None.

    Returns:
        As `x`.
    """
    parts = []
    for sequence, slot, goes_on in zip(
        x[:, : sum(seq_lens_cpu)].split(list(seq_lens_cpu), dim=1),
        cache_indices.tolist(),
        has_initial_state.tolist(),
        strict=True,
    ):
        before = conv_states[slot] if goes_on else torch.zeros_like(conv_states[slot])
        whole = torch.cat([before.to(x.dtype), sequence], dim=1)
        conv_states[slot] = whole[:, -before.shape[1] :]
        parts.append(F.conv1d(whole[None], weight[:, None], bias, groups=len(weight))[0])
    found = torch.cat(parts, dim=1)
    return F.silu(found) if activation else found


def convolve_step(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """The same over one new token of each sequence, `[batch_size, num_channels]`."""
    slots = conv_state_indices.long()
    whole = torch.cat([conv_state[slots].to(x.dtype), x[:, :, None]], dim=2)
    conv_state[slots] = whole[:, :, 1:]
    found = F.conv1d(whole, weight[:, None], bias, groups=len(weight))[:, :, 0]
    return F.silu(found) if activation else found


def gates(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithm of the decay of the state at a token, and weight of its update, float32 `[1, num_tokens, heads]`."""
    left = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float(), beta, threshold)
    return left[None], b.float().sigmoid()[None]


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule over the tokens of one sequence, a chunk at a time.

    A token first decays the state by `exp(g)`, then replaces a part `beta` of the value at `k` by `v`.
    Within a chunk the corrections of all tokens are one triangular system.

    Args:
        q: `[num_tokens, num_heads, k_dim]`, float32; normed and scaled.
        k: Likewise, normed.
        v: `[num_tokens, num_heads, v_dim]`, float32.
        g: `[num_tokens, num_heads]`, 0 or less.
        beta: Likewise, in `[0, 1]`.
        state: `[num_heads, v_dim, k_dim]`, before the first token.

    Returns:
        The outputs, shaped as `v`, and the states before each chunk and after the last token,
        `[num_chunks + 1, num_heads, v_dim, k_dim]`.
    """
    outputs, states = [], [state]
    for start in range(0, len(q), _CHUNK):
        # [num_heads, chunk, ...]
        queries, keys, values, decays, writes = (
            each[start : start + _CHUNK].transpose(0, 1) for each in (q, k, v, g, beta)
        )
        total = decays.cumsum(1)
        left = (total[:, :, None] - total[:, None, :]).exp().tril()
        writing = keys * writes[:, :, None]
        system = (writing @ keys.mT * left).tril(-1) + torch.eye(keys.shape[1])
        known = torch.cat([values * writes[:, :, None], writing * total.exp()[:, :, None]], dim=2)
        solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        put = solved[:, :, : values.shape[2]] - solved[:, :, values.shape[2] :] @ state.mT
        read = (queries * total.exp()[:, :, None]) @ state.mT + (queries @ keys.mT * left) @ put
        outputs.append(read.transpose(0, 1))
        rest = (total[:, -1:] - total).exp()[:, :, None]
        state = state * total[:, -1].exp()[:, None, None] + put.mT @ (keys * rest)
        states.append(state)
    return torch.cat(outputs), torch.stack(states)


def extend(
    _kernel: object,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """New tokens of each sequence; also the states before each of their chunks, from which SGLang keeps one."""
    queries, keys = _normed(q[0], k[0], v.shape[2])
    outputs, before = torch.zeros_like(v[0]), [ssm_states[:0]]
    bounds = query_start_loc.tolist()
    for start, end, slot in zip(bounds, bounds[1:], cache_indices.tolist(), strict=False):
        if end > start:
            span = slice(start, end)
            read, states = delta_rule(
                queries[span], keys[span], v[0, span].float(), g[0, span], beta[0, span], ssm_states[slot].float()
            )
            outputs[span], ssm_states[slot] = read.to(v.dtype), states[-1].to(ssm_states.dtype)
            before.append(states[:-1].to(ssm_states.dtype))
    return outputs[None], None, torch.cat(before)[None]


def decode(
    _kernel: object,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    """One token of each sequence, without chunks."""
    slots = cache_indices.long()
    queries, keys = _normed(q[0], k[0], v.shape[2])
    g, beta = gates(A_log, a, b, dt_bias)
    states = ssm_states[slots].float() * g[0].exp()[:, :, None, None]
    there = (states @ keys[..., None])[..., 0]
    put = (v[0].float() - there) * beta[0][:, :, None]
    states = states + put[..., None] * keys[:, :, None, :]
    ssm_states[slots] = states.to(ssm_states.dtype)
    return (states @ queries[..., None])[..., 0].to(v.dtype)[None]


def track(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
    *,
    dim: int = 0,
) -> None:
    """Copy the states of the masked sequences to the slots that track them; `dim` is the dimension of slots."""
    rows = mamba_track_mask[:batch_size].nonzero().flatten()
    for states in (conv_states, ssm_states):
        copied = states.index_select(dim, cache_indices[rows].long())
        states.index_copy_(dim, mamba_track_indices[rows].long(), copied)


def _normed(q: torch.Tensor, k: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of unit length, those scaled, one for each head of the values; float32."""
    each = (
        (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(
            num_heads // x.shape[1], dim=1
        )
        for x in (q, k)
    )
    queries, keys = each
    return queries * q.shape[-1] ** -0.5, keys


def norm_gated(norm: Any, x: torch.Tensor, g: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """RMS norm, then the gate."""
    normed = x.float() * (x.float().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    gate = g.float().sigmoid() if norm.activation == "sigmoid" else F.silu(g.float())
    return ((norm.weight * normed.to(x.dtype)) * gate).to(x.dtype)


def add_gated(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared_output: torch.Tensor, output: torch.Tensor
) -> None:
    """Add the shared expert's output, `[num_tokens, hidden_size]`, times a gate for each token to `output`."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()
    output.copy_(output.float() + gate[:, None] * shared_output.float())


def split_projections(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the output of the projections, which is ordered by head of the keys.

    Returns:
        Queries, keys and values `[num_tokens, channels]`; the gate `[num_tokens, num_v_heads, v_dim]`; b and a
        `[num_tokens, num_v_heads]`.
    """
    num_tokens, per = len(mixed_qkvz), num_v_heads // num_k_heads
    parts = mixed_qkvz.view(num_tokens, num_k_heads, -1).split([k_dim, k_dim, per * v_dim, per * v_dim], dim=2)
    q, k, v, z = (part.reshape(num_tokens, -1) for part in parts)
    b, a = (part.reshape(num_tokens, -1) for part in mixed_ba.view(num_tokens, num_k_heads, -1).split(per, dim=2))
    return torch.cat([q, k, v], dim=1), z.view(num_tokens, num_v_heads, v_dim), b, a
