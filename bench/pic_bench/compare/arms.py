"""The arms of a comparison: each one's server, its flags and environment, and the options that its requests carry."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import msgspec
from pic_traces.session import JsonValue

from pic_bench.compare.server import Server, free_port, launch_command
from pic_bench.compare.summary import ArmKind
from pic_bench.probe_plugin import PROBE_PLUGIN, PROBE_VARIABLE
from sglang_pic.config import CONFIG_VARIABLE, read_config
from sglang_pic.errors import ConfigError

PIC_FLAGS = ("--radix-cache-backend", "pic")
PLUGIN_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")
PIC_PLUGIN = "pic"
NAME = "{arm}"
"""In a server's flag, the arm's name: an arm does not find another arm's rows."""
NO_PLUGIN = "none"  # SGLang reads an empty list as "all"; no plugin has this name


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One server run of a comparison; `name` is its folder and its key in summary.json."""

    name: str
    kind: ArmKind
    server_args: tuple[str, ...]
    env: dict[str, str | None]
    custom_params: dict[str, JsonValue] = {}
    """Of every request."""


def build_arms(names: Sequence[str], *, server_args: Sequence[str], pic_config: str | None) -> list[Arm]:
    """The arms named on the command line, in order; a repeated name gets a number (`stock`, `stock-2`).

    Raises:
        ConfigError: for a name that is not an arm, or for none at all.
    """
    kinds = {kind.value: kind for kind in ArmKind}
    if not {*names} <= kinds.keys() or not names:
        raise ConfigError(f"--arms {','.join(names)!r}: must be among {', '.join(kinds)}, each as often as you like.")
    seen: Counter[str] = Counter()
    arms = []
    for name in names:
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name}-{seen[name]}"
        arms.append(_arm(unique, kinds[name], tuple(server_args), pic_config))
    return arms


def arm_server(
    model: str,
    arm: Arm,
    log_path: Path,
    *,
    flags: Sequence[str] = (),
    probe: Mapping[str, object] | None = None,
    env: Mapping[str, str | None] | None = None,
    start_timeout_s: float = 900.0,
) -> Server:
    """The server of an arm, not yet started, with more flags, switches of the probe plugin and variables."""
    port = free_port()
    switches = {} if probe is None else {PROBE_VARIABLE: msgspec.json.encode(probe).decode()}
    command = launch_command(model, port, [*arm.server_args, *flags])
    variables = {**arm.env, **switches, **(env or {})}
    return Server(command, port=port, log_path=log_path, env=variables, start_timeout_s=start_timeout_s)


def read_pic_config(text: str | None) -> str | None:
    """`--pic-config` as the patched server reads it: JSON text as given, a file as its absolute path.

    Raises:
        ConfigError: it is neither JSON nor a readable file, or the plugin does not allow a value in it.
    """
    if text is None:
        return None
    read_config(text)
    return text if text.lstrip().startswith("{") else str(Path(text).resolve())


def _arm(name: str, kind: ArmKind, server_args: tuple[str, ...], pic_config: str | None) -> Arm:
    from pic_platform import activate

    # Hits and metrics are reported, and the CPU platform serves on the CPU.
    flags = ("--enable-cache-report", "--enable-metrics", *(() if activate() is None else ("--device", "cpu")))
    flags += tuple(flag.replace(NAME, name) for flag in server_args)
    if kind.is_stock:
        cold = ("--disable-radix-cache",) if kind is ArmKind.STOCK_COLD else ()
        # Stock means stock: not only no flag, the plugin is not even loaded into the server.
        plain = {"SGLANG_PLUGINS": _other_plugins(), CONFIG_VARIABLE: None}
        return Arm(name=name, kind=kind, server_args=(*flags, *cold), env=plain)
    env: dict[str, str | None] = {} if pic_config is None else {CONFIG_VARIABLE: pic_config}
    off: dict[str, JsonValue] = {"pic": {"mode": "off"}} if kind is ArmKind.PIC_OFF else {}
    return Arm(name=name, kind=kind, server_args=(*flags, *PIC_FLAGS), env=env, custom_params=off)


def _other_plugins() -> str:
    """SGLANG_PLUGINS' value that loads whatever would be loaded, less this project's cache and its probe."""
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    found = {entry.name for group in PLUGIN_GROUPS for entry in entry_points(group=group)}
    return ",".join(sorted((found & allowed if allowed else found) - {PIC_PLUGIN, PROBE_PLUGIN})) or NO_PLUGIN
