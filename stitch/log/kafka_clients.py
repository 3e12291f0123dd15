"""Clients of Kafka of which no connection is left open, wherever what they do is cut short.

aiokafka loses a connection whose making is cancelled, and makes new ones for those who still ask a client that was closed. So
connections are made in tasks of their own here, which nobody cancels, and none any more once a client is to be closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.client import ConnectionGroup
from aiokafka.conn import CloseReason
from aiokafka.errors import KafkaConnectionError, KafkaError

from stitch.log.kafka_settings import KafkaSettings

REQUEST_TIMEOUT_MS: Final = 10_000
"""For one request to a broker; aiokafka then connects anew and asks again."""
FETCH_WAIT_MS: Final = 500
"""How long a broker holds a fetch that finds nothing."""
STOP_TIMEOUT_S: Final = 5.0
"""For a client to end in order: to deliver, to close its connections."""
CONNECTING_S: Final = 2.0
"""For a client that is to end to have made the connections that it is making. Where no broker answers there are none to lose."""

T = TypeVar("T")
_logger = logging.getLogger(__name__)


class Connecting:
    """Makes the connections of an aiokafka client, in its place."""

    def __init__(self, client: Any) -> None:
        """`client`: an AIOKafkaClient that was not started."""
        self._conns = client._conns
        self._get_conn, self._bootstrap = client._get_conn, client.bootstrap
        self._making: set[asyncio.Task[Any]] = set()
        self._closed = False
        client._get_conn, client.bootstrap = self.get_conn, self.bootstrap

    async def get_conn(self, node_id: object, *, group: int = ConnectionGroup.DEFAULT, no_hint: bool = False) -> Any:
        """As AIOKafkaClient._get_conn: None where there is none to be had."""
        ready = self._conns.get((node_id, group))
        if ready is not None and ready.connected():
            return ready
        if self._closed:
            return None
        conn = await self._made(self._get_conn(node_id, group=group, no_hint=no_hint))
        if conn is not None:
            _guard(conn)
        return conn

    async def bootstrap(self) -> None:
        """As AIOKafkaClient.bootstrap."""
        with _as_kafka_s():
            await self._made(self._bootstrap())

    async def close(self) -> None:
        """From now on none are made. Returns once those that were being made are known to the client, which may be closed then."""
        self._closed = True
        if self._making:
            await asyncio.wait(self._making, timeout=CONNECTING_S)
        for making in tuple(self._making):
            making.cancel()
            await asyncio.wait([making])

    async def _made(self, making: Coroutine[Any, Any, T]) -> T:
        task = asyncio.get_running_loop().create_task(making)
        self._making.add(task)
        task.add_done_callback(self._making.discard)
        return await asyncio.shield(task)


def _guard(conn: Any) -> None:
    """Has the connection raise KafkaConnectionError also where uvloop closed it a moment before aiokafka notices."""
    send = conn.send

    def guarded(request: Any, expect_response: bool = True) -> Any:
        try:
            with _as_kafka_s():
                return send(request, expect_response)
        except KafkaConnectionError:
            conn.close(reason=CloseReason.CONNECTION_BROKEN)
            raise

    conn.send = guarded


@contextlib.contextmanager
def _as_kafka_s() -> Iterator[None]:
    """uvloop's word for a transport that is closed is a RuntimeError of no kind, of which KafkaError is one."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, KafkaError):
            raise
        raise KafkaConnectionError(str(error)) from error


class Discarded:
    """Clients that nobody uses any more, each with the task that ends it."""

    def __init__(self) -> None:
        self._ending: set[asyncio.Task[None]] = set()

    def add(self, ending: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(ending, name=name)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def ended(self) -> None:
        """Returns once all have ended that were added."""
        if self._ending:
            await asyncio.wait(self._ending)


class Consumer:
    """A consumer that is started when first needed, and again after it was discarded. Of one event loop."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._consumer: Any = None
        self._connecting: Connecting | None = None
        self._starting = asyncio.Lock()
        self._asking: dict[asyncio.Task[Any], Any] = {}
        """Questions under way, and the consumer that each was put to."""
        self._discarded = Discarded()
        self._closed = False

    async def started(self, partition: TopicPartition | None = None, position: int = 0) -> tuple[Any, bool]:
        """The consumer, and whether it is new; a new one is set to fetch the partition from `position`. Raises KafkaError."""
        async with self._starting:
            fresh = self._consumer is None
            if self._closed:
                raise KafkaError("closed")
            if fresh:
                consumer = AIOKafkaConsumer(
                    **self._settings.client_options(),
                    group_id=None,
                    enable_auto_commit=False,
                    auto_offset_reset="none",
                    isolation_level="read_uncommitted",
                    fetch_max_wait_ms=FETCH_WAIT_MS,
                    request_timeout_ms=REQUEST_TIMEOUT_MS,
                )
                connecting = Connecting(consumer._client)
                try:
                    await consumer.start()
                    if partition is not None:
                        consumer.assign([partition])
                        consumer.seek(partition, position)
                except BaseException:
                    self._retire(consumer, connecting)
                    raise
                self._consumer, self._connecting = consumer, connecting
            return self._consumer, fresh

    async def ask(self, question: Callable[[Any], Awaitable[T]]) -> T:
        """What the question says of the consumer, which others may ask, and discard, meanwhile. The caller bounds its time.

        Raises KafkaError, also where it is closed before there is an answer.
        """
        consumer, _ = await self.started()
        asking = asyncio.get_running_loop().create_task(_put(question, consumer))
        self._asking[asking] = consumer
        try:
            return await asking
        except asyncio.CancelledError:
            if self._closed and not _cancelled_itself():
                raise KafkaError("closed") from None
            raise
        finally:
            del self._asking[asking]

    def discard(self) -> None:
        if self._connecting is not None:
            self._retire(self._consumer, self._connecting)
            self._consumer = self._connecting = None

    async def close(self) -> None:
        self._closed = True
        for asking in self._asking:
            asking.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S), self._starting:
                self.discard()
        await self._discarded.ended()

    def _retire(self, consumer: Any, connecting: Connecting) -> None:
        self._discarded.add(self._stop(consumer, connecting), "stop a consumer of Kafka")

    async def _stop(self, consumer: Any, connecting: Connecting) -> None:
        if asking := {task for task, asked in self._asking.items() if asked is consumer}:
            await asyncio.wait(asking)
        await connecting.close()
        stopping = asyncio.ensure_future(consumer.stop())
        await asyncio.wait({stopping}, timeout=STOP_TIMEOUT_S)
        stopping.cancel()
        # Whatever became of that: a stop ends early where a fetch of its own was cancelled while it waited to try again.
        await consumer._client.close()
        await asyncio.wait({stopping}, timeout=STOP_TIMEOUT_S)
        if stopping.done() and not stopping.cancelled() and (error := stopping.exception()) is not None:
            _logger.debug("a discarded consumer of Kafka ended with %r", error)


async def _put(question: Callable[[Any], Awaitable[T]], consumer: Any) -> T:
    return await question(consumer)


def _cancelled_itself() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
