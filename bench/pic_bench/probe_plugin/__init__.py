"""A plugin of SGLang for servers that are experimented on; `SGLANG_PIC_PROBE` switches its parts on.

It changes and watches the cache from outside, by hooks on a few functions of `sglang_pic.adapter` and `core`, so that
the serving path has no line for experiments. Without the variable it does nothing.
"""

from __future__ import annotations

from pic_bench.probe_plugin.options import PROBE_PLUGIN, PROBE_VARIABLE
from pic_bench.probe_plugin.plugin import register

__all__ = ["PROBE_PLUGIN", "PROBE_VARIABLE", "register"]
