"""Appending to Kafka: one idempotent producer, thrown away after any failure.

An idempotent producer never gives up on a batch, so each wait for it has a bound of ours. What is certain is told from what is
not by where the wait ended: before the record was handed to the producer it cannot land; after that only a refusal by the
broker is definite.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import (
    AuthenticationFailedError,
    AuthenticationMethodNotSupported,
    ClusterAuthorizationFailedError,
    InvalidTimestampError,
    InvalidTopicError,
    KafkaError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    ProducerClosed,
    RecordListTooLargeError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    UnsupportedSaslMechanismError,
)

from stitch.core.errors import InvalidRequest, OutcomeUnknown, Unavailable
from stitch.log.kafka_clients import REQUEST_TIMEOUT_MS, STOP_TIMEOUT_S, Connecting, Discarded
from stitch.log.kafka_settings import KafkaSettings
from stitch.log.port import Draft

FORCED_STOP_S: Final = 1.0
"""For its tasks to end once its connections were cut."""
MAX_REQUEST_BYTES: Final = 1_048_576
"""The default of Kafka for one record with its framing; keeping.MAX_RECORD_BYTES stays below it."""

REFUSALS: Final = (
    AuthenticationFailedError,
    AuthenticationMethodNotSupported,
    ClusterAuthorizationFailedError,
    InvalidTimestampError,
    InvalidTopicError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    UnsupportedSaslMechanismError,
)
"""Answers that a retry cannot change, and after which nothing lands."""

_logger = logging.getLogger(__name__)


def describe(error: BaseException) -> str:
    """Kafka's errors often have a name and no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Appender:
    """Safe for concurrent use from one event loop."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._producer: Any = None
        self._connecting: Connecting | None = None
        self._starting = asyncio.Lock()
        self._discarded = Discarded()
        self._closed = False

    async def append(self, topic: str, draft: Draft, timeout: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        producer, sent, tries = await self._hand_over(topic, draft, deadline, timeout)
        # Nobody else may look at it, and an unread exception would be logged as lost.
        sent.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([sent], timeout=deadline - asyncio.get_running_loop().time())
        if not sent.done():
            self._discard(producer)
            raise OutcomeUnknown(f"{self._settings.url}: the append was not confirmed within {timeout:g} s")
        error = sent.exception()
        if isinstance(error, REFUSALS) and tries() <= 1:
            raise InvalidRequest(f"{self._settings.url}: refused: {describe(error)}", field="record") from error
        # A refusal of a later try says nothing of the tries before, whose answers were lost.
        if error is not None:
            self._discard(producer)
            raise OutcomeUnknown(f"{self._settings.url}: {describe(error)}") from error

    async def close(self) -> None:
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S), self._starting:
                self._discard(self._producer)
        await self._discarded.ended()

    async def _hand_over(
        self, topic: str, draft: Draft, deadline: float, timeout: float
    ) -> tuple[Any, asyncio.Future[Any], Callable[[], int]]:
        """The producer that took the record, its future, and how often it was sent; where this raises, none took it."""
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    producer = await self._started()
                    try:
                        sent: asyncio.Future[Any] = await producer.send(
                            topic, value=draft.value, key=draft.key.encode(), headers=list(draft.headers)
                        )
                    except ProducerClosed:
                        self._discard(producer)  # another append did, meanwhile
                    else:
                        return producer, sent, _tries(producer, topic)
        except TimeoutError:
            hint = "" if self._producer is None or topic in self._producer.client.cluster.topics() else self._no_topic(topic)
            self._discard(self._producer)
            hint = hint or self._settings.hint
            raise Unavailable(f"{self._settings.url}: not reached within {timeout:g} s; nothing was appended{hint}") from None
        except UnknownTopicOrPartitionError:
            raise Unavailable(f"{self._settings.url}: nothing was appended{self._no_topic(topic)}") from None
        except REFUSALS as error:
            raise InvalidRequest(f"{self._settings.url}: refused: {describe(error)}", field="record") from error
        except KafkaError as error:
            self._discard(self._producer)
            raise Unavailable(f"{self._settings.url}: {describe(error)}; nothing was appended{self._settings.hint}") from error

    def _no_topic(self, topic: str) -> str:
        return f"; there seems to be no topic {topic}, which is made with: stitch topics create --log {self._settings.url}"

    async def _started(self) -> Any:
        async with self._starting:
            if self._closed:
                raise KafkaError("closed")
            if self._producer is None:
                producer = AIOKafkaProducer(
                    **self._settings.client_options(),
                    acks="all",
                    enable_idempotence=True,
                    request_timeout_ms=REQUEST_TIMEOUT_MS,
                    max_request_size=MAX_REQUEST_BYTES,
                )
                connecting = Connecting(producer.client)
                try:
                    await producer.start()
                except BaseException:
                    self._retire(producer, connecting)
                    raise
                self._producer, self._connecting = producer, connecting
            return self._producer

    def _discard(self, producer: Any) -> None:
        """No more appends go to it; those that it holds have a moment to be delivered."""
        if self._connecting is not None and producer is self._producer:
            self._retire(producer, self._connecting)
            self._producer = self._connecting = None

    def _retire(self, producer: Any, connecting: Connecting) -> None:
        self._discarded.add(_stop(producer, connecting), "stop a producer of Kafka")


def _tries(producer: Any, topic: str) -> Callable[[], int]:
    """How often the batch was sent that the last record of the topic is in. To be called right after the record was handed over."""
    batches = producer._message_accumulator._batches.get(TopicPartition(topic, 0))
    batch = batches[-1] if batches else None
    return lambda: 2 if batch is None else batch.retry_count  # not found: as if it had been sent before


async def _stop(producer: Any, connecting: Connecting) -> None:
    """Ends a producer within STOP_TIMEOUT_S + CONNECTING_S + 2 FORCED_STOP_S, whatever the brokers do.

    The producer's own `stop` waits for deliveries without a bound and leaves a task behind where it is cut short, so its steps
    are taken here. Appends that were not delivered run into their own time-outs.
    """
    producer._closed = True
    flushing = asyncio.ensure_future(producer._message_accumulator.close())
    sender = producer._sender.sender_task
    tasks = {flushing} if sender is None else {flushing, sender}
    await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await connecting.close()
    await producer.client.close()  # cuts the request under way, for which a cancelled sender waits
    _, stuck = await asyncio.wait(tasks, timeout=FORCED_STOP_S)
    for task in stuck:
        task.cancel()  # this time it reaches the request itself
    await asyncio.wait(tasks, timeout=FORCED_STOP_S)
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            # Its appends have been told already.
            _logger.debug("a discarded producer of Kafka ended with %s", describe(error))
