"""What `make gpu` measures of moved states, on a tiny model: exact where it must be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pic_bench.gpu import states
from pic_bench.gpu.record import FIGURES, Work
from pic_bench.gpu.states import Move
from pic_platform import torchvision_shim
from test_encode import CHATML, make_folder


def test_a_state_moved_by_the_matrix_is_the_computed_one_where_its_inputs_are_equal() -> None:
    """Those of the first layer are: they depend on tokens alone."""
    torchvision_shim.install()
    model = states._tiny()
    rule = states.Rule(model)
    *_, case = states._random_cases()
    with torch.inference_mode():
        donor, before = (states._advance(model, None, ids)[0] for ids in (case.donor, case.prompt))
        with rule.recorded():
            after = states._advance(model, donor, case.text)[0]
        full = states._advance(model, before, case.text)[0]
        call = rule.calls[0]
        assert len(rule.calls) == 3
        first, now, last, true = (
            states._recurrent(cache)[0].recurrent_states[0] for cache in (donor, before, after, full)
        )
        assert not torch.allclose(last, true, atol=1e-2)
        torch.testing.assert_close(last + states._moved(rule, Move.MATRIX, call, now - first), true)
        assert not torch.allclose(last + states._moved(rule, Move.GATES, call, now - first), true, atol=1e-2)
        assert all(0 < norm < 1 for norm in states.norms(rule, call).tolist())
        same = states.measure(model, rule, case._replace(donor=case.prompt))
    assert all(abs(same[f"kl_{move.value}"]) < 1e-5 and same[f"same_{move.value}"] == 1 for move in Move)


def test_a_dry_run_has_every_figure_and_needs_weights_elsewhere(tmp_path: Path) -> None:
    work = Work(is_dry=True, folder=tmp_path, limit_s=100.0)
    found = states.run(work)
    assert {figure.name for figure in FIGURES if figure.item == "states"} < set(found.figures)
    assert 0 < found.figures["state_kl_exact"] < found.figures["state_kl_matrix"] < found.figures["state_kl_copy"]
    assert list(found.raw["by_length"]) == ["8", "32"]
    assert states.run(work._replace(is_dry=False)).notes == [
        "needs --model FOLDER with trained weights of Qwen3-Next or Qwen3.5"
    ]


def test_a_models_folder_is_asked_for_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision_shim.install()
    states._tiny(vocab_size=512).save_pretrained(tmp_path)
    monkeypatch.setattr(states, "_LENGTHS", (100,))
    found = states.run(Work(is_dry=True, folder=tmp_path, limit_s=100.0, model=make_folder(tmp_path, CHATML)))
    assert not found.failures
    assert list(found.raw["by_length"]) == ["100"]
