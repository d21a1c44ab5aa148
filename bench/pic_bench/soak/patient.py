"""The patched server of a soak: its books at idle points, its counters, its memory."""

from __future__ import annotations

import re
import time
from collections import Counter
from statistics import median
from typing import Any

import msgspec
import psutil

from pic_bench.compare.counters import pic_counters
from pic_bench.compare.server import Server
from pic_bench.soak.load import Request
from pic_bench.soak.record import Memory

_IDLE_TIMEOUT_S = 120.0
_POLL_S = 0.2
_WARM_S, _WINDOW_S = 300.0, 60.0
_MIB = 1 << 20


class Patient:
    """Looks after one server.

    Args:
        server: runs already.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.leaks: list[str] = []
        self.num_idle_points = 0
        self._pins: set[tuple[str, str | None, bool]] = set()
        self._memory: list[tuple[float, int]] = []
        self._scheduler = next(
            process
            for process in psutil.Process(server.pid).children(recursive=True)
            if "scheduler" in " ".join(process.cmdline())
        )

    def note_pin(self, request: Request) -> None:
        """A request is going to be sent: only what some request named may be pinned."""
        if isinstance(request.pic, dict) and isinstance(name := request.pic.get("pin"), str):
            self._pins.add((name, request.extra_key, request.cache_salt is not None))

    def sample_memory(self) -> None:
        """Note the scheduler's resident memory."""
        self._memory.append((time.monotonic(), self._scheduler.memory_info().rss))

    def wait_idle(self) -> dict[str, Any]:
        """Wait until nothing runs and no audit waits, then read the books; what is wrong with them is a leak."""
        deadline = time.monotonic() + _IDLE_TIMEOUT_S
        while True:
            self.server.check_alive()
            state = self._state()
            books = state["books"]
            waiting = {
                "requests have rows": not books["is_idle"],
                "audits wait": bool(state["audit"]["num_pending"]),
                "slots are borrowed": bool(books["num_borrowed_slots"]),
            }
            if not any(waiting.values()):
                break
            if time.monotonic() > deadline:
                self.leaks += [
                    f"{_IDLE_TIMEOUT_S:g} s after the last client left {what}"
                    for what, is_so in waiting.items()
                    if is_so
                ]
                break
            time.sleep(_POLL_S)
        self.num_idle_points += 1
        self.leaks += [f"idle point {self.num_idle_points}: {problem}" for problem in books["problems"]]
        for pin in state["pins"]["held"]:
            if (pin["name"], pin["extra_key"], pin["has_salt"]) not in self._pins:
                self.leaks.append(f"idle point {self.num_idle_points}: nobody set the pin {pin['name']}")
        return dict(books)

    def flush(self) -> None:
        """Empty the cache, and see that nothing is left of it."""
        self.server.post("/flush_cache?timeout=60", {})
        self._pins.clear()
        books = self.wait_idle()
        left = {
            name: books[name]
            for name in ("num_locks", "num_pins", "num_tree_slots", "num_index_tokens", "num_index_donors")
            if books[name]
        }
        if left:
            self.leaks.append(f"left by a flush: {left}")

    def counters(self) -> dict[str, int]:
        """The plugin's counters and the requests that were retracted, without the metrics' prefix."""
        page = self.server.get("/metrics")
        found = {name.removeprefix("sglang:pic_"): round(value) for name, value in pic_counters(page).items()}
        retracted = re.findall(r"^sglang:num_retracted_requests_total\{.*\} (\S+)$", page, re.MULTILINE)
        return found | {"retractions": round(sum(map(float, retracted)))}

    def memory(self, started_at: float) -> Memory:
        """How resident memory went since then."""
        ended_at = self._memory[-1][0]
        length = ended_at - started_at
        warm, window = min(_WARM_S, length / 2), min(_WINDOW_S, length / 10)

        def around(start: float) -> float:
            near = [rss for at, rss in self._memory if start <= at <= start + window]
            return round(median(near or [self._memory[-1][1]]) / _MIB, 1)

        return Memory(after_warm_up=around(started_at + warm), at_end=around(ended_at - window))

    def stale_rows(self) -> Counter[str]:
        """Wrong rows that the server has found since its start, by what is wrong with them."""
        return Counter(self._state()["books"]["wrong_rows"])

    def num_audited(self) -> int:
        """Requests that were audited."""
        return int(self._state()["audit"]["num_audited"])

    def log_faults(self) -> list[str]:
        """What the server has logged of exceptions and leaks."""
        log = _PORT_NOT_OPEN_YET.sub("", self.server.log_path.read_text(errors="replace"))
        return [
            f"log: {found[0][:300]}"
            for found in re.finditer(r"^.*(?:Traceback|leak).*\n(?:.*\n){0,3}", log, re.MULTILINE)
        ]

    def _state(self) -> dict[str, Any]:
        (internal, *_) = msgspec.json.decode(self.server.get("/server_info", 120.0))["internal_states"]
        return dict(internal["pic"])


# Without a warm-up SGLang asks its own port to freeze the garbage collector, at times before the port is open.
_PORT_NOT_OPEN_YET = re.compile(r"post-warmup freeze_gc failed\n.*?(?=^\[\d{4}-)", re.DOTALL | re.MULTILINE)
