"""The fake server, for every test that replays requests; what reads SGLang's sources needs it installed."""

from __future__ import annotations

from importlib.util import find_spec

from tests.helpers.replay_server import fake, replay

__all__ = ["fake", "replay"]

if find_spec("sglang") is None:
    collect_ignore_glob = [
        "*test_gpu_flags.py",
        "*test_probe_plugin.py",
        "*pages/test_other_sglang.py",
        "*pages/test_starting_pages.py",
    ]
