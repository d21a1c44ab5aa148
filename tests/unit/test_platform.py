"""When the CPU platform takes part, and when it leaves a machine to SGLang."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from sglang_pic import platform
from sglang_pic.platform import torchvision_shim

Patch = pytest.MonkeyPatch


@pytest.fixture
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No accelerator, no settings, and no shim left behind by a test."""
    for name in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platform, "_find_accelerator", lambda: None)
    monkeypatch.setattr(torchvision_shim, "is_needed", lambda: False)


@pytest.mark.usefixtures("plain_machine")
@pytest.mark.parametrize(
    ("chosen", "is_ours"),
    [
        ({}, True),
        ({"SGLANG_PLATFORM": "pic_cpu"}, True),
        ({"SGLANG_PLATFORM": "other"}, False),
        ({"SGLANG_USE_CPU_ENGINE": "1"}, False),
        ({"SGLANG_PLATFORM": "pic_cpu", "SGLANG_USE_CPU_ENGINE": "1"}, True),
    ],
)
def test_takes_a_cpu_unless_the_operator_chose(monkeypatch: Patch, chosen: dict[str, str], is_ours: bool) -> None:
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert platform.activate() == (platform.PLATFORM_CLASS if is_ours else None)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps", "torch_npu"])
def test_leaves_an_accelerator_alone(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """SGLang's own, and those that a package outside its tree brings."""
    for name in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda name=name: name == kind)
    monkeypatch.setattr(platform, "_is_installed", lambda package: package == kind)
    assert platform._find_accelerator() == kind
    assert platform.activate() is None


@pytest.mark.parametrize(
    ("version", "cuda", "expected"),
    [
        ("0.28.0+cu130", None, True),
        # With a torch that has CUDA, torchvision loads its own operators.
        ("0.28.0+cu130", "13.0", False),
        ("0.28.0+cpu", None, False),
        ("0.28.0", None, False),
        (None, None, False),
    ],
)
def test_shim_reads_the_build_of_torchvision(
    monkeypatch: Patch, tmp_path: Path, version: str | None, cuda: str | None, expected: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    package = tmp_path / "torchvision" / "__init__.py"
    if version is not None:
        package.parent.mkdir()
        package.write_text("raise RuntimeError('must not be imported')\n")
        package.with_name("version.py").write_text(f"__version__ = '{version}'\n")
    spec = None if version is None else importlib.util.spec_from_file_location("torchvision", package)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
    assert torchvision_shim.is_needed() is expected


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank gets its own cores and its share of OpenMP threads; what the operator set is kept."""
    torchvision_shim.install()
    pytest.importorskip("sglang")
    from sglang_pic.platform import cpu

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 5})
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for bound, threads in (("0,2|1,5", "2"), ("3|4", "7")):
        cpu._share_machine(2)
        assert (os.environ["SGLANG_CPU_OMP_THREADS_BIND"], os.environ["OMP_NUM_THREADS"]) == (bound, threads)
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "3|4")
        monkeypatch.setenv("OMP_NUM_THREADS", "7")


def test_memory_that_others_take_while_ranks_start_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision_shim.install()
    bootstrap = pytest.importorskip("sglang.srt.distributed.bootstrap")
    from sglang_pic.platform import cpu

    monkeypatch.setattr(os, "environ", os.environ.copy())
    found = {"pre_model_load_memory": 15.8, "local_gpu_memory": 19.3}
    monkeypatch.setenv("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "1")
    cpu._share_machine(2)
    with pytest.raises(RuntimeError, match="unbalanced"):
        bootstrap._check_tp_memory_balance(**found)
    monkeypatch.delenv("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK")
    cpu._share_machine(2)
    bootstrap._check_tp_memory_balance(**found)
