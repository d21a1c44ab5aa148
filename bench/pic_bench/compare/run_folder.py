"""The layout of a comparison's folder, and reading a folder back for the report.

    DIR/config.json environment.json summary.json report.md report.html
    DIR/arms/<arm>/server.log requests.jsonl summary.json metrics.txt

A comparison on several traces (scenes) has one such folder for each in `DIR/<scene>/`, and in DIR itself, besides the
combined report, a config.json that lists the scenes and the logs of the servers, which all scenes share.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

import msgspec
from pic_replay.records import RequestRecord, load_records
from pic_traces.source import short_name

from pic_bench.compare.pairing import compare_all
from pic_bench.compare.summary import Measured, Summary
from pic_bench.environment import Environment, read_environment
from pic_bench.out_folder import CONFIG, ENVIRONMENT, RunKind, read_json, scenes_of

COMPARISON = RunKind("compare", "comparison", (CONFIG, ENVIRONMENT, "summary.json", "report.md", "report.html", "arms"))


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """config.json: the settings of the comparison. Its `kind` marks the folder as an earlier comparison."""

    schema_version: int = 1
    kind: str = COMPARISON.kind
    trace: str
    model: str
    arms: list[str]
    server_args: list[str] = []
    pic_config: str | None = None
    sessions: int = 1
    limit_sessions: int | None = None
    limit_calls: int | None = None
    max_tokens: int = 16
    pairs: bool = False
    """Whether the servers ran at once, and took each call in turns."""


class ScenesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """config.json of a comparison on several traces: the folders of its scenes, in the order of the command line."""

    schema_version: int = 1
    kind: str = COMPARISON.kind
    scenes: list[str]


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One trace of a comparison, called a scene where there are several."""

    name: str
    """Its key among the scenes, and the name of its folder where there are several."""
    folder: Path
    """A complete run folder; the comparison's own where there is one trace."""
    config: Config
    namespace: str | None = None
    """The `extra_key` of its requests: no scene is served from rows of another on the same server."""


class Run(NamedTuple):
    """A finished comparison, read back from its folder."""

    summary: Summary
    environment: Environment
    config: Config
    records: dict[str, list[RequestRecord]]


def arm_folder(folder: Path, arm: str) -> Path:
    """Where an arm's files lie."""
    return folder / "arms" / arm


def make_scenes(traces: Sequence[str], out: Path, config: Config) -> list[Scene]:
    """A scene for every trace, from the configuration of the first."""
    scenes: list[Scene] = []
    for trace in traces:
        # A name for a folder: lower case letters, digits, dots and dashes, unlike what else lies there.
        plain = re.sub(r"[^a-z0-9.]+", "-", short_name(trace).lower()).strip("-.") or "trace"
        taken = {*COMPARISON.owned, *(scene.name for scene in scenes)}
        name = next(n for n in chain([plain], (f"{plain}-{number}" for number in count(2))) if n not in taken)
        asked = msgspec.structs.replace(config, trace=trace)
        scenes.append(Scene(name=name, folder=out / name, config=asked, namespace=name))
    if len(scenes) == 1:
        return [msgspec.structs.replace(scenes[0], folder=out, namespace=None)]
    return scenes


def load_scenes(folder: Path) -> dict[str, Run]:
    """Read a comparison on several traces back: every scene by its name, in order; empty for a single trace.

    Raises:
        BenchError: if a scene's folder is no finished comparison.
    """
    return {scene: load_run(folder / scene) for scene in scenes_of(folder)}


def load_run(folder: Path) -> Run:
    """Read a comparison back, its arms compared anew: the folder may be older than the figures' definitions.

    Raises:
        BenchError: if the folder is no finished comparison or a file in it cannot be read.
        ReplayError: an arm's records cannot be read.
    """
    word = "of a comparison; give the folder that `sglang-pic compare --out` wrote"
    measured = read_json(folder / "summary.json", Measured, word)
    config = read_json(folder / CONFIG, Config, word)
    records = {arm: load_records(arm_folder(folder, arm)) for arm in measured.arms}
    return Run(compare_all(measured, records), read_environment(folder), config, records)
