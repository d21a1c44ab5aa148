"""The fingerprint of a server's rows: servers with equal fingerprints compute equal rows for equal text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from sglang_pic.adapter.probe.ranks import all_digests
from sglang_pic.adapter.sglang.seams import ModelRunner, TpGroup
from sglang_pic.runtime.splice import Splicer

_SAMPLES = 64


def read_fingerprint(models: Sequence[tuple[ModelRunner, Splicer]], host_pool: Any, tp_group: TpGroup | None) -> bytes:
    """Digest of everything beside tokens that rows depend on; all ranks must call this together.

    Covers every rank's weights (`_SAMPLES` elements of each parameter, 10 ms for a thousand of them), rotations, and
    the layout of pool and host pool. Cost: a copy from the device for each parameter.

    Args:
        models: the model and its drafts, each with what moves its rows.
        host_pool: HiCache's for the model's rows.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.
    """
    mine = hashlib.sha256()
    for runner, splicer in models:
        view, geometry = splicer.view, splicer.geometry
        _add_weights(mine, runner)
        for layer, rotation in zip(geometry.layer_ids, geometry.params, strict=True):
            mine.update(f"{layer} {rotation.rotary_dim} {rotation.is_neox_style}".encode() + _sample(rotation.turns))
        shapes = [tuple(each[0].shape[1:]) for each in (view.keys, view.values) if each]
        mine.update(f"{view.kind} {view.dtype} {view.num_layers} {shapes}".encode())
        if view.index_dtype is not None:
            mine.update(f"{view.index_dtype}".encode())
    mine.update(f"{type(host_pool).__name__} {host_pool.layout} {host_pool.page_size}".encode())
    return hashlib.sha256(repr(all_digests(mine.digest(), tp_group)).encode()).digest()


def read_weights(runner: ModelRunner, tp_group: TpGroup | None) -> str:
    """Digest of samples of every rank's weights, 64 hex digits; all ranks must call this together."""
    mine = hashlib.sha256()
    _add_weights(mine, runner)
    return hashlib.sha256(repr(all_digests(mine.digest(), tp_group)).encode()).hexdigest()


def _add_weights(digest: hashlib._Hash, runner: ModelRunner) -> None:
    for name, weights in runner.model.named_parameters():
        digest.update(f"{name} {tuple(weights.shape)} {weights.dtype}".encode())
        digest.update(_sample(weights.detach()))


def _sample(values: torch.Tensor) -> bytes:
    """The bytes of `_SAMPLES` evenly spaced elements of a tensor, whatever its strides."""
    if not values.numel():
        return b""
    if values.element_size() == 1:
        values = values.view(torch.uint8)  # FP8 cannot be indexed on a CPU.
    places = torch.linspace(0, values.numel() - 1, _SAMPLES, dtype=torch.float64, device=values.device).long()
    found = values[torch.unravel_index(places, values.shape)].reshape(-1)
    return found.contiguous().view(torch.uint8).cpu().numpy().tobytes()
