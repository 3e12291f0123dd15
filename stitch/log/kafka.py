"""EventLog on Apache Kafka: one topic of one partition per stream, `<namespace>.<stream>`.

Readers are assigned by hand, belong to no consumer group and never reset their position by themselves. They read uncommitted:
Stitch opens no transaction, and one that a stranger leaves open must not hold readers back. (Several partitions of rollouts,
which Kafka would allow, are not read yet; `setup` refuses them.)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from operator import itemgetter
from typing import Any, Final, Self, TypeVar

from aiokafka import TopicPartition
from aiokafka.errors import ConsumerStoppedError, KafkaError, OffsetOutOfRangeError

from stitch.core.errors import InvalidRequest, LogDiverged, Unavailable
from stitch.core.frozen import maker
from stitch.core.ids import Offset
from stitch.log.kafka_append import REFUSALS, Appender, describe
from stitch.log.kafka_clients import Consumer
from stitch.log.kafka_identity import topic_id
from stitch.log.kafka_settings import KafkaSettings, parse_kafka_url
from stitch.log.kafka_topics import set_up
from stitch.log.keeping import APPEND_TIMEOUT_S, READ_TIMEOUT_S, check_draft
from stitch.log.port import Bounds, Copies, Draft, EventLog, Headers, Reader, Record, Stream
from stitch.log.read import last_record

SILENCE_S: Final = 8.0
"""Without any answer to a fetch for this long, though the broker owes one every FETCH_WAIT_MS, the log counts as away."""
SLICE_S: Final = 1.0
"""Of a poll, after which the position and the age of the last answer are looked at."""
CONNECT_S: Final = 5.0
"""For a poll to connect anew, however short it is."""
DEPOSED_S: Final = 10.0
"""For a leader that stood still to learn that it leads no more: until then it answers as if nothing had been written since."""
DEPOSED_AGAIN_S: Final = 0.5

T = TypeVar("T")


class KafkaLog(EventLog):
    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._appender = Appender(settings)
        self._asker = Consumer(settings)
        self._readers: set[_KafkaReader] = set()
        self._closed = False

    @classmethod
    def of_url(cls, url: str) -> Self:
        """Raises InvalidRequest."""
        return cls(parse_kafka_url(url))

    @property
    def url(self) -> str:
        return self._settings.url

    async def setup(self, *, create: bool) -> Copies:
        self._check_open()
        return await set_up(self._settings, create=create)

    async def append(self, stream: Stream, draft: Draft, *, timeout: float | None = None) -> None:
        check_draft(draft)
        self._check_open()
        await self._appender.append(self._settings.topic(stream), draft, APPEND_TIMEOUT_S if timeout is None else timeout)

    async def bounds(self, stream: Stream) -> Bounds:
        partition = self._partition(stream)

        async def ask(consumer: Any) -> Bounds:
            start = (await consumer.beginning_offsets([partition]))[partition]
            end = (await consumer.end_offsets([partition]))[partition]
            return Bounds(start=Offset(start), end=Offset(end))

        return await self._ask(ask)

    async def bounds_reaching(self, stream: Stream, offset: Offset) -> Bounds:
        until = time.monotonic() + DEPOSED_S
        while True:
            bounds = await self.bounds(stream)
            if bounds.end >= offset or time.monotonic() >= until:
                return bounds
            self._asker.discard()  # a new client asks around whom the cluster follows by now
            await asyncio.sleep(DEPOSED_AGAIN_S)

    async def offset_at(self, stream: Stream, time_ms: int) -> Offset:
        partition = self._partition(stream)

        async def ask(consumer: Any) -> Offset:
            end = (await consumer.end_offsets([partition]))[partition]
            found = (await consumer.offsets_for_times({partition: max(time_ms, 0)}))[partition]
            return Offset(end if found is None else found.offset)

        return await self._ask(ask)

    async def newest(self, stream: Stream) -> Record | None:
        return await last_record(self, stream)

    async def reader(self, stream: Stream, start: Offset) -> Reader:
        self._check_open()
        reader = _KafkaReader(self, stream, start)
        self._readers.add(reader)
        try:
            await reader.connect(READ_TIMEOUT_S)
        except BaseException:
            await reader.aclose()
            raise
        return reader

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.gather(*(reader.aclose() for reader in tuple(self._readers)))
            await asyncio.gather(self._appender.close(), self._asker.close())

    def _partition(self, stream: Stream) -> TopicPartition:
        return TopicPartition(self._settings.topic(stream), 0)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self.url}: closed")

    async def _ask(self, question: Callable[[Any], Awaitable[T]]) -> T:
        self._check_open()
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await self._asker.ask(question)
        except TimeoutError:
            self._asker.discard()
            raise Unavailable(f"{self.url}: no answer within {READ_TIMEOUT_S:g} s{self._settings.hint}") from None
        except KafkaError as error:
            self._asker.discard()
            raise as_ours(self._settings, error) from error


def as_ours(settings: KafkaSettings, error: KafkaError | ConsumerStoppedError) -> InvalidRequest | Unavailable:
    if isinstance(error, REFUSALS):
        return InvalidRequest(f"log: {settings.url} refused: {describe(error)}", field="log")
    return Unavailable(f"{settings.url}: {describe(error)}{settings.hint}")


class _KafkaReader(Reader):
    def __init__(self, log: KafkaLog, stream: Stream, start: Offset) -> None:
        self._log = log
        self._stream = stream
        self._partition = log._partition(stream)
        self._position: int = start
        self._consumer = Consumer(log._settings)
        self._polling = False
        self._closed = False
        self._answered_at = 0.0
        """Monotonic time at which the broker was last known to answer."""
        self._answer_stamp: int | None = None
        self._checked_stamp: int | None = None
        """Of the answer up to which the topic is known to be the same."""
        self._end: int | None = None
        self._topic_id: bytes | None = None

    @property
    def position(self) -> Offset:
        return Offset(self._position)

    @property
    def end(self) -> Offset | None:
        return None if self._end is None else Offset(self._end)

    @property
    def answered_at(self) -> float:
        return self._answered_at

    async def poll(self, timeout: float, max_records: int = 1000) -> Sequence[Record]:
        if self._polling:
            # The poll before was cancelled and may have taken records from the consumer that nobody saw.
            self._consumer.discard()
        self._polling = True
        try:
            records = await self._poll(time.monotonic() + timeout, max_records)
        except OffsetOutOfRangeError:
            self._consumer.discard()
            raise await self._out_of_range() from None
        except (KafkaError, ConsumerStoppedError) as error:
            self._consumer.discard()
            raise as_ours(self._log._settings, error) from error
        self._polling = False
        return records

    async def _out_of_range(self) -> LogDiverged | Unavailable:
        """What it means that the broker has not the position."""
        bounds = await self._log.bounds_reaching(self._stream, self.position)
        if bounds.start <= self._position <= bounds.end:
            return Unavailable(f"{self._log.url}: the broker knew {self._stream} less far than it was read; another one is asked")
        return LogDiverged(f"{self._log.url}: offset {self._position} of {self._stream} is not in the log")

    async def connect(self, timeout: float) -> Any:
        """The consumer, started and set to the position. Raises Unavailable."""
        try:
            async with asyncio.timeout(timeout):
                consumer, fresh = await self._consumer.started(self._partition, self._position)
                if fresh:
                    await self._check_topic(consumer)
        except TimeoutError:
            self._consumer.discard()
            raise Unavailable(f"{self._log.url}: not reached within {timeout:g} s{self._log._settings.hint}") from None
        except KafkaError as error:
            self._consumer.discard()
            raise as_ours(self._log._settings, error) from error
        if fresh:
            self._answered_at = time.monotonic()
            self._answer_stamp = self._checked_stamp = None
        return consumer

    async def _poll(self, deadline: float, max_records: int) -> Sequence[Record]:
        while True:
            if self._closed:
                raise Unavailable(f"{self._log.url}: reader of {self._stream} is closed")
            consumer = await self.connect(max(CONNECT_S, deadline - time.monotonic()))
            await asyncio.sleep(0)  # a poll of zero seconds must leave the fetching task its turn
            wait_s = min(SLICE_S, max(0.0, deadline - time.monotonic()))
            found = await consumer.getmany(self._partition, timeout_ms=int(wait_s * 1000), max_records=max_records)
            # Beyond the last record, where control batches or compacted entries follow it.
            position = await consumer.position(self._partition)
            stamp = consumer.last_poll_timestamp(self._partition)
            records = [_record(self._stream, each) for each in found.get(self._partition, ())]
            self._check_answers(stamp, bool(records))
            if position != self._position and stamp != self._checked_stamp:
                await self._check_topic(consumer)  # once for the several polls that one answer of the broker may fill
                self._checked_stamp = stamp
            self._position, self._end = position, consumer.highwater(self._partition)
            if records or time.monotonic() >= deadline:
                return records

    async def _check_topic(self, consumer: Any) -> None:
        """LogDiverged where the name stands for another topic than when the reader was opened."""
        found = await topic_id(consumer._client, self._partition)
        if self._topic_id is None:
            self._topic_id = found
        elif found is not None and found != self._topic_id:
            self._consumer.discard()
            raise LogDiverged(f"{self._log.url}: the topic of {self._stream} was deleted and made again while it was read")

    def _check_answers(self, stamp: int | None, found: bool) -> None:
        """Unavailable where brokers stopped answering; aiokafka would go on trying without a word."""
        now = time.monotonic()
        if found or stamp != self._answer_stamp:
            self._answer_stamp = stamp
            self._answered_at = now
        elif now - self._answered_at > SILENCE_S:
            self._consumer.discard()
            raise Unavailable(f"{self._log.url}: no answer for {SILENCE_S:g} s")

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._log._readers.discard(self)
            await self._consumer.close()


def _record(stream: Stream, found: Any) -> Record:
    headers = found.headers
    if not all(map(_value, headers)):  # hardly ever, and it is quicker to leave them as they are
        headers = _filled(headers)
    key = (found.key or b"").decode("utf-8", "replace")  # a stranger's key; Stitch's own are text
    return _made(stream=stream, offset=found.offset, time_ms=found.timestamp, key=key, value=found.value or b"", headers=headers)


_made: Final = maker(Record)
_value: Final = itemgetter(1)


def _filled(headers: Sequence[tuple[str, bytes | None]]) -> Headers:
    return tuple((name, value or b"") for name, value in headers)
