"""The rotation of a live model's keys, read from its own rotary embedding modules.

Modules are recognised by class name and attributes, because nothing of SGLang is imported here. The frequencies after
scaling are read, and the dimensions that form a pair. A magnitude (YaRN's `mscale`) is ignored: it is the same at every
position. Everything that cannot be shifted exactly is refused: frequencies that depend on the length, layers that use
positions in another way, and every unknown class. If queries are scaled by steps of positions, rows are shifted only
within their step. Keys of layers that declare to use no positions are not rotated; the start-up check finds other such
layers (`checks.moved_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, Protocol, cast

import torch
from pic_kernels import RopeParams
from pic_kernels.numerics import relative_l2
from torch import Tensor, nn

from sglang_pic.core import PositionSteps
from sglang_pic.errors import ContractError, Refused, UnsupportedError
from sglang_pic.runtime.index_keys import IndexRope, find_indexers, index_ropes


@dataclass(frozen=True, slots=True, eq=False)
class RopeGeometry:
    """The rotation of every attention layer of a model.

    Attributes:
        layer_ids: the model's attention layers, ascending; with pipeline parallelism this rank's.
        params: the rotation of each of `layer_ids`; equal rotations are one object.
        max_shift: the largest shift, in tokens and either direction.
        index: per layer its indexer, or `None`; empty if no layer has one.
        steps: a shift is exact only within them; `None` if it is exact at all positions.
    """

    layer_ids: tuple[int, ...]
    params: tuple[RopeParams, ...]
    max_shift: int
    index: tuple[IndexRope | None, ...] = ()
    steps: PositionSteps | None = None

    def holding(self, indices: Sequence[int]) -> RopeGeometry:
        """A copy that does not rotate the keys of the layers at `indices` into `layer_ids`."""
        still: dict[int, RopeParams] = {}
        params = [
            still.setdefault(id(rope), replace(rope, inv_freq=torch.zeros_like(rope.inv_freq)))
            if index in indices
            else rope
            for index, rope in enumerate(self.params)
        ]
        return replace(self, params=tuple(params))

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
        max_shift: the largest shift, in tokens: the context length.

    Raises:
        UnsupportedError: the model has no RoPE, or one of its layers cannot be shifted exactly within `max_shift`; the
            message names the layer and the class.
        ContractError: a module's table of angles differs from the frequencies read from it.
    """
    if not 0 < max_shift <= _MAX_SHIFT:
        raise ValueError(f"max_shift={max_shift!r}: must be in [1, {_MAX_SHIFT}]; pass the context length.")
    layers = _rotary_modules(model)
    distinct: dict[tuple[int, bool, bytes], RopeParams] = {}
    by_module: dict[int, RopeParams] = {}
    turning = [rotary for rotary in layers.values() if rotary is not None]
    indexers = find_indexers((parent, layer_ids) for _, parent, _, layer_ids in _attention(model))
    of_indexers = [cast(nn.Module, indexer.rotary_emb) for indexer in indexers.values()]
    for rotary in {id(rotary): rotary for rotary in (*turning, *of_indexers)}.values():
        params = _read_params(rotary, max_shift)
        key = (params.rotary_dim, params.is_neox_style, params.inv_freq.numpy().tobytes())
        by_module[id(rotary)] = distinct.setdefault(key, params)
    index = index_ropes(indexers, by_module)
    geometry = RopeGeometry(
        layer_ids=tuple(layers),
        params=tuple(by_module[id(turning[0] if rotary is None else rotary)] for rotary in layers.values()),
        max_shift=max_shift,
        index=tuple(index.get(layer) for layer in layers) if index else (),
        steps=_read_steps(model),
    )
    return geometry.holding([index for index, rotary in enumerate(layers.values()) if rotary is None])


def _read_steps(model: nn.Module) -> PositionSteps | None:
    """The steps of positions by which a model scales queries, if it does."""
    found = {
        steps
        for module in model.modules()
        if (read := _STEPS.get(type(module).__name__)) is not None and (steps := read(module)) is not None
    }
    if len(found) > 1:
        raise _unsupported(f"queries scaled by {sorted(found)}", "layers must agree on the steps")
    return found.pop() if found else None


def _llama4_steps(attention: Any) -> PositionSteps | None:
    # Layers with a rotary embedding are not scaled.
    is_scaled = attention.attn_temperature_tuning and not attention.use_rope
    return PositionSteps(int(attention.floor_scale), offset=1) if is_scaled else None


def _mistral_steps(model: Any) -> PositionSteps | None:
    scaling = model.llama_4_scaling_config
    return None if scaling is None else PositionSteps(int(scaling["original_max_position_embeddings"]))


