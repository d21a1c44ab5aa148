"""The kernel benchmark from its command line: what it writes, and that it times nothing that is wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from pic_bench.gpu import kernel_pool, kernels

SMALL = ["--model", "rows of 128 B", "--tokens", "16", "--repeats", "3"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warm cache to escape from, and `--backend` sets a variable of this process."""
    monkeypatch.setattr(kernels, "_POOL_BYTES", 1)
    monkeypatch.setenv("SGLANG_PIC_KERNELS", "auto")


@pytest.mark.parametrize("model", ["SmolLM2-135M", "DeepSeek-V2-Lite"])
def test_every_way_moves_the_same_rows(model: str) -> None:
    """The baselines would prove nothing if they did less."""
    shape = kernel_pool.SHAPES[model]
    results = []
    for name in ("move", "move_then_rope"):
        pool = kernel_pool.Pool(shape, 2, 160, torch.device("cpu"))
        pool.fill()
        torch.manual_seed(5)
        window = kernel_pool.make_window(pool, "scattered", 32, 16)
        getattr(pool, name)(window)
        results.append(pool.memory.float())
    torch.testing.assert_close(*results, rtol=2**-7, atol=1e-3)


def test_layers_are_left_out_to_fit_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_free_bytes", lambda device: 3 << 20)
    out = tmp_path / "kernels.json"
    arguments = ["--model", "DeepSeek-V3", "--tokens", "16", "--repeats", "1", "--slots", "run", "--out", str(out)]
    assert kernels.main(arguments) == 0
    (timing,) = msgspec.json.decode(out.read_bytes(), type=kernels.KernelResult).timings
    assert (timing.layers, timing.layers_of_model) == (14, 61)
    assert " 14/61 |" in capsys.readouterr().out


def test_wrong_rows_are_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernel_pool.Splicer, "splice", lambda *operands: None)
    assert kernels.main([*SMALL, "--slots", "run"]) == 1
    captured = capsys.readouterr()
    assert "nothing was timed" in captured.err
    assert captured.out == ""
