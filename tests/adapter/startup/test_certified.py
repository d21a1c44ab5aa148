"""The configured certificate is compared with the server on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_pic.adapter.startup import certified
from sglang_pic.config import PicConfig
from sglang_pic.core import PRESETS, CoreConfig
from tests.helpers.certificates import SERVED, put
from tests.helpers.processes import on_each_rank


def test_without_a_certificate_nothing_is_read_or_said() -> None:
    assert certified.certify(None, PicConfig(), None, None) is None


def serve(rank: int, group: Any, certificate: Path) -> str:
    """Start one rank of a server whose ranks may have certificates of their own."""
    certified.read_weights = lambda *_: SERVED.weights
    context = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(prefill_attention_backend_str="fa3")),
        server_args=SimpleNamespace(model_path="/models/smollm2"),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        params=SimpleNamespace(page_size=1),
        **{"tp_group": group, "tp_rank": rank},
    )
    splicer: Any = SimpleNamespace(view=SimpleNamespace(dtype=torch.bfloat16))
    config = PicConfig(core=CoreConfig(**PRESETS["balanced"]), certificate=str(certificate))
    return f"fits: {certified.certify(context, config, splicer, None).fits}"


def test_ranks_read_the_same_certificate_or_stop(tmp_path: Path) -> None:
    path = put(tmp_path / "certificate.json", "balanced")
    alike = on_each_rank(2, tmp_path / "store", lambda rank, group: serve(rank, group, path))
    assert alike == ["fits: True"] * 2
    paths = [path, tmp_path / "none.json"]
    (answer,) = {*on_each_rank(2, tmp_path / "store2", lambda rank, group: serve(rank, group, paths[rank]))}
    assert answer.startswith("UnsupportedError: tensor-parallel ranks [1] and rank 0 read different certificates,")
