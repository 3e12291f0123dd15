"""Three brokers on loopback, each controller too, with three listeners: plain, behind toxiproxy, and SASL/PLAIN over TLS."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.errors import KafkaError
from aiokafka.protocol.admin import AlterConfigsRequest

from tests.support import provision
from tests.support.toxiproxy import Wire, toxiproxy

BROKERS: Final = 3
USER: Final = "stitch"
PASSWORD: Final = "correct horse battery"
"""With blanks, since passwords have them."""
FORMAT_TIMEOUT_S: Final = 90.0
OPENSSL_TIMEOUT_S: Final = 30.0
FORGETTING_S: Final = 2.5
"""They forget after 1 s then, and look twice a second; nothing tells from outside that they did."""
STOP_GRACE_S: Final = 2.0
"""A broker that lost its quorum does not end by itself."""
START_TIMEOUT_S: Final = 120.0
"""For three brokers that start together on a busy machine; ten seconds on an idle one."""

# Failover within seconds: the defaults wait three times as long. `replica.lag.time.max.ms` is when a silent follower leaves the
# in-sync set.
_PROPERTIES: Final = """process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners=PLAIN://127.0.0.1:{plain},PROXIED://127.0.0.1:{behind},SECURE://127.0.0.1:{secure},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAIN://127.0.0.1:{plain},PROXIED://127.0.0.1:{proxied},SECURE://127.0.0.1:{secure}
listener.security.protocol.map=PLAIN:PLAINTEXT,PROXIED:PLAINTEXT,SECURE:SASL_SSL,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAIN
controller.listener.names=CONTROLLER
sasl.enabled.mechanisms=PLAIN
listener.name.secure.plain.sasl.jaas.config={login}
listener.name.secure.ssl.keystore.type=PEM
listener.name.secure.ssl.keystore.location={keystore}
log.dirs={data}
auto.create.topics.enable=false
default.replication.factor=2
broker.session.timeout.ms=4000
broker.heartbeat.interval.ms=500
replica.lag.time.max.ms=4000
producer.id.expiration.check.interval.ms=500
log.cleaner.dedupe.buffer.size=4194304
num.network.threads=2
num.io.threads=2
"""


@dataclass(slots=True, kw_only=True)
class Broker:
    """`running` is None while it is down."""

    node: int
    plain: int
    proxied: int
    secure: int
    behind: int
    controller: int
    folder: Path
    running: provision.Running | None = None

    @property
    def config(self) -> Path:
        return self.folder / "server.properties"


class KafkaCluster:
    """Its brokers may be killed, started again, paused and resumed. `wire` is what is between clients and the proxied listener."""

    def __init__(self, brokers: Sequence[Broker], java: Sequence[str], certificate: Path, wire: Wire) -> None:
        self.brokers, self.certificate, self.wire = brokers, certificate, wire
        self._java = java

    @property
    def servers(self) -> str:
        return ",".join(f"127.0.0.1:{broker.plain}" for broker in self.brokers)

    @property
    def proxied(self) -> str:
        return ",".join(f"127.0.0.1:{broker.proxied}" for broker in self.brokers)

    @property
    def secure(self) -> str:
        return ",".join(f"127.0.0.1:{broker.secure}" for broker in self.brokers)

    def launch(self, *brokers: Broker) -> None:
        for broker in brokers:
            broker.running = provision.start(
                [*self._java, "kafka.Kafka", broker.config],
                output=broker.folder / "kafka.log",
                name=f"kafka {broker.node}",
                cwd=broker.folder,
            )

    async def start(self, *brokers: Broker) -> None:
        """Starts those that are down, and returns once they serve."""
        self.launch(*brokers)
        for broker in brokers:
            await provision.eventually(partial(_serves, broker), f"broker {broker.node} serves", timeout=START_TIMEOUT_S)

    def wait(self) -> None:
        """As `start` does, for those that were launched."""
        for broker in self.brokers:
            provision.wait_until(partial(_serves, broker), f"broker {broker.node} serves", timeout=START_TIMEOUT_S)

    def kill(self, *brokers: Broker) -> None:
        for broker in brokers:
            if broker.running is not None:
                broker.running.kill()
                broker.running = None

    def pause(self, *brokers: Broker) -> None:
        """They stand still, and keep their connections."""
        for broker in brokers:
            assert broker.running is not None
            broker.running.pause()

    def resume(self, *brokers: Broker) -> None:
        for broker in brokers:
            assert broker.running is not None
            broker.running.resume()

    def heal(self) -> None:
        """Everything runs, the wire is whole, and no broker is left out where topics are made."""
        self.wire.mend()
        for broker in self.brokers:
            if broker.running is not None:
                broker.running.resume()
        self.launch(*(broker for broker in self.brokers if broker.running is None))
        self.wait()
        with ThreadPoolExecutor(1) as pool:  # whoever calls may be within an event loop
            provision.wait_until(
                lambda: pool.submit(asyncio.run, self.counted()).result() == len(self.brokers),
                "every broker counts again",
                timeout=START_TIMEOUT_S,
            )

    async def counted(self) -> int:
        """How many brokers count, which one that stood still does after its next heartbeat; 0 where one that is down was asked."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self.servers.split(","))
        await admin.start()
        try:
            return len((await admin.describe_cluster())["brokers"])
        except KafkaError:
            return 0
        finally:
            await admin.close()

    async def leader(self, topic: str) -> Broker:
        """Of the topic's one partition."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                found = await self._leader_and_isr(topic)
                if found is not None:
                    return found[0]
                await asyncio.sleep(provision.POLL_S)

    async def forget_producers(self) -> None:
        """Has the brokers forget all that are idle, as they do after a day.

        Not by a setting for good: a producer that is forgotten between two tries of one batch, as a failover may last longer, has
        its second try taken for a new batch.
        """
        await self._set_for_all({"producer.id.expiration.ms": "1000"})
        await asyncio.sleep(FORGETTING_S)
        await self._set_for_all({})

    async def _set_for_all(self, settings: dict[str, str]) -> None:
        """Of all brokers, in place of what was set for all before."""
        entries = list({"min.insync.replicas": "1", **settings}.items())  # Kafka 4 refuses to be without that one
        admin = AIOKafkaAdminClient(bootstrap_servers=self.servers.split(","))
        await admin.start()
        try:
            # Not by `alter_configs`, which knows no name for all brokers together.
            request = AlterConfigsRequest([(ConfigResourceType.BROKER, "", entries)])
            response = await admin._send_request(request)
            for code, text, *_ in response.resources:
                assert code == 0, f"brokers refused {settings}: {text}"
        finally:
            await admin.close()

    async def in_sync(self, topic: str) -> None:
        """Returns once all brokers are in sync for the topic."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                found = await self._leader_and_isr(topic)
                if found is not None and len(found[1]) == len(self.brokers):
                    return
                await asyncio.sleep(0.1)

    async def _leader_and_isr(self, topic: str) -> tuple[Broker, list[int]] | None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.servers.split(","))
        await admin.start()
        try:
            for entry in await admin.describe_topics([topic]):
                for partition in entry["partitions"]:
                    for broker in self.brokers:
                        if broker.node == partition["leader"]:
                            return broker, partition["isr"]
            return None
        finally:
            await admin.close()


