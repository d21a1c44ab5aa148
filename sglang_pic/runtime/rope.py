"""The rotation of a live model's keys, read from its own rotary embedding modules.

Modules are recognised by class name and attributes, because nothing of SGLang is imported here. What is read is how far
one position turns a key: the frequencies after scaling, and which dimensions form a pair. A magnitude (YaRN's `mscale`)
is left out, because it is the same at every position, so a moved key keeps it. What cannot be shifted exactly is
refused: frequencies that depend on the length, layers that use positions in another way, and every unknown class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

import torch
from pic_kernels import RopeParams
from pic_kernels.numerics import relative_l2
from torch import Tensor, nn

from sglang_pic.errors import ContractError, UnsupportedError


@dataclass(frozen=True, slots=True, eq=False)
class RopeGeometry:
    """The rotation of every attention layer that a model holds.

    Attributes:
        layer_ids: the model's attention layers, ascending; with pipeline parallelism this rank's.
        params: the rotation of each of `layer_ids`; equal rotations are one object.
        max_shift: the largest shift, in tokens and either direction, the reader asked for.
    """

    layer_ids: tuple[int, ...]
    params: tuple[RopeParams, ...]
    max_shift: int

    def groups(self) -> list[tuple[RopeParams, list[int]]]:
        """Each distinct rotation with the indices into `layer_ids` that share it; usually one group."""
        found: dict[int, tuple[RopeParams, list[int]]] = {}
        for index, params in enumerate(self.params):
            found.setdefault(id(params), (params, []))[1].append(index)
        return list(found.values())


def read_geometry(model: nn.Module, *, max_shift: int) -> RopeGeometry:
    """The rotation of every attention layer of `model`.

    Args:
        model: the loaded model; parameters are not read, only the attributes of its rotary modules.
        max_shift: the largest shift that will be asked for, in tokens: the context length.

    Raises:
        UnsupportedError: the model has no RoPE, or one of its layers cannot be shifted exactly; the message
            names the layer and the class.
        ContractError: a module's table of angles is not that of the frequencies read from it.
    """
    if not 0 < max_shift <= _MAX_SHIFT:
        raise ValueError(f"max_shift={max_shift!r}: must be in [1, {_MAX_SHIFT}]; pass the context length.")
    layers = _rotary_modules(model)
    distinct: dict[tuple[int, bool, bytes], RopeParams] = {}
    by_module: dict[int, RopeParams] = {}
    for rotary in {id(rotary): rotary for rotary in layers.values()}.values():
        params = _read_params(rotary)
        key = (params.rotary_dim, params.is_neox_style, params.inv_freq.numpy().tobytes())
        by_module[id(rotary)] = distinct.setdefault(key, params)
    return RopeGeometry(
        layer_ids=tuple(layers), params=tuple(by_module[id(rotary)] for rotary in layers.values()), max_shift=max_shift
    )


class _Rotary(Protocol):
    """What is read of a known rotary embedding; not every class has the factors."""

    rotary_dim: int
    is_neox_style: bool
    cos_sin_cache: Tensor
    scaling_factors: Sequence[float]

    def _compute_inv_freq(self, argument: float) -> Tensor: ...


def _read_params(module: nn.Module) -> RopeParams:
    name = type(module).__name__
    if name not in KNOWN_EMBEDDINGS:
        reason = REFUSED_EMBEDDINGS.get(name) or f"its geometry is not known; known are {', '.join(KNOWN_EMBEDDINGS)}"
        raise UnsupportedError(
            f"rotary embedding {name}: {reason}. Serve this model without --radix-cache-backend pic."
        )
    rotary = cast(_Rotary, module)
    # On the device where the module keeps its table, because rounding differs by device.
    with torch.device(rotary.cos_sin_cache.device):
        inv_freq = rotary._compute_inv_freq(getattr(rotary, KNOWN_EMBEDDINGS[name])).detach().cpu()
    if name == "LinearScalingRotaryEmbedding":
        factors = list(rotary.scaling_factors)
        if len(factors) != 1:
            raise UnsupportedError(f"{name} with scaling_factors={factors!r}: one factor is supported.")
        # Positions are divided by the factor; in float64, because a float32 quotient is rounded once more.
        inv_freq = inv_freq.to(torch.float64) / float(factors[0])
    elif inv_freq.dtype != torch.float64:
        inv_freq = inv_freq.to(torch.float32)
    rotary_dim = int(rotary.rotary_dim)
    if tuple(inv_freq.shape) != (rotary_dim // 2,) or not bool(inv_freq.isfinite().all()):
        raise UnsupportedError(
            f"rotary embedding {name}: read frequencies of shape {tuple(inv_freq.shape)!r} for "
            f"rotary_dim={rotary_dim!r}; expected ({rotary_dim // 2},), all finite."
        )
    _check_table(name, rotary.cos_sin_cache, inv_freq.to(torch.float64))
    return RopeParams(inv_freq=inv_freq, rotary_dim=rotary_dim, is_neox_style=bool(rotary.is_neox_style))


# What a table may differ by: the rounding of float32 angles, or of entries in the model's dtype. The limits of the
# start-up check on rows are wider, so that a fault too small for rows of few bits at its shifts is found here.
_TABLE_LIMITS: Final = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def _check_table(name: str, table: Tensor, inv_freq: Tensor) -> None:
    """Compare the frequencies with the module's own table of cosines and sines, whatever its magnitude is."""
    position = min(1_000, len(table) - 1)
    cos_sin = table[position].detach().to("cpu", torch.float64).view(2, -1)
    angles = position * inv_freq
    error = relative_l2(cos_sin / cos_sin.norm(dim=0), torch.stack((angles.cos(), angles.sin())))
    limit = _TABLE_LIMITS.get(table.dtype, 0.0)
    if not error <= limit:
        raise ContractError(
            f"rotary embedding {name}: the table of angles differs from the frequencies read at position {position} by "
            f"a relative L2 of {error:.2g}; allowed is {limit:.2g} for a {table.dtype} table. This SGLang rotates keys "
            "in a way this version does not know; serve without --radix-cache-backend pic."
        )


