"""Owns the layout of a comparison's folder: what lies where, claiming it for writing, reading it back for the report.

It must not know how arms are run or how reports look.

    DIR/config.json environment.json summary.json report.md report.html report.svg
    DIR/arms/<arm>/server.log requests.jsonl summary.json metrics.txt
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
from pic_traces.records import RequestRecord, Status, load_records

from pic_bench.environment import Environment
from pic_bench.pairing import Pair, pair_records
from pic_bench.summary import Paired, Summary, read_summary
from sglang_pic.errors import BenchError, ConfigError

__all__ = ["Config", "Run", "arm_folder", "claim_folder", "load_run"]

KIND = "compare"
OWNED = ("config.json", "environment.json", "summary.json", "report.md", "report.html", "report.svg")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """config.json: what was asked for. Its `kind` marks the folder as an earlier comparison."""

    schema_version: int = 1
    kind: str = KIND
    trace: str
    model: str
    arms: list[str]
    server_args: list[str]
    pic_config: str | None
    sessions: int
    limit_sessions: int | None
    limit_calls: int | None
    max_tokens: int


@dataclass(slots=True, frozen=True)
class Run:
    """A finished comparison, read back from its folder."""

    summary: Summary
    environment: Environment
    config: Config
    records: dict[str, list[RequestRecord]]

    def ttfts(self, arm: str) -> list[float]:
        """The arm's times to first token in seconds."""
        return [
            record.ttft_s
            for record in self.records[arm]
            if record.status is Status.OK and not record.warmup and record.ttft_s is not None
        ]

    def pairs(self, paired: Paired) -> list[Pair]:
        """The pairs behind a comparison."""
        return pair_records(self.records[paired.baseline], self.records[paired.arm])


def arm_folder(folder: Path, arm: str) -> Path:
    """Where an arm's files lie."""
    return folder / "arms" / arm


def claim_folder(folder: Path, *, force: bool) -> None:
    """Make `folder` an empty folder for a comparison.

    With `force`, an earlier comparison in it is deleted: the files and the arms folder that a comparison writes,
    nothing else.

    Raises:
        ConfigError: if it holds an earlier comparison and `force` is not given, or anything else.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {str(folder)!r} is a file; give a folder that does not exist or is empty.")
    if folder.is_dir() and any(folder.iterdir()):
        if not _is_comparison(folder):
            raise ConfigError(
                f"--out {str(folder)!r} is not empty and is no earlier comparison; give an empty or a new folder."
            )
        if not force:
            raise ConfigError(f"--out {str(folder)!r} holds an earlier comparison; add --force to overwrite it.")
        for name in OWNED:
            (folder / name).unlink(missing_ok=True)
        if (folder / "arms").is_dir():
            shutil.rmtree(folder / "arms")
    folder.mkdir(parents=True, exist_ok=True)


def load_run(folder: Path) -> Run:
    """Read a comparison back.

    Raises:
        BenchError: if the folder is no finished comparison or a file in it cannot be read.
    """
    summary = read_summary(folder / "summary.json")
    try:
        environment = msgspec.json.decode((folder / "environment.json").read_bytes(), type=Environment)
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=Config)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{folder}: not a comparison's folder ({error}).") from error
    records = {arm: load_records(arm_folder(folder, arm)) for arm in summary.arms}
    return Run(summary=summary, environment=environment, config=config, records=records)


def _is_comparison(folder: Path) -> bool:
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=Config).kind == KIND
    except (OSError, msgspec.DecodeError):
        return False