def _serves(broker: Broker) -> bool:
    """Its listener opens once the controller lets it serve."""
    assert broker.running is not None
    assert broker.running.alive(), f"{broker.running.name} ended:\n{broker.running.tail()}"
    return provision.port_answers(broker.plain)


@contextlib.contextmanager
def three_brokers(jars: Path, java: str) -> Iterator[KafkaCluster]:
    """Raises toxiproxy.CannotProvide."""
    with tempfile.TemporaryDirectory(prefix="stitch-kafka-") as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        brokers = _plan(folder)
        keystore, certificate = _certificates(folder)
        small = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
        command = [java, *small, "-cp", f"{jars}/*"]
        _format(brokers, command, keystore)
        wire = stack.enter_context(toxiproxy(folder, {broker.proxied: broker.behind for broker in brokers}))
        cluster = KafkaCluster(brokers, command, certificate, wire)
        try:
            cluster.launch(*brokers)
            cluster.wait()
            yield cluster
        finally:
            for broker in brokers:
                if broker.running is not None:
                    broker.running.stop(grace=STOP_GRACE_S)


def _plan(folder: Path) -> list[Broker]:
    ports = provision.free_ports(5 * BROKERS)
    brokers = []
    for node in range(1, BROKERS + 1):
        own = folder / f"broker-{node}"
        own.mkdir()
        plain, proxied, secure, behind, controller = ports[5 * (node - 1) : 5 * node]
        brokers.append(
            Broker(
                node=node,
                plain=plain,
                proxied=proxied,
                secure=secure,
                behind=behind,
                controller=controller,
                folder=own,
            )
        )
    return brokers


def _certificates(folder: Path) -> tuple[Path, Path]:
    """The brokers' key with its certificate, and the certificate alone, which is its own authority."""
    key, certificate, keystore = folder / "key.pem", folder / "ca.pem", folder / "keystore.pem"
    openssl = shutil.which("openssl")
    assert openssl is not None, "no openssl to make certificates with"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", certificate, *name],
        check=True,
        capture_output=True,
        timeout=OPENSSL_TIMEOUT_S,
    )
    keystore.write_bytes(key.read_bytes() + certificate.read_bytes())
    return keystore, certificate


def _format(brokers: Sequence[Broker], java: Sequence[str], keystore: Path) -> None:
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    voters = ",".join(f"{broker.node}@127.0.0.1:{broker.controller}" for broker in brokers)
    running = []
    for broker in brokers:
        broker.config.write_text(
            _PROPERTIES.format(
                node=broker.node,
                voters=voters,
                plain=broker.plain,
                proxied=broker.proxied,
                secure=broker.secure,
                behind=broker.behind,
                controller=broker.controller,
                login=f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}="{PASSWORD}";',
                keystore=keystore,
                data=broker.folder / "data",
            )
        )
        words: list[str | Path] = [*java, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "-c", broker.config]
        running.append(provision.start(words, output=broker.folder / "format.log", name="format"))
    for each in running:
        code = each.process.wait(FORMAT_TIMEOUT_S)
        each.stop()
        assert code == 0, f"formatting Kafka's storage failed: {each.tail()}"
