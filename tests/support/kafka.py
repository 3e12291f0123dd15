"""A real Apache Kafka for tests: one given by STITCH_TEST_KAFKA, else in a container, else installed with Maven."""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib
import importlib.util
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Final

import pytest
from aiokafka.conn import AIOKafkaConnection

from tests.support import provision, toxiproxy
from tests.support.kafka_cluster import KafkaCluster, three_brokers

VERSION: Final = "4.3.1"
IMAGE: Final = f"apache/kafka:{VERSION}"
MAVEN_TIMEOUT_S: Final = 300.0
FORMAT_TIMEOUT_S: Final = 60.0
DOCKER_TIMEOUT_S: Final = 5.0

_POM: Final = f"""<project><modelVersion>4.0.0</modelVersion>
<groupId>stitch.test</groupId><artifactId>kafka</artifactId><version>1</version><packaging>pom</packaging>
<dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version></dependency>
<dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
</dependencies></project>
"""

_PROPERTIES: Final = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{broker}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={data}
num.partitions=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=3
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=3
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
log.cleaner.backoff.ms=500
"""


class CannotProvide(Exception):
    """No Kafka here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kafka:
    """`servers`: host:port of the bootstrap brokers. `broker`: its process, where this run started it itself."""

    servers: str
    broker: provision.Running | None = None


def _install(folder: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None or shutil.which("java") is None:
        raise CannotProvide("neither STITCH_TEST_KAFKA nor Docker, and no mvn and java to install it with")
    (folder / "pom.xml").write_text(_POM)
    goal = ["dependency:copy-dependencies", "-DoutputDirectory=libs", "-DincludeScope=runtime"]
    try:
        done = subprocess.run(
            [maven, "-q", "-B", *goal], cwd=folder, capture_output=True, text=True, timeout=MAVEN_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise CannotProvide(f"mvn did not finish within {MAVEN_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise CannotProvide(f"mvn failed: {(done.stdout + done.stderr)[-1000:]}")


def _local() -> tuple[Path, str]:
    """The folder of Kafka's jars, and java. Raises CannotProvide."""
    java = shutil.which("java")
    if java is None:
        raise CannotProvide("no java")
    return provision.install_once(f"kafka-{VERSION}", _install) / "libs", java


@contextlib.contextmanager
def local_broker() -> Iterator[Kafka]:
    """A broker of this run's own, on loopback. It may be paused; other tests' brokers are not touched by that."""
    jars, java = _local()
    with tempfile.TemporaryDirectory(prefix="stitch-kafka-") as scratch:
        folder = Path(scratch)
        broker_port, controller_port = provision.free_ports(2)
        config = folder / "server.properties"
        config.write_text(_PROPERTIES.format(broker=broker_port, controller=controller_port, data=folder / "data"))
        classes = ["-cp", f"{jars}/*"]
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        formatted = subprocess.run(
            [java, *classes, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "-c", config],
            capture_output=True,
            text=True,
            timeout=FORMAT_TIMEOUT_S,
            check=False,
        )
        if formatted.returncode != 0:
            raise AssertionError(f"formatting Kafka's storage failed: {(formatted.stdout + formatted.stderr)[-1000:]}")
        small = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
        running = provision.start(
            [java, *small, *classes, "kafka.Kafka", config], output=folder / "kafka.log", name="kafka", cwd=folder
        )
        try:
            # The listener opens once the broker is registered with the controller and may serve.
            provision.wait_until(lambda: provision.port_answers(broker_port), "Kafka listens", process=running)
            yield Kafka(servers=f"127.0.0.1:{broker_port}", broker=running)
        finally:
            running.stop()


def _docker_answers() -> bool:
    docker = shutil.which("docker")
    if docker is None or importlib.util.find_spec("testcontainers") is None:
        return False
    try:
        asked = subprocess.run([docker, "info"], capture_output=True, timeout=DOCKER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


@contextlib.contextmanager
def _container() -> Iterator[Kafka]:
    containers = importlib.import_module("testcontainers.kafka")
    with containers.KafkaContainer(IMAGE).with_kraft() as container:
        yield Kafka(servers=container.get_bootstrap_server())


@contextlib.contextmanager
def provide() -> Iterator[Kafka]:
    """Raises CannotProvide."""
    given = environ.get("STITCH_TEST_KAFKA")
    if given:
        yield Kafka(servers=given)
        return
    with _container() if _docker_answers() else local_broker() as kafka:
        yield kafka


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[Kafka]:
    """The session's Kafka, shared by all tests. Skips, or fails where STITCH_REQUIRE says so."""
    with contextlib.ExitStack() as stack:
        try:
            kafka = stack.enter_context(provide())
        except CannotProvide as why:
            provision.unavailable("kafka", str(why))
        yield kafka


@contextlib.contextmanager
def local_cluster() -> Iterator[KafkaCluster]:
    """Three brokers of this run's own, for tests that kill them, stop them, and disturb the wire. Skips, or fails where
    STITCH_REQUIRE says so."""
    with contextlib.ExitStack() as stack:
        try:
            jars, java = _local()
            cluster = stack.enter_context(three_brokers(jars, java))
        except (CannotProvide, toxiproxy.CannotProvide) as why:
            provision.unavailable("kafka", str(why))
        yield cluster


@pytest.fixture(scope="session")
def kafka_url(kafka_server: Kafka) -> str:
    """The bootstrap servers, host:port."""
    return kafka_server.servers


@pytest.fixture
def kafka_log_url(kafka_url: str) -> str:
    """URL of a namespace that nothing has used yet; its topics are still to be made."""
    return fresh_namespace(kafka_url)


def fresh_namespace(servers: str) -> str:
    return f"kafka://{servers}/t{uuid.uuid4().hex[:12]}"


def connected() -> list[AIOKafkaConnection]:
    """The connections to Kafka that this process has, whoever holds them."""
    return [found for found in gc.get_objects() if isinstance(found, AIOKafkaConnection) and found.connected()]
