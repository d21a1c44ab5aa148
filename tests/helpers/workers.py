"""Worker processes that import SGLang."""

from __future__ import annotations

import atexit
import gc
import os


def collect_nothing() -> None:
    """Has this process collect no garbage, and end at once: both would go through all imports, which takes seconds."""
    gc.disable()
    atexit.register(os._exit, 0)
