"""Certificates: what is compared, and in which words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sglang_pic.certificate import Bounded, check_certificate, policy_settings
from sglang_pic.core import CoreConfig
from tests.helpers.certificates import CERTIFICATE, SERVED, changed


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
        ({"settings": policy_settings(CoreConfig(tail_tokens=32))}, ["tail_tokens 32 here, 64 there"]),
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
