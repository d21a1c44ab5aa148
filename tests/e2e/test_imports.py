"""What a server loads is a closed set: nothing that only people run, and of the benchmarks nothing but their gates."""

from __future__ import annotations

import re
import signal

import psutil
import pytest

from tests.e2e import plugins
from tests.e2e.servers import on_servers
from tests.e2e.serving import Client, random_tokens, wait_until

pytestmark = pytest.mark.e2e

CLOSED = re.compile(
    r"sglang_pic(\.(adapter(?!\.doctor)|runtime|core|config|certificate|errors|nonces)\b.*)?|pic_kernels\b.*"
)
GATES = {"pic_bench", "pic_bench.probe_plugin"}
"""SGLang calls the experiments' plugin in every process, where it finds that it is not asked for."""
ON_THIS_PLATFORM = re.compile(r"pic_platform\b.*")
"""A server with a GPU loads `pic_platform` alone, its gate: tests/adapter/sglang/test_contract.py."""


@on_servers("smollm2_as_users")
def test_a_server_loads_what_serves_and_nothing_else(client: Client) -> None:
    text = random_tokens(31, 300)
    client.generate(text)
    assert client.generate([*random_tokens(32, 60), *text, *random_tokens(33, 20)]).chunk_hit_tokens > 0
    main = psutil.Process(client.server.pid)
    children = [each for each in main.children(recursive=True) if any("sglang::" in word for word in each.cmdline())]
    assert len(children) >= 2, "a scheduler and a detokenizer"
    told = re.compile(rf"^{plugins.MODULES} (.*)$", re.MULTILINE)
    # One after the other: their long lines would mix in the log.
    for number, process in enumerate((main, *children), start=1):
        process.send_signal(signal.SIGUSR2)
        wait_until(lambda number=number: len(told.findall(client.log())) == number)
    for names in told.findall(client.log()):
        loaded = set(names.split())
        assert "sglang_pic.adapter.plugin" in loaded
        assert {name for name in loaded if not (CLOSED.fullmatch(name) or ON_THIS_PLATFORM.fullmatch(name))} == GATES


@on_servers("text")
def test_no_request_waits_for_the_compiler_of_loops(client: Client) -> None:
    log = client.log()
    assert log.index("the inner loops of plans are ready") < log.index("The server is fired up")
