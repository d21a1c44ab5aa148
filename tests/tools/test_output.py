"""Files that verbs write: all or nothing, and never through a link."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from pic_bench.out_folder import RunKind, claim_folder, write_json
from pic_models.store import build

from sglang_pic.certificate import Bounded, check_certificate, policy_settings
from sglang_pic.cli import main
from sglang_pic.core import CoreConfig
from sglang_pic.errors import ConfigError
from sglang_pic.output import output_path, write_whole
from tests.helpers.certificates import CERTIFICATE, SERVED, changed
from tests.helpers.files import files_up_to

WORDS = ["explain", "sample:opendevin", "--limit-sessions", "1", "--out"]


def test_a_verb_writes_all_of_its_file_or_none_and_never_through_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, target = tmp_path / "out", tmp_path / "target"
    out.symlink_to(target)
    assert main([*WORDS, str(out)]) == 2, "a link to nothing exists, too"
    assert not target.exists()
    target.write_text("another's")
    assert main([*WORDS, str(out)]) == 2
    assert main([*WORDS, str(out), "--force"]) == 0
    assert (target.read_text(), out.is_symlink()) == ("another's", False)
    out.write_text("precious")
    out.chmod(0o600)
    with files_up_to(100):
        assert main([*WORDS, str(out), "--force"]) == 1
    assert f"error: {out}: File too large" in capsys.readouterr().err
    assert out.read_text() == "precious"
    assert main([*WORDS, str(out), "--force"]) == 0
    assert out.stat().st_mode & 0o777 == 0o600, "as private as it was"
    assert sorted(os.listdir(tmp_path)) == ["out", "target"]


def test_where_a_file_cannot_be_it_is_not_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for out, why in {
        "/dev/null": "no regular file",
        "/dev/stdout": "no regular file",
        f"{tmp_path}/fifo": "no regular file",
        str(tmp_path): "is a folder",
        f"{tmp_path}/none/out": "make it first",
    }.items():
        with pytest.raises(ConfigError, match=why):
            output_path(out, "page", is_forced=True)
    for path in (tmp_path / "none" / "out", Path("/proc/out")):
        with pytest.raises(ConfigError, match="cannot be written there"):
            write_whole(path, b"a")
    assert main([*WORDS, str(tmp_path / ("a" * 300))]) == 2


def test_a_folder_of_a_run_is_claimed_with_its_links(tmp_path: Path) -> None:
    """Also with links to nothing, which a run would write through."""
    run, out, away = RunKind("k", "run", ("config.json", "a.*", "b", "sub")), tmp_path / "out", tmp_path / "away"
    away.mkdir()
    claim_folder(out, run, force=False)
    write_json(out / "config.json", {"kind": "k"})
    for name in ("a.x", "b"):
        (out / name).symlink_to(tmp_path / "nothing")
    (out / "sub").symlink_to(away)
    claim_folder(out, run, force=True)
    assert (os.listdir(out), away.exists()) == ([], True)
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="is a file"):
        claim_folder(tmp_path / "link", run, force=True)
    with pytest.raises(ConfigError, match="name a folder that is new"):
        build(tmp_path / "link", "m", "f", lambda *_: None, lambda _: None)
    assert not (tmp_path / "nothing").exists()


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
