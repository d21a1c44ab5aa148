"""Records SGLang's workers of speculative decoding, which SGLang makes before the cache and does not pass to it."""

from __future__ import annotations

from typing import Any

from sglang_pic.adapter.sglang.hooks import hook

_workers: list[Any] = []
"""One per scheduler of this process, as there is one cache per scheduler."""


def install() -> None:
    """Register the hook; SGLang applies it before it makes a worker."""
    hook(__name__, "BaseSpecWorker.__init__", _note)


def drafts_of(target_worker: object) -> list[Any]:
    """SGLang's draft workers of a target's worker: at most one; none without a draft model."""
    found = (worker.draft_worker for worker in _workers if worker.target_worker is target_worker)
    return [draft for draft in found if draft is not None]


def _note(_: None, worker: object, *args: object, **kwargs: object) -> None:
    _workers.append(worker)
