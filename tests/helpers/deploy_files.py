"""What the files of `sglang_pic/deploy` start, read from them."""

from __future__ import annotations

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
    text = text.replace("%i", "0").replace("/opt/sglang/bin/", "").replace("\\\n", "")
    return re.sub(r"\$\{?([A-Z_]+)\}?", lambda found: variables[found[1]], text)


def commands() -> dict[str, list[str]]:
    """The words of every command line by its file and place; secrets are `SECRET`."""
    found = {}
    for name, service in compose().items():
        if "command" in service and "extends" not in service:
            command = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", service["command"])
            found[f"compose {name}"] = shlex.split(re.sub(r"\$\{\w+:\?.*?\}", "SECRET", command))
    for each in kubernetes():
        for container in each["spec"]["template"]["spec"]["containers"] if "template" in each.get("spec", {}) else ():
            if "command" in container:
                words = [*container["command"], *container.get("args", ())]
                found[f"kubernetes {container['name']}"] = [re.sub(r"\$\(\w+\)", "SECRET", word) for word in words]
    for path in UNITS:
        (line,) = re.findall(r"^ExecStart=(.*)$", _as_systemd(path.read_text()), re.MULTILINE)
        found[f"systemd {path.name}"] = shlex.split(line)
    return found


def servers() -> dict[str, list[str]]:
    """The flags of every `sglang serve MODEL`."""
    return {place: words[3:] for place, words in commands().items() if words[:2] == ["sglang", "serve"]}
