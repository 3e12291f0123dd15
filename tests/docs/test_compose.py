"""The compose files are sound as far as that shows without Docker: they parse, hang together, and call the command as it is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from stitch.cli.main import cli
from stitch.log.opening import open_log
from stitch.store.opening import open_store
from tests.support.cluster import stitch
from tests.trainer.places import Place

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[2] / "compose"
FILES = sorted(FOLDER.glob("*.yaml"))


def _services(file: Path) -> dict[str, dict[str, Any]]:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(content["services"], dict)
    return dict(content["services"])


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_every_service_has_what_it_needs(file: Path) -> None:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    services = _services(file)
    for name, service in services.items():
        assert re.search(r":[\w.-]+\Z", service["image"]), f"{name}: its image has no tag"
        assert not service["image"].endswith(":latest"), f"{name}: which release it is must not change by itself"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name}: listens to the world"
        for other, condition in service.get("depends_on", {}).items():
            needs = condition["condition"]
            assert other in services, f"{name} depends on {other}, which is not there"
            assert needs != "service_healthy" or "healthcheck" in services[other], f"{name} waits for a health that nobody checks"
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in content["volumes"]
        if "build" in service:
            build = service["build"]
            assert (file.parent / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_kafka_loses_nothing_by_its_settings(file: Path) -> None:
    settings = _services(file)["kafka"]["environment"]
    assert settings["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
    assert settings["KAFKA_PROCESS_ROLES"] == "broker,controller"
    assert _services(file)["kafka"]["volumes"] == ["kafka:/var/lib/kafka/data"], "the log must outlive its container"
    listeners = {each.split(":")[0] for each in settings["KAFKA_LISTENERS"].split(",")}
    advertised = {each.split(":")[0] for each in settings["KAFKA_ADVERTISED_LISTENERS"].split(",")}
    mapped = {each.split(":")[0] for each in settings["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")}
    assert listeners == mapped
    assert advertised == listeners - {"CONTROLLER"}


async def test_log_and_store_are_urls_that_stitch_knows() -> None:
    services = _services(FOLDER / "stitch.yaml")
    ours = [service for service in services.values() if service["image"] == "stitch:local"]
    assert len(ours) == 5
    for service in ours:
        assert service["environment"] == ours[0]["environment"]
    places = ours[0]["environment"]
    async with open_log(places["STITCH_LOG"]) as log:
        assert log.url == "kafka://kafka:29092/stitch"
    with open_store(places["STITCH_STORE"]) as store:
        assert store.url.startswith("s3://stitch/models")
    assert services["s3"]["environment"] == {
        "ROOT_ACCESS_KEY": places["AWS_ACCESS_KEY_ID"],
        "ROOT_SECRET_KEY": places["AWS_SECRET_ACCESS_KEY"],
    }


def _calls() -> list[list[str]]:
    """The `stitch` commands of the file, without what a shell fills in."""
    calls = []
    for service in _services(FOLDER / "stitch.yaml").values():
        if service["image"] != "stitch:local":
            continue
        if "entrypoint" not in service:
            calls.append(service["command"])
            continue
        (script,) = service["command"]
        for part in re.split(r"&&|[;|]", script.replace("$$(", "$(").replace("| cut -d' ' -f1", "")):
            words = shlex.split(part)
            if "stitch" in words:
                calls.append(words[words.index("stitch") + 1 :])
    assert len(calls) == 7
    return calls


@pytest.mark.parametrize("call", _calls(), ids=lambda call: " ".join(call[:3]))
def test_the_commands_exist_with_the_options_that_are_given(call: list[str]) -> None:
    """Asked for help, click checks neither; so each option is looked up in the help of its command."""
    words = [word for word in call if not word.startswith("-")]
    command = words[:2] if words[0] in ("engine", "topics") else words[:1]
    told = CliRunner().invoke(cli, [*command, "--help"])
    assert told.exit_code == 0, told.output
    for option in (word for word in call if word.startswith("--")):
        assert f"{option} " in told.output, f"stitch {' '.join(command)} has no {option}"


@pytest.mark.integration
def test_the_first_version_is_made_once(tmp_path: Path) -> None:
    """Each `up` runs the script again, in the container's old folder, and must not take the policy from whoever owns it."""
    (script,) = _services(FOLDER / "stitch.yaml")["first-version"]["command"]
    place = Place.on_disk(tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "STITCH_LOG": place.log_url, "STITCH_STORE": place.store_url, "STITCH_POLICY": "p"}
    stitch("topics", "create", "--log", place.log_url)
    for _ in range(2):
        subprocess.run(["/bin/sh", "-ec", script], cwd=tmp_path, env=env, check=True, timeout=120)
        assert place.policy().epoch == 1
        assert place.numbers() == [0]