def _rotary_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The rotary module of every attention layer, by ascending layer id."""
    layers: dict[int, tuple[str, nn.Module]] = {}
    without: list[str] = []
    for name, parent in model.named_modules():
        cores = [child for child in parent.children() if _is_a(child, "RadixAttention")]
        if not cores:
            continue
        _refuse_attention(name, parent, cores)
        ropes = [child for child in parent.children() if _is_rotary_module(child)]
        if len(ropes) > 1:
            classes = ", ".join(type(rope).__name__ for rope in ropes)
            raise UnsupportedError(
                f"attention layer {name!r} has {len(ropes)} rotary embeddings ({classes}); expected one."
            )
        if not ropes or not all(getattr(parent, flag, True) for flag in _ROPE_FLAGS):
            without.append(name)
            continue
        for layer_id in sorted({int(core.layer_id) for core in cores}):
            if layer_id in layers:
                raise UnsupportedError(
                    f"attention layers {layers[layer_id][0]!r} and {name!r} share layer_id={layer_id!r}."
                )
            layers[layer_id] = (name, ropes[0])
    if not layers:
        raise UnsupportedError(
            f"{type(model).__name__}: no attention layer with a rotary embedding was found; "
            "only models with RoPE are supported."
        )
    if without:
        raise UnsupportedError(
            f"{type(model).__name__}: {len(without)} attention layers have no rotary embedding, e.g. {without[0]!r}; "
            "models that mix layers with and without RoPE are not supported."
        )
    return {layer_id: rotary for layer_id, (_, rotary) in sorted(layers.items())}


def _is_rotary_module(module: nn.Module) -> bool:
    """Whether `module` looks like a rotary embedding, known or not."""
    return hasattr(module, "rotary_dim") or any(
        "rotaryembedding" in base.__name__.lower() for base in type(module).__mro__
    )


# A float64 angle is exact to 1e-8 rad far beyond this; no context is longer.
_MAX_SHIFT: Final = 1 << 24

# Attributes by which an attention module says that it does not use the rotary embedding it holds.
_ROPE_FLAGS: Final = ("use_rope", "attn_use_rope")

# Modules that change a key by learned weights after its rotation, so that a moved key is no rotation of it.
_KEY_NORM_AFTER_ROPE: Final = frozenset({"HunYuanAttention"})

_LENGTH = "its frequencies change with the length, so a shift is not a rotation"
REFUSED_EMBEDDINGS: Final = {
    "DualChunkRotaryEmbedding": "key positions wrap within a chunk, so a shift is not a rotation",
    "DynamicNTKAlphaRotaryEmbedding": _LENGTH,
    "DynamicNTKScalingRotaryEmbedding": _LENGTH,
    "FourierRotaryEmbedding": "its coefficients mix frequencies, so a shift is not a rotation",
    "Gemma4RotaryEmbedding": "its pairs reach across the unrotated part of a head",
    "Phi3LongRoPEScaledRotaryEmbedding": _LENGTH,
}


def _is_a(module: nn.Module, class_name: str) -> bool:
    return any(base.__name__ == class_name for base in type(module).__mro__)


def _refuse_attention(name: str, parent: nn.Module, cores: Sequence[nn.Module]) -> None:
    """Refuse layers whose keys are not rotations of one another whatever the rotary embedding says."""
    for core in cores:
        window = getattr(core, "sliding_window_size", None)
        if window is not None and window > 0:
            raise UnsupportedError(
                f"attention layer {name!r} attends in a sliding window of {window!r} tokens: not supported."
            )
        if getattr(core, "is_cross_attention", False):
            raise UnsupportedError(f"attention layer {name!r} is cross attention: not supported.")
    if type(parent).__name__ in _KEY_NORM_AFTER_ROPE and getattr(parent, "use_qk_norm", True):
        raise UnsupportedError(
            f"attention layer {name!r} ({type(parent).__name__}) normalises keys after their rotation: not supported."
        )


KNOWN_EMBEDDINGS: Final = {
    "DeepseekScalingRotaryEmbedding": "scaling_factor",
    "LinearScalingRotaryEmbedding": "base",
    "Llama3RotaryEmbedding": "base",
    "MRotaryEmbedding": "base",
    "RotaryEmbedding": "base",
    "YaRNScalingMRotaryEmbedding": "scaling_factor",
    "YaRNScalingRotaryEmbedding": "scaling_factor",
}
"""The classes that can be read, with the attribute that is the argument of their `_compute_inv_freq`."""
