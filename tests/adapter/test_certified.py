"""The preset `certified` becomes that of a certificate before anything reads the reuse policy, on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from sglang_pic import certificate as certificates
from sglang_pic.adapter import factory, support
from sglang_pic.adapter.startup import certified
from sglang_pic.certificate import policy_settings
from sglang_pic.config import PicConfig, UncertifiedConfig, load_config
from sglang_pic.core import PRESETS, CoreConfig
from tests.adapter.test_ranks import on_each_rank
from tests.unit.test_certificate import SERVED, put


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's certificates: one of SERVED with the preset `balanced`."""
    monkeypatch.setattr(certificates, "SHIPPED", tmp_path / "shipped")
    return put(tmp_path / "shipped" / "smollm2.json", "balanced")


@pytest.mark.parametrize("more", ["", ', "tail_tokens": 100'])
def test_the_preset_of_the_certificate_is_served_and_what_is_given_beside_it_holds(
    more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PIC_CONFIG", f'{{"core": {{"preset": "certified"{more}}}, "audit_rate": 0.5}}')
    config, checked = certified.settle(load_config(), msgspec.structs.replace(SERVED, page_size=16), "null")
    assert type(config) is PicConfig
    given = {"tail_tokens": 100} if more else {}
    assert (config.core, config.audit_rate) == (CoreConfig(**{**PRESETS["balanced"], **given}), 0.5)
    assert checked.here.settings == policy_settings(config.core)
    assert checked.fits is not bool(more), "the certificate is of a preset's settings alone"
    assert checked.said.startswith("preset certified is balanced, by smollm2.json: certificate ")
    assert ("tail_tokens 100 here, 64 there" if more else "page size 16 here, 1 there") in checked.said


def test_the_careful_preset_is_served_where_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PIC_CONFIG", '{"core": {"preset": "certified", "tail_tokens": 100}}')
    another = msgspec.structs.replace(SERVED, model="another", weights="c" * 64)
    config, checked = certified.settle(load_config(), another, "null")
    assert (type(config), config.core, checked.fits) == (PicConfig, CoreConfig(tail_tokens=100), False)
    assert checked.said == (
        "preset certified is careful: no certificate fits (there is none of this model): make one with sglang-pic "
        "tune, and name it"
    )
    for mode in ("prefill", "decode"):
        config, checked = certified.settle(load_config(), SERVED, mode)
        assert (config.core, checked.fits) == (CoreConfig(tail_tokens=100), False)
        assert "prefill and decode servers must have one preset" in checked.said


def test_without_a_certificate_and_the_preset_nothing_is_read_or_said() -> None:
    for config in (PicConfig(), PicConfig(core=CoreConfig(**PRESETS["balanced"]))):
        assert certified.certify(None, config, None, None) == (config, None)


def test_the_cache_is_made_with_the_settled_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(Exception):
        """The cache is made with this configuration."""

    def make_cache(_: object, config: PicConfig, *__: object) -> None:
        raise Made(config)

    settled = PicConfig(core=CoreConfig(**PRESETS["balanced"]))
    for name, stub in {
        "load_config": lambda: UncertifiedConfig(audit_rate=0),
        "check_support": lambda *_: None,
        "check_features": lambda _: (),
        "_checked_path": lambda *_: (SimpleNamespace(splicer=None), []),
        "_read_model": lambda *_: SimpleNamespace(splicer=None),
        "_make_cache": make_cache,
    }.items():
        monkeypatch.setattr(factory, name, stub)
    monkeypatch.setattr(support, "prefix_only", lambda _: "")
    monkeypatch.setattr(certified, "certify", lambda *_: (settled, None))
    fields = {"prefill_attention_backend_str": "triton", "device": "cpu", "forward_stream": torch.cpu.Stream()}
    worker = SimpleNamespace(model_runner=SimpleNamespace(**fields))
    args = SimpleNamespace(enable_metrics=False, disaggregation_mode="null")
    with pytest.raises(Made) as made:
        factory.create_cache(SimpleNamespace(tp_worker=worker, server_args=args, tp_group=None, tp_rank=0))
    assert made.value.args == (settled,)


def serve(rank: int, group: Any, folder: Path) -> str:
    """Settle one rank of a server whose ranks have the certificates of their own folders."""
    certificates.SHIPPED = folder
    certified.read_weights = lambda *_: SERVED.weights
    certified.load_config = lambda *, certified: PicConfig(core=CoreConfig(**PRESETS[certified]))
    certified.disaggregation_mode = lambda _: "null"
    context = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(prefill_attention_backend_str="fa3")),
        server_args=SimpleNamespace(model_path="/models/smollm2"),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        params=SimpleNamespace(page_size=1),
        **{"tp_group": group, "tp_rank": rank},
    )
    splicer: Any = SimpleNamespace(view=SimpleNamespace(dtype=torch.bfloat16))
    config, checked = certified.certify(context, UncertifiedConfig(), splicer, None)
    return f"{config.core.preset}, fits: {checked.fits}"


def test_ranks_settle_alike_or_stop(shipped: Path, tmp_path: Path) -> None:
    alike = on_each_rank(2, tmp_path / "store", lambda rank, group: serve(rank, group, shipped.parent))
    assert alike == ["balanced, fits: True"] * 2
    folders = [shipped.parent, tmp_path / "none"]
    (answer,) = {*on_each_rank(2, tmp_path / "store2", lambda rank, group: serve(rank, group, folders[rank]))}
    assert answer.startswith("UnsupportedError: tensor-parallel ranks [1] and rank 0 read different certificates,")
