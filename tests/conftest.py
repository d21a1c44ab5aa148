"""What every test shares: no network, no GPU tests without a GPU, the prepared models; SGLang is not imported here."""

from __future__ import annotations

import gc
import ipaddress
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".models"

# Set before anything imports a hub client, and inherited by every server a test starts.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# Two processes of pytest and their servers share the cores: each computes on one, and what waits must not spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A collection goes through all that was imported, and with SGLang a third of an import's time would be collections.
gc.set_threshold(100_000, 20, 100)

# Run from a background job, a shell has left SIGINT ignored, and every process that a test interrupts would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A loaded machine is slow, not wrong; and CI must not find by luck what the change did not touch.
settings.register_profile("repository", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("repository")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked `gpu` where torch finds no GPU; torch is imported only if there are any."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files side by side, and end-to-end tests by their server, which is in a test's id: `test_x[@mla_page1]`."""
    from xdist.scheduler import LoadFileScheduling

    if config.getvalue("dist") != "loadfile":
        return None

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            server = re.match(r"tests/e2e/.*@(\w+)", nodeid)
            return server[1] if server else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty registry of Prometheus metrics in place of the process's own."""
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(prometheus, kind, partial(getattr(prometheus, kind), registry=registry))
    return registry


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Refuses connections that leave the machine, in this process."""

    def guarded(connect: Callable[..., Any]) -> Callable[..., Any]:
        def refuse_or_connect(self: socket.socket, address: tuple[str, int]) -> Any:
            _refuse_remote(self, address)
            return connect(self, address)

        return refuse_or_connect

    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, guarded(getattr(socket.socket, name)))
        yield


def _refuse_remote(sock: socket.socket, address: tuple[str, int]) -> None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    host = address[0]
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host in ("", "localhost")
    # A datagram socket sends nothing on connect: it is how programs ask for their own address.
    if not local and sock.type != socket.SOCK_DGRAM:
        raise RuntimeError(f"a test connected to {host!r}: tests reach nothing but this machine")


@pytest.fixture(scope="session")
def model_dir() -> Callable[[str], Path]:
    """The folder of a prepared model by name, made on first use and kept in `.models/` for later runs."""

    def get(name: str) -> Path:
        from pic_models import prepare

        # Two runs at once do no harm: the second waits for the first's lock and finds the model complete.
        return prepare(name, MODELS / name)

    return get
