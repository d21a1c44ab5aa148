"""A changed SGLang must stop the server with one line, not serve silently without the cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_pic.adapter.sglang import hooks, source
from sglang_pic.adapter.sglang.contract import (
    BODIES,
    BUILT_FOR,
    CONTRACT,
    FEATURES,
    Symbol,
    check_contract,
    installed_version,
)
from sglang_pic.errors import ContractError
from tests.helpers.builders import BareRunner, request, scheduled

pytestmark = pytest.mark.usefixtures("_keeps_source")
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


@pytest.fixture(scope="module")
def _keeps_source() -> Iterator[None]:
    """The syntax trees of SGLang's source stay from test to test: reading them takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "forget", lambda: None)
        yield
    source.forget()


def test_the_installed_sglang_keeps_the_contract() -> None:
    check_contract()
    assert len({*BODIES}) == len(BODIES)


@pytest.mark.skipif(installed_version() != BUILT_FOR, reason="other versions may refuse servers with a feature")
@pytest.mark.parametrize("feature", FEATURES)
def test_it_keeps_what_only_servers_with_a_feature_rely_on(feature: str) -> None:
    check_contract(FEATURES[feature])


def test_a_server_without_a_feature_reads_nothing_of_its_source() -> None:
    """Syntax trees of thousands of lines, in every process of a server."""
    rooms = ("disaggregation", "lora", "managers.scheduler_components.dp_attn")
    assert not [symbol.path for symbol in CONTRACT if symbol.path.startswith(tuple(f"sglang.srt.{x}." for x in rooms))]


@pytest.mark.parametrize(
    ("symbol", "problem"),
    [
        (Symbol(f"{_SCHEDULER}.get_prefill_subtractor"), "is missing"),
        (Symbol("sglang.srt.managers.no_such_module.thing"), "is missing"),
        (Symbol(f"{_SCHEDULER}.run_batch", ("batches",)), "has no parameter 'batches'"),
        (Symbol(f"{_SCHEDULER}.run_batch", ("batch",), ("self.no_such_field",)), "no longer has 'self.no_such_field'"),
    ],
)
def test_a_changed_symbol_is_named(symbol: Symbol, problem: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_contract((*CONTRACT, symbol))
    message = str(caught.value)
    assert symbol.path in message
    assert problem in message
    assert BUILT_FOR in message
    assert "\n" not in message


def test_only_a_server_that_wants_the_backend_is_stopped() -> None:
    """Run as SGLang runs it: inside `load_plugins`, whose handlers swallow every `Exception`.

    Forked from a process that has imported what is slow to import.
    """
    script = (
        "import gc, os, sys\n"
        "gc.disable()\n"
        "import sglang_pic.adapter.sglang.contract as contract\n"
        "import sglang.srt.server_args\n"
        "from sglang.srt.plugins import load_plugins\n"
        "contract.CONTRACT = contract.FRONT = (contract.Symbol('sglang.srt.gone.Gone', why='a test'),)\n"
        "for args in ([], ['--radix-cache-backend', 'pic']):\n"
        "    if not (child := os.fork()):\n"
        "        sys.argv = ['launch_server', *args]\n"
        "        load_plugins()\n"
        "        sys.exit(0)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["0", "1"], done.stderr
    lines = [line for line in done.stderr.splitlines() if "sglang.srt.gone.Gone is missing" in line]
    assert len(lines) == 2, "one of each server"


def test_a_server_with_a_gpu_loads_neither_the_cpu_platform_nor_benchmarks() -> None:
    """SGLang imports every entry point of the wheel in every process; what is not asked for must cost nothing."""
    script = (
        "import gc, sys\n"
        "gc.disable()\n"
        "import torch\n"
        "import sglang.srt.server_args\n"
        "from sglang.srt import platforms, plugins\n"
        "for name in [name for name in sys.modules if name.startswith(('sglang_pic', 'pic_'))]: del sys.modules[name]\n"
        "torch.cuda.is_available, torch.cuda.get_device_name = lambda: True, lambda *_: 'NVIDIA H100'\n"
        "print(platforms._resolve_platform().device_name)\n"
        "plugins.load_plugins()\n"
        "print(*sorted(name for name in sys.modules if name.startswith(('pic_bench', 'pic_platform'))))\n"
        "print('sglang_pic.adapter.plugin' in sys.modules)\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=env)
    gates = "pic_bench pic_bench.probe_plugin pic_platform"
    assert done.stdout.splitlines() == ["cuda", gates, "True"], done.stderr


def test_every_hook_of_the_contract_is_registered() -> None:
    """And no other: code that registers a function under a name of its own would not be found by it."""
    root = Path(hooks.__file__).parent.parent
    for owner, rows in hooks.HOOKS.items():
        text = (root / owner.replace(".", "/")).with_suffix(".py").read_text()
        named = re.findall(r'hook\(__name__, "([\w.]+)"', text)
        assert len(named) == len(rows), owner
        assert all(sum(f".{path}".endswith(f".{name}") for name in named) == 1 for path in rows), owner
    calls = {str(file.relative_to(root)) for file in root.rglob("*.py") if "hook(__name__" in file.read_text()}
    assert calls == {f"{owner.replace('.', '/')}.py" for owner in hooks.HOOKS}


def test_the_members_that_we_touch_are_in_the_contract() -> None:
    """A protocol of `seams.py` names what our code reads and writes; one of them that SGLang lacks is an error."""
    used = {symbol.path: symbol.source_has for symbol in CONTRACT}
    assert "retracted_stain" in used["sglang.srt.managers.schedule_batch.Req"]
    assert "pic" not in used["sglang.srt.managers.schedule_batch.Req"], "ours"
    with pytest.raises(ContractError, match=r"Scheduler no longer has 'tree_cashe'"):
        check_contract((Symbol(_SCHEDULER, source_has=("tree_cache", "tree_cashe"), why="a test"),))


@pytest.mark.parametrize(
    ("path", "fake"),
    [
        ("managers.schedule_batch.Req", request()),
        ("managers.schedule_batch.ScheduleBatch", scheduled([], [])),
        ("model_executor.model_runner.ModelRunner", BareRunner(1)),
    ],
    ids=["Req", "ScheduleBatch", "ModelRunner"],
)
def test_fakes_have_no_member_that_sglangs_class_lacks(path: str, fake: Any) -> None:
    """A test of ours would go on passing where SGLang renamed what it fakes."""
    members = tuple(sorted({name for name in dir(fake) if not name.startswith("_")} - {"pic"}))
    assert members
    check_contract((Symbol(f"sglang.srt.{path}", source_has=members, why="a test"),))
