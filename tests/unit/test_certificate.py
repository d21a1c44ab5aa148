"""Certificates: what is compared, in which words, and which preset they name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sglang_pic import certificate as certificates
from sglang_pic.certificate import (
    SHIPPED,
    Bounded,
    Certificate,
    Served,
    check_certificate,
    choose_preset,
    policy_settings,
    read_certificate,
)
from sglang_pic.config import read_config
from sglang_pic.core import PRESETS, CoreConfig, ReusePolicy

SERVED = Served(
    **{"model": "smollm2", "weights": "a" * 64, "sglang": "0.5.23", "dtype": "bfloat16", "kv_dtype": "bfloat16"},
    attention="fa3",
    page_size=1,
    settings=policy_settings(ReusePolicy()),
)
CERTIFICATE = Certificate(
    **{"name": "careful", "confidence": 0.95, "budget": 0.01, "cap": 0.05, "sessions": 24, "reuse": 0.36},
    served=SERVED,
    loss=Bounded(mean=0.004, low=0.001, high=0.0084),
    agreement_loss=Bounded(mean=0.01, low=0.0, high=0.04),
    traffic="b" * 64,
    date="2026-11-24",
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"model": "renamed"}, []),
        ({"weights": None}, []),
        ({"weights": None, "model": "other"}, ["model other here, smollm2 there"]),
        ({"weights": "c" * 64}, ["weights cccccccccccc here, aaaaaaaaaaaa there"]),
        ({"sglang": "0.5.22", "plugin": "9", "attention": "triton", "page_size": 64}, []),
        (
            {"dtype": "float32", "kv_dtype": "float8_e4m3fn"},
            ["dtype float32 here, bfloat16 there", "dtype of the KV cache float8_e4m3fn here, bfloat16 there"],
        ),
        ({"settings": policy_settings(CoreConfig(tail_tokens=32))}, ["tail_tokens 32 here, 256 there"]),
        ({"settings": SERVED.settings | {"later": 3}}, ["later 3 here, unknown there"]),
    ],
)
def test_a_certificate_says_what_differs(changes: dict[str, object], said: list[str]) -> None:
    assert CERTIFICATE.differs_from(changed(**changes)) == said


def test_a_server_says_one_line(tmp_path: Path) -> None:
    path, shown, broken = (tmp_path / f"{name}.json" for name in ("certificate", "shown", "broken"))
    path.write_bytes(msgspec.json.encode(CERTIFICATE))
    behind = Bounded(mean=0.005, low=0.0, high=0.009)
    shown.write_bytes(msgspec.json.encode(msgspec.structs.replace(CERTIFICATE, changed_fields=behind)))
    broken.write_text('{"schema_version": 2}')
    for file, here, fits, said in (
        (path, SERVED, True, "fits: careful, a loss of at most 0.0084 nats a token, behind changed fields not shown ("),
        (shown, SERVED, True, "nats a token, behind changed fields at most 0.0090 (95%, 24 sessions, 2026-11-24)"),
        (path, changed(weights=None), True, "start-up compares the weights"),
        (path, changed(dtype="float32"), False, "does not fit: dtype float32 here, bfloat16 there; settings are"),
        (
            *(path, changed(sglang="0.5.22", page_size=64), True),
            "); measured with another setup: SGLang 0.5.22 here, 0.5.23 there, page size 64 here, 1 there",
        ),
        (broken, SERVED, False, "not a certificate that this version can read"),
        (tmp_path / "none", SERVED, False, "No such file"),
    ):
        checked = check_certificate(str(file), here)
        assert checked.fits == fits
        assert said in checked.said


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of certificates that come with the package, with one of another model and one of SERVED's."""
    monkeypatch.setattr(certificates, "SHIPPED", tmp_path / "shipped")
    put(tmp_path / "shipped" / "another.json", "most", model="another", weights="c" * 64)
    put(tmp_path / "shipped" / "smollm2.json", "balanced")
    return tmp_path / "shipped"


def put(path: Path, preset: str, **facts: object) -> Path:
    """Write a certificate of a preset."""
    served = changed(settings=policy_settings(ReusePolicy(**PRESETS[preset])), **facts)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(CERTIFICATE, name=preset, served=served)))
    return path


def test_the_first_certificate_of_the_model_names_the_preset(shipped: Path) -> None:
    """The operator's comes first; other versions, backends and page sizes do not matter."""
    here = changed(sglang="0.5.22", plugin="9", attention="triton", page_size=64, settings={})
    assert choose_preset(None, here) == ("balanced", str(shipped / "smollm2.json"), [])
    given = str(put(shipped.parent / "mine.json", "most"))
    assert choose_preset(given, here) == ("most", given, [])
    elsewhere = msgspec.structs.replace(here, model="renamed")
    assert choose_preset(None, elsewhere).preset == "balanced", "weights tell"
    unread = msgspec.structs.replace(here, weights=None)
    assert choose_preset(None, unread).preset == "balanced", "names tell where weights are not read"
    assert choose_preset(None, msgspec.structs.replace(unread, model="renamed")).preset == "careful"


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"weights": "d" * 64}, "smollm2.json: weights dddddddddddd here, aaaaaaaaaaaa there"),
        ({"dtype": "float32"}, "smollm2.json: dtype float32 here, bfloat16 there"),
        ({"kv_dtype": "float8_e4m3fn"}, "smollm2.json: dtype of the KV cache float8_e4m3fn here, bfloat16 there"),
    ],
)
def test_without_a_certificate_of_the_model_and_its_rows_the_careful_preset_is_served(
    facts: dict[str, object], why: str, shipped: Path
) -> None:
    assert choose_preset(None, changed(**facts)) == ("careful", None, [why])
    given, fits = put(shipped.parent / "mine.json", "most", model="another"), put(shipped / "z.json", "most", **facts)
    preset, path, (mine, shipped_one) = choose_preset(str(given), changed(**facts))
    assert (preset, path, shipped_one) == ("most", str(fits), why), "the next one is asked"
    assert mine.startswith("mine.json: ")


def test_settings_that_are_no_preset_any_more_do_not_fit(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(certificates.PRESETS, "balanced", {"preset": "balanced", "tail_tokens": 48, "near_tokens": 256})
    why = f"smollm2.json: its settings (balanced) are no preset of sglang_pic {SERVED.plugin}"
    assert choose_preset(None, SERVED) == ("careful", None, [why])
    lost = choose_preset(str(shipped.parent / "lost.json"), SERVED)
    assert lost.preset == "careful"
    assert "No such file" in lost.passed[0]


def test_the_package_has_one_certificate_for_a_model_and_kind_of_rows() -> None:
    """Each of a preset of this version: a change of presets means new ones."""
    found = [read_certificate(path) for path in sorted(SHIPPED.glob("*.json"))]
    assert all(one.preset is not None and one.served.weights for one in found)
    kinds = [(one.served.weights, one.served.dtype, one.served.kv_dtype) for one in found]
    assert len({*kinds}) == len(kinds) > 0


def test_a_certificate_lies_beside_the_configuration_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "pic.json"
    path.write_text('{"certificate": "certificate.json"}')
    assert read_config(str(path)).certificate == str(tmp_path / "certificate.json")
    assert read_config('{"certificate": "here.json"}').certificate == "here.json"
    assert read_config('{"certificate": "/there.json"}').certificate == "/there.json"


def changed(**facts: object) -> Served:
    return msgspec.structs.replace(SERVED, **facts)
