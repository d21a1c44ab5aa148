"""The files of `sglang_pic/deploy` are what compose, Kubernetes and systemd take, and start what exists.

Tools that are not installed are skipped; `make deploy` installs those of PyPI.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.deploy_files import FOLDER, UNITS, commands, compose, kubernetes, servers

MONITORING = FOLDER.parent / "monitoring"


def run(*words: str | Path, **variables: str) -> str:
    """What a command prints that succeeds; the test is skipped where its program is not installed."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed here")
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, env=os.environ | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def rendered() -> list[dict[str, object]]:
    """What is applied to a cluster."""
    return list(yaml.safe_load_all(run("kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", FOLDER)))


def test_kubernetes_takes_every_object(rendered: list[dict[str, object]]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="make deploy installs it")
    for each in rendered:
        validate.validate(each, "1.33", strict=True)


def test_every_volume_and_secret_is_made_or_named_in_the_page(rendered: list[dict[str, object]]) -> None:
    made = {(each["kind"], each["metadata"]["name"]) for each in rendered}  # type: ignore[index]
    text, page = yaml.safe_dump_all(rendered), (FOLDER.parent / "DEPLOY.md").read_text()
    assert {("ConfigMap", name) for name in re.findall(r"configMap:\n\s+name: (\S+)", text)} <= made
    assert set(re.findall(r"(?:secretName|secretKeyRef:\n\s+key: \S+\n\s+name): (\S+)", text)) == {"sglang-pic"}
    for key in re.findall(r"secretKeyRef:\n\s+key: (\S+)", text):
        assert f"--from-literal={key}=" in page
    assert set(re.findall(r"claimName: (\S+)", text)) == {"model"}


def test_the_gateway_is_given_every_server() -> None:
    (stateful,) = (each for each in kubernetes() if each["kind"] == "StatefulSet")
    hosts = [f"sglang-{i}.sglang.sglang-pic.svc.cluster.local:30000" for i in range(stateful["spec"]["replicas"])]
    ports = [f"127.0.0.1:{compose()[name]['environment']['PORT']}" for name in ("sglang-0", "sglang-1")]
    assert (targets("kubernetes"), targets("compose")) == (hosts, ports)
    found = {place: words for place, words in commands().items() if "smg" in words[0]}
    assert len(found) == 3
    for place, words in found.items():
        given = words[words.index("--worker-urls") + 1 :]
        assert given == [f"http://{each}" for each in (hosts if place.startswith("kubernetes") else ports)]


def test_the_gateway_takes_its_arguments() -> None:
    smg = pytest.importorskip("smg.launch_router", reason="make deploy installs it")
    for words in (words for words in commands().values() if "smg" in words[0]):
        assert words[1] == "launch"
        args = smg.parse_router_args(words[2:])
        assert (args.policy, args.port, len(args.worker_urls)) == ("cache_aware", 30000, 2)
        assert args.control_plane_api_keys, "whoever reaches the port could register servers"


def targets(name: str) -> list[str]:
    """The servers that Prometheus asks."""
    return list(yaml.safe_load((FOLDER / f"targets.{name}.yaml").read_text())[0]["targets"])


def test_compose_takes_its_files() -> None:
    pytest.importorskip("check_jsonschema", reason="make deploy installs it")
    files = [FOLDER / "compose.yaml", MONITORING / "compose.yaml"]
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files)


def test_compose_gives_each_server_its_card_and_port() -> None:
    for number, name in enumerate(("sglang-0", "sglang-1")):
        service = compose()[name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [str(number)]
        assert f" --port {service['environment']['PORT']} " in service["command"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_takes_its_units(path: Path, tmp_path: Path) -> None:
    """SGLang and its gateway need not be installed for it."""
    for program in ("sglang", "smg"):
        (tmp_path / program).symlink_to("/bin/true")
    for unit in UNITS:
        text = re.sub(r"/opt/(sglang|smg)/bin/", f"{tmp_path}/", unit.read_text())
        (tmp_path / unit.name).write_text(text)
    assert run("systemd-analyze", "verify", tmp_path / path.name) == ""


def test_every_server_has_the_plugin_and_metrics() -> None:
    assert len(servers()) == 4
    for flags in servers().values():
        assert {"--radix-cache-backend", "--enable-metrics"} <= set(flags)


def test_images_are_made_by_the_dockerfile() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", (FOLDER.parents[1] / "Dockerfile").read_text(), re.MULTILINE))
    built = {service["build"]["target"] for service in compose().values() if "build" in service}
    assert built == {"server", "gateway"} <= stages
    used = {service["image"] for service in compose().values() if "build" in service}
    names = {one["name"] for one in yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["images"]}
    assert used == names


def test_the_page_names_every_file() -> None:
    page = (FOLDER.parent / "DEPLOY.md").read_text()
    unnamed = {path.name for path in FOLDER.iterdir() if f"deploy/{path.name}" not in page}
    assert unnamed == {"targets.compose.yaml"}
