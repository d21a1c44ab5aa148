"""What processes of `with_sglang.py` have imported when they begin."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import warnings

import setproctitle

# What SGLang compiles of its own is small, and takes a machine that has not compiled it yet longer than to run.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

# A third of the time would be collections, which find nothing.
gc.disable()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.benchmark.one_batch  # noqa: F401
    import sglang.launch_server  # noqa: F401
    import sglang.srt.entrypoints.http_server  # noqa: F401
    import sglang.srt.models.registry  # noqa: F401

assert "prometheus_client" not in sys.modules, "it would not share its metrics with other processes"
# Whoever looks through what stays anyway copies it into its own process, and taking it apart at the end takes seconds.
gc.freeze()
gc.enable()
atexit.register(os._exit, 0)
# It finds the place of the title in memory while the environment is where it was at the start.
setproctitle.getproctitle()