def _ministral_steps(attention: Any) -> PositionSteps | None:
    is_scaled = attention.llama_4_scaling_beta is not None
    return PositionSteps(int(attention.max_position_embeddings)) if is_scaled else None


_STEPS: Final[dict[str, Callable[[Any], PositionSteps | None]]] = {
    "DeepseekV2Model": _mistral_steps,
    "Llama4Attention": _llama4_steps,
    "Ministral3Attention": _ministral_steps,
}
"""The modules that scale queries by steps, and functions that read the steps; keys and values are not scaled."""


def refuse_length(name: str, rotary: object, context_len: int) -> None:
    """Refuse a context that reaches positions at which a rotary embedding has other frequencies.

    Args:
        name: the class of `rotary`.
        rotary: its attributes give the first such position.
        context_len: in tokens.

    Raises:
        UnsupportedError: it names both lengths.
    """
    fixed_len = int(_FIXED_LENGTHS.get(name, lambda _: context_len)(rotary))
    if context_len > fixed_len:
        refused = Refused(f"its frequencies change at {fixed_len}", f"start with --context-length {fixed_len}")
        raise UnsupportedError(refused.line(f"the rotary embedding {name} in a context of {context_len} tokens"))


class _Rotary(Protocol):
    """The members read of a known rotary embedding; not every class has the factors."""

    rotary_dim: int
    is_neox_style: bool
    scaling_factors: Sequence[float]

    def _compute_inv_freq(self, argument: Any) -> Tensor: ...


class _ModelRotary(Protocol):
    """The members read of a rotary embedding that a model has for its layers."""

    rope_type: str
    inv_freq: Tensor

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]: ...


def _read_params(module: nn.Module, max_shift: int) -> RopeParams:
    name = type(module).__name__
    if name in MODEL_EMBEDDINGS:
        return _read_model_rotary(name, cast(_ModelRotary, module))
    if name not in KNOWN_EMBEDDINGS:
        raise _unsupported(f"the rotary embedding {name}", REFUSED_EMBEDDINGS.get(name, UNKNOWN_EMBEDDING))
    refuse_length(name, module, max_shift)
    rotary = cast(_Rotary, module)
    table: Tensor = getattr(module, "short_cos_sin_cache" if name == _LONG else "cos_sin_cache")
    # On the device of the module's table, because rounding differs by device.
    with torch.device(table.device):
        inv_freq = rotary._compute_inv_freq(_ARGUMENTS.get(name, attrgetter(KNOWN_EMBEDDINGS[name]))(rotary))
    inv_freq = inv_freq.detach().cpu()
    if name == "LinearScalingRotaryEmbedding":
        factors = list(rotary.scaling_factors)
        if len(factors) != 1:
            raise _unsupported(f"{name} of scaling_factors={factors!r}", "one factor is supported")
        # Positions are divided by the factor; in float64, because a float32 quotient is rounded once more.
        inv_freq = inv_freq.to(torch.float64) / float(factors[0])
    elif inv_freq.dtype != torch.float64:
        inv_freq = inv_freq.to(torch.float32)
    rotary_dim = int(rotary.rotary_dim)
    if tuple(inv_freq.shape) != (rotary_dim // 2,) or not bool(inv_freq.isfinite().all()):
        raise _unsupported(
            f"frequencies of shape {tuple(inv_freq.shape)!r} in the rotary embedding {name}",
            f"({rotary_dim // 2},) fits rotary_dim={rotary_dim!r}, all finite",
        )
    position = min(_CHECKED_POSITION, len(table) - 1)
    _check_table(name, table[position].view(2, -1), position, inv_freq.to(torch.float64))
    return RopeParams(inv_freq=inv_freq, rotary_dim=rotary_dim, is_neox_style=getattr(rotary, "is_neox_style", True))


def _read_model_rotary(name: str, rotary: _ModelRotary) -> RopeParams:
    """The rotation of layers that get cosines and sines from their model; halves are paired, as in NeoX."""
    if rotary.rope_type not in _FIXED_ROPE_TYPES:
        raise _unsupported(f"{name} of rope_type {rotary.rope_type!r}", _LENGTH)
    inv_freq = rotary.inv_freq.detach().to("cpu", torch.float32)
    with torch.no_grad():
        position = torch.tensor([[_CHECKED_POSITION]], device=rotary.inv_freq.device)
        cos, sin = rotary(torch.zeros(1, device=rotary.inv_freq.device), position)
    half = len(inv_freq)
    _check_table(
        name, torch.stack((cos.flatten()[:half], sin.flatten()[:half])), _CHECKED_POSITION, inv_freq.to(torch.float64)
    )
    return RopeParams(inv_freq=inv_freq, rotary_dim=2 * half, is_neox_style=True)


# Rounding of float32 angles, or of entries in the model's dtype. The limits of the start-up check on rows are wider, so
# this finds errors too small for rows of few bits at its shifts.
_TABLE_LIMITS: Final = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_CHECKED_POSITION: Final = 1_000


def _check_table(name: str, cos_sin: Tensor, position: int, inv_freq: Tensor) -> None:
    """Compare the frequencies with the module's own cosines and sines, of any magnitude.

    Args:
        name: the module's class.
        cos_sin: of `position`, `[2, rotary_dim / 2]`.
        position: from 0.
        inv_freq: the frequencies that were read.

    Raises:
        ContractError: they differ by more than rounding.
    """
    given = cos_sin.detach().to("cpu", torch.float64)
    angles = position * inv_freq
    error = relative_l2(given / given.norm(dim=0), torch.stack((angles.cos(), angles.sin())))
    limit = _TABLE_LIMITS.get(cos_sin.dtype, 0.0)
    if not error <= limit:
        raise ContractError(
            f"rotary embedding {name}: the table of angles differs from the frequencies read at position {position} by "
            f"a relative L2 of {error:.2g}; allowed is {limit:.2g} for a {cos_sin.dtype} table. This SGLang rotates "
            "keys in a way this version does not know; start without --radix-cache-backend pic."
        )


def _attention(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Module], list[int]]]:
    """The modules with an attention core, by name, with their cores and the ids of their layers."""
    for name, parent in model.named_modules():
        if cores := [child for child in parent.children() if _is_a(child, "RadixAttention")]:
            yield name, parent, cores, sorted({int(cast(Any, core).layer_id) for core in cores})


