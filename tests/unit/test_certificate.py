"""Certificates: what is compared, in which words, and that a server without the measured facts is told so."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sglang_pic.certificate import Bounded, Certificate, Served, check_certificate, policy_settings
from sglang_pic.config import read_config
from sglang_pic.core import CoreConfig, ReusePolicy
from sglang_pic.errors import ConfigError

HERE = Served(
    model="smollm2",
    weights="a" * 64,
    sglang="0.5.23",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    attention="fa3",
    page_size=1,
    settings=policy_settings(CoreConfig(tail_tokens=32)),
)
CERTIFICATE = Certificate(
    name="tail-32",
    served=HERE,
    confidence=0.95,
    budget=0.01,
    cap=0.05,
    loss=Bounded(mean=0.004, low=0.001, high=0.0084),
    agreement_loss=Bounded(mean=0.01, low=0.0, high=0.04),
    sessions=24,
    reuse=0.36,
    traffic="b" * 64,
    date="2026-11-24",
)


def changed(**facts: object) -> Served:
    return msgspec.structs.replace(HERE, **facts)


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (HERE, []),
        (changed(model="renamed"), []),
        (changed(weights=None), []),
        (changed(weights=None, model="other"), ["model other here, smollm2 there"]),
        (changed(weights="c" * 64), ["weights cccccccccccc here, aaaaaaaaaaaa there"]),
        (changed(sglang="0.5.22", page_size=64), ["SGLang 0.5.22 here, 0.5.23 there", "page size 64 here, 1 there"]),
        (changed(settings=policy_settings(ReusePolicy())), ["tail_tokens 256 here, 32 there"]),
        (changed(settings=HERE.settings | {"later": 3}), ["later 3 here, unknown there"]),
    ],
)
def test_a_certificate_says_what_differs(here: Served, said: list[str]) -> None:
    assert CERTIFICATE.differs_from(here) == said


def test_a_server_says_one_line(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    path.write_bytes(msgspec.json.encode(CERTIFICATE))
    assert check_certificate(str(path), HERE).fits
    assert check_certificate(str(path), HERE).said == (
        "certificate fits: tail-32, a loss of at most 0.0084 nats a token (95%, 24 sessions, 2026-11-24)"
    )
    assert check_certificate(str(path), changed(sglang="0.5.22")).said == (
        "certificate does not fit: SGLang 0.5.22 here, 0.5.23 there; settings are served as configured, uncertified"
    )
    assert "start-up compares the weights" in check_certificate(str(path), changed(weights=None)).said
    path.write_text('{"schema_version": 2}')
    for unread, why in ((path, "no certificate that this version can read"), (tmp_path / "none", "No such file")):
        checked = check_certificate(str(unread), HERE)
        assert not checked.fits
        assert why in checked.said


def test_a_certificate_lies_beside_the_configuration_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "pic.json"
    path.write_text('{"certificate": "certificate.json"}')
    assert read_config(str(path)).certificate == str(tmp_path / "certificate.json")
    assert read_config('{"certificate": "here.json"}').certificate == "here.json"
    assert read_config('{"certificate": "/there.json"}').certificate == "/there.json"
    with pytest.raises(ConfigError):
        read_config('{"certificate": 3}')
