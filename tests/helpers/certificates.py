"""A certificate's folder, and the server that it fits."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sglang_pic.certificate import Bounded, Certificate, Served, policy_settings
from sglang_pic.core import PRESETS, ReusePolicy

SERVED = Served(
    **{"model": "smollm2", "weights": "a" * 64, "sglang": "0.5.23", "dtype": "bfloat16", "kv_dtype": "bfloat16"},
    attention="fa3",
    page_size=1,
    settings=policy_settings(ReusePolicy()),
)

CERTIFICATE = Certificate(
    **{"name": "careful", "confidence": 0.95, "budget": 0.01, "cap": 0.05, "sessions": 24, "reuse": 0.36},
    served=SERVED,
    loss=Bounded(mean=0.004, low=0.001, high=0.0084),
    agreement_loss=Bounded(mean=0.01, low=0.0, high=0.04),
    traffic="b" * 64,
    date="2026-11-24",
)


def put(path: Path, preset: str, **facts: object) -> Path:
    """Write a certificate of a preset."""
    served = changed(settings=policy_settings(ReusePolicy(**PRESETS[preset])), **facts)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(CERTIFICATE, name=preset, served=served)))
    return path


def changed(**facts: object) -> Served:
    return msgspec.structs.replace(SERVED, **facts)
