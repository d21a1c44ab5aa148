"""The patched server of a soak: its accounting at idle points, its counters, its memory."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import msgspec
import psutil

from pic_bench.compare.server import Server, pic_counters
from pic_bench.soak.load import Request
from pic_bench.soak.pair import Pair

_IDLE_TIMEOUT_S = 120.0
_POLL_S = 0.2
_WARM_S, _WINDOW_S = 300.0, 60.0
_MIB = 1 << 20
_EMPTIED = ("num_locks", "num_pins", "num_tree_slots", "num_index_tokens", "num_index_donors")
# Without a warm-up SGLang asks its own port to freeze the garbage collector, at times before the port is open.
_PORT_NOT_OPEN_YET = re.compile(r"post-warmup freeze_gc failed\n.*?(?=^\[\d{4}-)", re.DOTALL | re.MULTILINE)
_LOGGED_FAULT = re.compile(r"^.*(?:Traceback|leak).*\n(?:.*\n){0,3}", re.MULTILINE)


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resident memory of the scheduler in MiB, each the median of a minute (of a tenth of the run, if it is short)."""

    after_warm_up: float
    """After 5 minutes, or after half of the run, if it is short."""
    at_end: float


class WatchedServer:
    """Looks after one server that runs already."""

    def __init__(self, server: Server) -> None:
        self.server = server
        # A decode server has no accounting of ours: SGLang checks its pool itself, and ends the server if slots leak.
        self._servers = [server, server.decode] if isinstance(server, Pair) else [server]
        self.leaks: list[str] = []
        self.num_idle_points = 0
        self._pins: set[tuple[str, str | None, bool]] = set()
        self._memory: list[tuple[float, int]] = []
        children = psutil.Process(server.pid).children(recursive=True)
        self._schedulers = [child for child in children if "scheduler" in " ".join(child.cmdline())]

    def note_pin(self, request: Request) -> None:
        """A request is going to be sent: only what some request named may be pinned."""
        if isinstance(request.pic, dict) and isinstance(name := request.pic.get("pin"), str):
            self._pins.add((name, request.extra_key, request.cache_salt is not None))

    def sample_memory(self) -> None:
        """Note the schedulers' resident memory."""
        self._memory.append((time.monotonic(), sum(process.memory_info().rss for process in self._schedulers)))

    def wait_idle(self) -> Counter[str]:
        """Wait until nothing runs and no audit waits, then read the accounting; each of its problems is a leak.

        Returns:
            The numbers of the accounting, added up over the ranks that serve requests of their own.
        """
        deadline = time.monotonic() + _IDLE_TIMEOUT_S
        while True:
            self.server.check_alive()
            states = self._states()
            accounts = [state["accounting"] for state in states]
            waiting = {
                "requests have rows": not all(each["is_idle"] for each in accounts),
                "audits wait": any(_audit(state)["num_pending"] for state in states),
                "slots are borrowed": any(each["num_borrowed_slots"] for each in accounts),
            }
            if not any(waiting.values()):
                break
            if time.monotonic() > deadline:
                left = (what for what, is_so in waiting.items() if is_so)
                self.leaks += [f"{_IDLE_TIMEOUT_S:g} s after the last client left {what}" for what in left]
                break
            time.sleep(_POLL_S)
        self.num_idle_points += 1
        where = f"idle point {self.num_idle_points}"
        self.leaks += [f"{where}: {problem}" for each in accounts for problem in each["problems"]]
        for pin in (pin for state in states if "pins" in state for pin in state["pins"]["held"]):
            if (pin["name"], pin["extra_key"], pin["has_salt"]) not in self._pins:
                self.leaks.append(f"{where}: nobody set the pin {pin['name']}")
        return _added(accounts)

    def flush(self) -> None:
        """Empty the cache, and see that nothing is left of it."""
        self.server.post("/flush_cache?timeout=60", {})
        self._pins.clear()
        accounts = self.wait_idle()
        if left := {name: accounts[name] for name in _EMPTIED if accounts[name]}:
            self.leaks.append(f"left by a flush: {left}")

    def counters(self) -> Counter[str]:
        """The plugin's counters and the requests that were retracted, without the metrics' prefix."""
        pages = [server.get("/metrics") for server in self._servers]
        found = {name.removeprefix("sglang:pic_"): round(value) for name, value in pic_counters(pages[0]).items()}
        retracted = re.findall(r"^sglang:num_retracted_requests_total\{.*\} (\S+)$", "\n".join(pages), re.MULTILINE)
        return Counter(found | {"retractions": round(sum(map(float, retracted)))})

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
        """Wrong rows that the server has found since its start, by the kind of error."""
        return _added(state["accounting"]["wrong_rows"] for state in self._states())

    def num_audited(self) -> int:
        """Requests that were audited."""
        return sum(_audit(state)["num_audited"] for state in self._states())

    def log_faults(self) -> list[str]:
        """What the server has logged of exceptions and leaks, and its decode server."""
        found = []
        for server in self._servers:
            log = _PORT_NOT_OPEN_YET.sub("", server.log_path.read_text(errors="replace"))
            found += [f"{server.log_path.name}: {fault[0][:300]}" for fault in _LOGGED_FAULT.finditer(log)]
        return found

    def _states(self) -> list[dict[str, Any]]:
        """The plugin's part of `/server_info`, of each rank that serves requests of its own."""
        internal = msgspec.json.decode(self.server.get("/server_info", 120.0))["internal_states"]
        return [dict(state["pic"]) for state in internal]


def _audit(state: dict[str, Any]) -> Counter[str]:
    """The audit's part of `/server_info`; none with DP attention."""
    return Counter(state.get("audit") or {})


def _added(found: Iterable[Mapping[str, Any]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in found:
        total.update({name: number for name, number in each.items() if isinstance(number, int)})
    return total
