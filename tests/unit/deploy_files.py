"""What the files of `sglang_pic/deploy` start, read from them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

import sglang_pic

FOLDER = Path(sglang_pic.__file__).parent / "deploy"
UNITS = sorted(FOLDER.glob("*.service"))


def kubernetes() -> list[dict[str, Any]]:
    """The objects of Kubernetes, before kustomize adds those of the monitoring."""
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))


def compose() -> dict[str, Any]:
    """The services of the compose file."""
    return dict(yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"])


def _as_systemd(text: str) -> str:
    """A line with the instance 0 and the variables of pic.env."""
    variables = dict(line.split("=", 1) for line in (FOLDER / "pic.env").read_text().splitlines() if line[0] != "#")
    text = text.replace("%i", "0").replace("%d", "/salts").replace("%t", "/run").replace("/opt/sglang/bin/", "")
    return re.sub(r"\$\{?([A-Z_]+)\}?", lambda found: variables[found[1]], text)


def commands() -> dict[str, tuple[list[str], dict[str, str]]]:
    """Every command line by its file and place, with its environment."""
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    for name, service in compose().items():
        if "command" in service and "extends" not in service:
            environment = {**service.get("environment", {}), "PIC_LISTEN": "127.0.0.1:30000"}
            found[f"compose {name}"] = shlex.split(service["command"].replace("$$", "$")), environment
    for each in kubernetes():
        for container in each["spec"]["template"]["spec"]["containers"] if "template" in each.get("spec", {}) else ():
            if "command" in container:
                environment = {one["name"]: one.get("value", "SECRET") for one in container.get("env", ())}
                words = [
                    re.sub(r"\$\((\w+)\)", lambda name, given=environment: given[name[1]], word)
                    for word in [*container["command"], *container.get("args", ())]
                ]
                found[f"kubernetes {container['name']}"] = words, environment
    for path in UNITS:
        environment = dict(
            pair.split("=", 1)
            for line in re.findall(r"^Environment=(.*)$", _as_systemd(path.read_text()), re.MULTILINE)
            for pair in shlex.split(line)
        )
        for number, line in enumerate(re.findall(r"^ExecStart\w*=(.*)$", _as_systemd(path.read_text()), re.MULTILINE)):
            found[f"systemd {path.name} {number}"] = shlex.split(line), environment
    return found


def servers() -> dict[str, tuple[list[str], str]]:
    """The flags of every `sglang serve MODEL`, and the plugin's configuration."""
    found = {}
    for place, (words, environment) in commands().items():
        if words[:2] == ["sglang", "serve"]:
            config = environment["SGLANG_PIC_CONFIG"]
            assert json.loads(config)
            found[place] = words[3:], config
    return found