def _rotary_modules(model: nn.Module) -> dict[int, nn.Module | None]:
    """The rotary module of every attention layer, by ascending layer id; None if the layer declares to use none."""
    layers: dict[int, tuple[str, nn.Module | None]] = {}
    modules = dict(model.named_modules())
    for name, parent, cores, layer_ids in _attention(model):
        where = f"attention layer {name!r} ({type(parent).__name__})"
        rotary = _rotary_of(where, name, parent, modules)
        for trait, has_it in _TRAITS.items():
            if any(has_it(parent, core) for core in cores):
                raise _unsupported(f"{where}, {trait}", REFUSED_LAYERS[trait])
        for layer_id in layer_ids:
            if layer_id in layers:
                raise _unsupported(f"{where} on the rows of layer {layers[layer_id][0]!r}", REFUSED_LAYERS[_SHARED])
            layers[layer_id] = (name, rotary)
    if all(rotary is None for _, rotary in layers.values()):
        raise _unsupported(f"{type(model).__name__}, {_WITHOUT_ROPE}", REFUSED_LAYERS[_WITHOUT_ROPE])
    return {layer_id: rotary for layer_id, (_, rotary) in sorted(layers.items())}


def _rotary_of(where: str, name: str, parent: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """The module that rotates the keys of an attention layer; None if the layer declares to use none."""
    if type(parent).__name__ in _TURNED_BY_MODEL:
        # Gemma 3's layers use the model's rotary embedding: their own one is not scaled.
        above = [name.rsplit(".", steps)[0] for steps in range(1, name.count(".") + 1)]
        holder = next((modules[each] for each in (*above, "") if hasattr(modules[each], _OF_WINDOWS)), None)
        if holder is None:
            raise ContractError(f"{where}: nothing above it has {_OF_WINDOWS!r}; this version was built for 0.5.23.")
        return cast(nn.Module, getattr(holder, _OF_WINDOWS if parent.is_sliding else _OF_ALL))
    ropes = [child for child in parent.children() if _is_rotary_module(child)]
    if len(ropes) > 1:
        classes = ", ".join(type(rope).__name__ for rope in ropes)
        raise _unsupported(f"{where}, {_SEVERAL} ({classes})", REFUSED_LAYERS[_SEVERAL])
    return ropes[0] if ropes and all(getattr(parent, flag, True) for flag in _ROPE_FLAGS) else None


def _unsupported(what: str, reason: str) -> UnsupportedError:
    return UnsupportedError(Refused(reason).line(what))


def _is_rotary_module(module: nn.Module) -> bool:
    """Whether `module` looks like a rotary embedding, known or not."""
    return hasattr(module, "rotary_dim") or any(
        "rotaryembedding" in base.__name__.lower() for base in type(module).__mro__
    )


def _is_a(module: nn.Module, class_name: str) -> bool:
    return any(base.__name__ == class_name for base in type(module).__mro__)


# A float64 angle is exact to 1e-8 rad far beyond this; no context is longer.
_MAX_SHIFT: Final = 1 << 24

# Attributes by which an attention module declares that it does not use its rotary embedding.
_ROPE_FLAGS: Final = ("use_rope", "attn_use_rope")

# Modules that change a key by learned weights after its rotation, so a moved key is not a rotation of it.
_KEY_NORM_AFTER_ROPE: Final = frozenset({"HunYuanAttention"})

# Attention layers that get cosines and sines from the model, and the model's attributes that give them.
_TURNED_BY_MODEL: Final = frozenset({"Gemma3Attention"})
_OF_ALL: Final = "rotary_emb"
_OF_WINDOWS: Final = "rotary_emb_local"
_FIXED_ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")

_WITHOUT_ROPE: Final = "which has no rotary embedding"
_SEVERAL: Final = "which has several rotary embeddings"
_SHARED: Final = "which reads the rows of another layer"
_CROSS: Final = "which attends to other text"
_NORMED: Final = "which normalises keys after their rotation"

REFUSED_LAYERS: Final = {
    _WITHOUT_ROPE: "as no layer of its model has one, and how its keys depend on positions is not known",
    _SEVERAL: "which of them turns the keys is not known",
    _SHARED: "each layer must have rows of its own",
    _CROSS: "its keys do not belong to the prompt's tokens",
    _NORMED: "so that a moved key is no rotation of it",
}
"""Attention layers whose rows cannot be moved, and why."""

_TRAITS: Final[dict[str, Callable[[nn.Module, nn.Module], bool]]] = {
    _CROSS: lambda _, core: bool(getattr(core, "is_cross_attention", False)),
    _NORMED: lambda parent, _: (
        type(parent).__name__ in _KEY_NORM_AFTER_ROPE and bool(getattr(parent, "use_qk_norm", True))
    ),
}

_LENGTH: Final = "its frequencies change with the length, so a shift is not a rotation"
REFUSED_EMBEDDINGS: Final = {
    "DualChunkRotaryEmbedding": "key positions wrap within a chunk, so a shift will never be a rotation",
    "FourierRotaryEmbedding": "its coefficients mix frequencies, so a shift will never be a rotation",
}
UNKNOWN_EMBEDDING: Final = "how it rotates keys is not known"

KNOWN_EMBEDDINGS: Final = {
    "DeepseekScalingRotaryEmbedding": "scaling_factor",
    "DynamicNTKAlphaRotaryEmbedding": "base",
    "DynamicNTKScalingRotaryEmbedding": "base",
    "Gemma4RotaryEmbedding": "base",
    "LinearScalingRotaryEmbedding": "base",
    "Llama3RotaryEmbedding": "base",
    "MRotaryEmbedding": "base",
    "Phi3LongRoPEScaledRotaryEmbedding": "short_factor",
    "RotaryEmbedding": "base",
    "YaRNScalingMRotaryEmbedding": "scaling_factor",
    "YaRNScalingRotaryEmbedding": "scaling_factor",
}
"""The classes that can be read, with the attribute that is the argument of their `_compute_inv_freq`."""

_LONG: Final = "Phi3LongRoPEScaledRotaryEmbedding"
_ARGUMENTS: Final[dict[str, Callable[[Any], Any]]] = {
    # In spite of the names, the base is fixed when the module is made.
    "DynamicNTKAlphaRotaryEmbedding": lambda rotary: (
        rotary.base * rotary.scaling_alpha ** (rotary.rotary_dim / (rotary.rotary_dim - 2))
    ),
    "DynamicNTKScalingRotaryEmbedding": lambda rotary: (
        rotary.base
        * (rotary.scaling_factor**2 - (rotary.scaling_factor - 1)) ** (rotary.rotary_dim / (rotary.rotary_dim - 2))
    ),
}
"""Functions that compute this argument, for classes where the attribute is not the argument itself."""

_FIXED_LENGTHS: Final[dict[str, Callable[[Any], float]]] = {
    # NOTE: SGLang extends the table for a longer context, and computes the extension from the unscaled base.
    "DynamicNTKAlphaRotaryEmbedding": lambda rotary: rotary.max_position_embeddings,
    "DynamicNTKScalingRotaryEmbedding": lambda rotary: rotary.max_position_embeddings * rotary.scaling_factor,
    # A batch with a later position is rotated by the long factors, others by the short ones.
    _LONG: lambda rotary: rotary.original_max_position_embeddings,
}
"""The number of positions with the frequencies that are read, for classes that have others after them."""

MODEL_EMBEDDINGS: Final = ("Gemma3RotaryEmbedding",)
"""The classes that can be read and that a model has for its layers."""
