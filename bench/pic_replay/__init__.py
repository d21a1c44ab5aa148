"""Replaying a trace against a server with locust, in a process of its own.

Callers use `options` and `launch`, which never import locust. `main` is the program of the process; only `main`
and `users` import locust, and with it gevent's monkey patching. Nothing here knows SGLang's Python code.
"""

from __future__ import annotations

from pic_replay.launch import run_replay, run_replays
from pic_replay.options import ReplayOptions

__all__ = ["ReplayOptions", "run_replay", "run_replays"]
