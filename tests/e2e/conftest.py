"""The shared servers as fixtures, and the order of the tests by server."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pic_models.lora_adapter import write_adapter

from tests.e2e import faults, plugins
from tests.e2e.servers import SERVERS, OneServer
from tests.e2e.serving import TEST_LIMIT_S, Client
from tests.helpers.with_sglang import ForkedPopen

_NAMES = list(SERVERS)
_RUNNING = pytest.StashKey[OneServer]()


def _servers_of(item: pytest.Item | None) -> tuple[str, ...]:
    names: tuple[str, ...] = item.callspec.params.get("servers", ()) if hasattr(item, "callspec") else ()
    return names


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of one server side by side, before tests with servers of their own; these have time to start.

    Tests without servers come last: they are short, so that no process is left alone with a long one at the end.
    """
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S))
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[bool, int, int]:
    if servers := _servers_of(item):
        # A test of two servers stands between those of the first and those of the second one.
        return False, _NAMES.index(servers[0]), len(servers)
    return not item.get_closest_marker("e2e"), len(_NAMES), 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stops the server where the next test has no use for it."""
    if _RUNNING in item.config.stash:
        item.config.stash[_RUNNING].stop_unless(_servers_of(nextitem))


@pytest.fixture(scope="session", autouse=True)
def _forked_servers() -> Iterator[None]:
    """Servers that fork their processes are forked from one that has imported SGLang.

    Not those with a plugin that has to come before the imports, because it changes torch, or with a variable of their
    own that SGLang may read when it is imported.
    """
    late = {env[plugins.VARIABLE] for env in (plugins.environment(), faults.ENVIRONMENT)}

    def start(command: Sequence[str], *, env: Mapping[str, str], **how: Any) -> Any:
        own = {name for name, value in env.items() if name.startswith("SGLANG_") and os.environ.get(name) != value}
        is_forked = env.get(plugins.VARIABLE) in late and all(name.startswith("SGLANG_PIC_") for name in own)
        return (ForkedPopen if is_forked else subprocess.Popen)(command, env=env, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pic_bench.compare.server.subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))
        yield


@pytest.fixture(scope="session")
def one_server(
    request: pytest.FixtureRequest, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OneServer]:
    running = OneServer(model_dir, tmp_path_factory.mktemp("servers"))
    request.config.stash[_RUNNING] = running
    yield running
    running.stop()


@pytest.fixture
def quick_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of commands fork their processes, and are ended at once.

    SGLang looks every five seconds whether it was told to end, and has no more to say.
    """
    monkeypatch.setattr("pic_bench.compare.server.TERM_GRACE_S", 0.0)
    for name, value in plugins.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> tuple[str, ...]:
    names: tuple[str, ...] = request.param
    return names


@pytest.fixture
def client_of(servers: tuple[str, ...], one_server: OneServer) -> Iterator[Callable[[str], Client]]:
    """Gives the test's servers by name, with an empty cache; asking for another one stops the one before."""
    used: list[Client] = []

    def get(name: str) -> Client:
        assert name in servers, f"a test that uses {name} says so with @on_servers"
        client = one_server.client(name)
        client.flush()
        used.append(client)
        return client

    yield get
    if used:
        used[-1].server.check_alive()


@pytest.fixture
def adapters(client: Client, tmp_path: Path, model_dir: Callable[[str], Path]) -> Iterator[list[str | None]]:
    """The names of two adapters that are loaded, and `None`: the model without one."""
    names = ["one", "two"]
    for seed, name in enumerate(names):
        folder = write_adapter(tmp_path / name, seed, model_dir("tiny-gqa"))
        client.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    yield [*names, None]
    for name in names:
        client.post("/unload_lora_adapter", {"lora_name": name})


@pytest.fixture
def client(servers: tuple[str, ...], client_of: Callable[[str], Client]) -> Client:
    """The test's only server, with an empty cache."""
    (name,) = servers
    return client_of(name)
