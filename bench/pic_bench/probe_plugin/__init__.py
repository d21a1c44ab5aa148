"""A plugin of SGLang for servers that are experimented on; `SGLANG_PIC_PROBE` switches its parts on.

It changes and watches the cache from outside, by hooks on a few functions of `sglang_pic.adapter` and `core`, so that
the serving path has no line for experiments. SGLang imports this package in every process of every server; without the
variable nothing else of the benchmarks is imported.
"""

from __future__ import annotations

import os

__all__ = ["PROBE_PLUGIN", "PROBE_VARIABLE", "register"]

PROBE_PLUGIN = "pic_probe"
"""The entry point's name."""

PROBE_VARIABLE = "SGLANG_PIC_PROBE"


def register() -> None:
    """Register the hooks that `SGLANG_PIC_PROBE` asks for, if any.

    Raises:
        SystemExit: the variable is wrong, or SGLang is not what this version was built for. SGLang would swallow an
            ordinary exception.
    """
    if os.environ.get(PROBE_VARIABLE, "").strip():
        from pic_bench.probe_plugin import plugin

        plugin.install()
