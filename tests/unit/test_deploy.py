"""The files of `sglang_pic/deploy` are what compose, Kubernetes, systemd and HAProxy take, and start what exists.

Tools that are not installed are skipped; `make deploy` installs those of PyPI.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sglang_pic.cli import main
from tests.unit.deploy_files import FOLDER, UNITS, commands, compose, kubernetes, servers

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
    for key in {"salt", *re.findall(r"secretKeyRef:\n\s+key: (\S+)", text)}:
        assert f"--from-literal={key}=" in page
    assert set(re.findall(r"claimName: (\S+)", text)) == {"model"}


def test_names_of_servers_are_those_of_their_set() -> None:
    (stateful,) = (each for each in kubernetes() if each["kind"] == "StatefulSet")
    numbers = range(stateful["spec"]["replicas"])
    hosts = [f"sglang-{number}.sglang.sglang-pic.svc.cluster.local" for number in numbers]
    wanted = [f"--server=http://{host}:30000=tcp://{host}:5570" for host in hosts]
    for name in ("sidecar", "haproxy"):
        assert [word for word in commands()[f"kubernetes {name}"][0] if word.startswith("--server")] == wanted
    assert targets("kubernetes") == [f"{host}:30000" for host in hosts]


def targets(name: str) -> list[str]:
    """The servers that Prometheus asks."""
    return list(yaml.safe_load((FOLDER / f"targets.{name}.yaml").read_text())[0]["targets"])


def test_compose_takes_its_files() -> None:
    pytest.importorskip("check_jsonschema", reason="make deploy installs it")
    files = [FOLDER / "compose.yaml", MONITORING / "compose.yaml"]
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files)


def test_compose_gives_each_server_its_card_and_ports() -> None:
    wanted = []
    for number, name in enumerate(("sglang-0", "sglang-1")):
        service = compose()[name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [str(number)]
        port, events = service["environment"]["PORT"], json.loads(service["environment"]["SGLANG_PIC_CONFIG"])
        assert f" --port {port} " in service["command"]
        wanted.append(f"--server http://127.0.0.1:{port}={events['content_events']['endpoint']}")
    for name in ("router", "haproxy"):
        assert re.findall(r"--server \S+", compose()[name]["command"]) == wanted
    assert [f"--server http://{target}" for target in targets("compose")] == [each.partition("=")[0] for each in wanted]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_takes_its_units(path: Path, tmp_path: Path) -> None:
    """Programs of the package and HAProxy need not be installed for it."""
    for program in ("sglang", "sglang-pic", "haproxy"):
        (tmp_path / program).symlink_to("/bin/true")
    for unit in UNITS:
        text = re.sub(r"(/opt/sglang/bin|/usr/sbin)/", f"{tmp_path}/", unit.read_text())
        (tmp_path / unit.name).write_text(text)
    assert run("systemd-analyze", "verify", tmp_path / path.name) == ""


def test_the_router_takes_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_pic.route.run_route.run", lambda _: 0)
    ran = [words for words, _ in commands().values() if words[:2] == ["sglang-pic", "route"]]
    assert len(ran) == 3
    for words in ran:
        assert main(words[1:]) == 0


@pytest.mark.parametrize("place", [each for each, (words, _) in commands().items() if "--haproxy" in " ".join(words)])
def test_haproxy_takes_its_configuration(place: str, tmp_path: Path) -> None:
    """Also where a server's name leads nowhere yet."""
    if shutil.which("haproxy") is None:
        pytest.skip("needs haproxy: apt-get install haproxy")
    words, variables = commands()[place]
    path = tmp_path / "haproxy.cfg"
    script, number = re.subn(r"/\S+/haproxy.cfg", str(path), words[2])
    assert number
    script = f"{script.partition(' && ')[0]} && haproxy -c -f {path}"
    run(*words[:2], script, *words[3:], **variables, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert path.read_text().count("    server ") == 2


def test_every_server_has_the_plugin_and_metrics() -> None:
    assert len(servers()) == 4
    for flags, config in servers().values():
        assert {"--radix-cache-backend", "--enable-metrics"} <= set(flags)
        assert "salt_file" in config


def test_images_are_made_by_the_dockerfile() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", (FOLDER.parents[1] / "Dockerfile").read_text(), re.MULTILINE))
    built = {service["build"]["target"] for service in compose().values() if "build" in service}
    assert built == {"server", "router"} <= stages
    used = {service["image"] for service in compose().values() if "build" in service}
    names = {one["name"] for one in yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["images"]}
    assert used == names


def test_the_page_names_every_file() -> None:
    page = (FOLDER.parent / "DEPLOY.md").read_text()
    unnamed = {path.name for path in FOLDER.iterdir() if f"deploy/{path.name}" not in page}
    assert unnamed == {"targets.compose.yaml"}
