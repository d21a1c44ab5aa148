"""A plugin of SGLang for whole servers on a production attention backend without its kernels.

A server loads it where `tests/backends/plugin` is on its `PYTHONPATH`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

_ROOT = Path(__file__).resolve().parent.parent.parent


def with_plugin(folder: Path, *packages: Path) -> dict[str, str]:
    """The environment of a server that loads the plugin in `folder`, and finds what lies in `packages`."""
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, _ROOT, *packages, *filter(None, sys.path))))}


ENVIRONMENT: Final = {**with_plugin(Path(__file__).parent / "plugin"), "TRITON_INTERPRET": "1"}
"""What such a server is started with."""


def register() -> None:
    """Have the model runner make its backends as `backends.py` does; nothing is imported before."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.init_attention_backends", _replace, HookType.BEFORE)
    # With deterministic inference SGLang replaces operators of a GPU by its own kernels; there is none here.
    HookRegistry.register(f"{runner}.maybe_enable_batch_invariant_mode", lambda _: None, HookType.REPLACE)


def _replace(*_: object) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from tests.backends.backends import BACKENDS

    ATTENTION_BACKENDS.update((name, BACKENDS[name]) for name in ("fa3", "triton"))
