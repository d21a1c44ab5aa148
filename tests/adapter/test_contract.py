"""A changed SGLang must stop the server with one line, not serve silently without the cache."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pic.adapter.contract import BUILT_FOR, CONTRACT, Symbol, check_contract
from sglang_pic.core import ReusePolicy
from sglang_pic.errors import ContractError

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def test_the_installed_sglang_keeps_the_contract() -> None:
    check_contract()
    assert len({symbol.path for symbol in CONTRACT}) == len(CONTRACT)


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


@pytest.mark.parametrize(("backend", "code"), [("pic", 1), (None, 0)])
def test_only_a_server_that_wants_the_backend_is_stopped(backend: str | None, code: int) -> None:
    """Run as SGLang runs it: inside `load_plugins`, whose handlers swallow every `Exception`."""
    script = (
        "import sys\n"
        "import sglang_pic.adapter.contract as contract\n"
        "contract.check_contract.__defaults__ = ((contract.Symbol('sglang.srt.gone.Gone', why='a test'),),)\n"
        "sys.argv = ['launch_server', *sys.argv[1:]]\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "print('still running')\n"
    )
    args = ["--radix-cache-backend", backend] if backend else []
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *args], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if "sglang.srt.gone.Gone is missing" in line]
    assert len(lines) == 1
    assert ("still running" in done.stdout) == (backend is None)


def test_every_function_that_is_hooked_is_in_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        # SGLang and what it imports warn about this machine's missing accelerators.
        warnings.simplefilter("ignore")
        registry = pytest.importorskip("sglang.srt.plugins.hook_registry")
        from sglang_pic.adapter import disaggregation, server_info
        from sglang_pic.adapter.audit import hooks as audit_hooks
        from sglang_pic.adapter.serve import frontend, scheduler
        from sglang_pic.adapter.serve.auditor import Auditor
        from sglang_pic.adapter.serve.forward import ForwardPath
        from sglang_pic.adapter.serve.options import Mode

    hooked: list[str] = []
    monkeypatch.setattr(registry.HookRegistry, "register", lambda target, *_: hooked.append(target))
    audit: Any = SimpleNamespace(step_if_idle=None)
    frontend.install()
    scheduler.install(Auditor(), ReusePolicy())
    ForwardPath(audit).install()
    server_info.install({}, None)
    audit_hooks.install(audit)
    disaggregation.install_sender()
    disaggregation.install_receiver(ReusePolicy(), Mode.AUTO)
    assert len(hooked) >= 18
    assert set(hooked) <= {symbol.path for symbol in CONTRACT}


def test_the_members_that_we_touch_are_in_the_contract() -> None:
    """A protocol of `seams.py` names what our code reads and writes; one of them that SGLang lacks is an error."""
    used = {symbol.path: symbol.source_has for symbol in CONTRACT}
    assert "retracted_stain" in used["sglang.srt.managers.schedule_batch.Req"]
    assert "pic" not in used["sglang.srt.managers.schedule_batch.Req"], "ours"
    with pytest.raises(ContractError, match=r"Scheduler no longer has 'tree_cashe'"):
        check_contract((Symbol(_SCHEDULER, source_has=("tree_cache", "tree_cashe"), why="a test"),))
