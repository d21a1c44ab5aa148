"""The traces of a comparison, called scenes where there are several: each with a folder and a namespace of its own."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import chain, count
from pathlib import Path

import msgspec
from pic_traces.replay import ReplayOptions
from pic_traces.source import short_name

from pic_bench.compare.run_folder import COMPARISON, Config, scene_folder


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One trace of a comparison.

    Args:
        name: its key among the scenes, and the name of its folder where there are several.
        folder: a complete run folder; the comparison's own where there is one trace.
        config: what the folder's config.json says.
        replay: options of the replay; its address, folder and custom parameters are set for each arm.
    """

    name: str
    folder: Path
    config: Config
    replay: ReplayOptions


def make_scenes(traces: Sequence[str], out: Path, config: Config, replay: ReplayOptions) -> list[Scene]:
    """A scene for every trace, from the configuration and the replay options of the first.

    All scenes go to the same servers. Where there are several, their requests carry the scene's name as `extra_key`, so
    that no scene is served from rows of another.
    """
    if len(traces) == 1:
        return [Scene(name=_name(traces[0], ()), folder=out, config=config, replay=replay)]
    scenes: list[Scene] = []
    for trace in traces:
        name = _name(trace, {scene.name for scene in scenes})
        scenes.append(
            Scene(
                name=name,
                folder=scene_folder(out, name),
                config=msgspec.structs.replace(config, trace=trace),
                replay=msgspec.structs.replace(replay, trace=trace, extra_body={"extra_key": name}),
            )
        )
    return scenes


def _name(trace: str, taken: Collection[str]) -> str:
    """A name for a folder: lower case letters, digits, dots and dashes, unlike those in `taken`."""
    plain = re.sub(r"[^a-z0-9.]+", "-", short_name(trace).lower()).strip("-.") or "trace"
    names = chain([plain], (f"{plain}-{number}" for number in count(2)))
    return next(name for name in names if name not in taken and name not in COMPARISON.owned)
