"""What is written matches its schema exactly; what is read is whole, or is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.core.errors import InvalidRequest, UnreadableEvent
from stitch.core.events import Event, FormatRaised, ReplicaState
from stitch.wire.codec import MAGIC, MAX_RECORD_BYTES, Encoded, Skipped, decode, encode
from stitch.wire.schemas import registry
from tests.support.examples import examples

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", examples())
def test_an_event_is_read_back_as_it_was_written(name: str) -> None:
    event = examples()[name]
    encoded = encode(event, source="test")
    assert decode(encoded.value, encoded.headers) == event


def test_headers_are_cloudevents_attributes() -> None:
    when = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    traceparent = f"00-{'1' * 32}-{'2' * 16}-01"
    encoded = encode(examples()["run_claimed"], source="trainer-1", time=when, traceparent=traceparent)
    assert dict(encoded.headers) == {
        "ce_specversion": b"1.0",
        "ce_id": b"e-1",
        "ce_type": b"stitch.run_claimed.v1",
        "ce_source": b"trainer-1",
        "ce_time": b"2026-01-02T03:04:05.678Z",
        "content-type": b"application/avro",
        "traceparent": traceparent.encode(),
    }


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("run_claimed", "math"),
        ("format_raised", "*"),
        ("channel_pointer", "math/latest"),
        ("replica_state", "replica-0"),
        ("rollout_served", "q-1"),
    ],
)
def test_the_record_key_is_what_the_stream_is_kept_by(name: str, key: str) -> None:
    assert encode(examples()[name], source="test").key == key


@pytest.mark.parametrize("value", [True, 2**63, 1.5, "1", None])
def test_a_value_that_the_schema_does_not_allow_is_refused_by_field(value: object) -> None:
    event = FormatRaised(level=value, event_id="e", writer="w")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as refused:
        encode(event, source="test")
    assert refused.value.field == "FormatRaised.level"


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="time zone"):
        encode(examples()["run_claimed"], source="test", time=datetime(2026, 1, 1))


def test_a_traceparent_of_another_form_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="traceparent"):
        encode(examples()["run_claimed"], source="test", traceparent="x")


def test_a_record_too_large_for_the_log_is_refused() -> None:
    state = examples()["replica_state"]
    assert isinstance(state, ReplicaState)
    with pytest.raises(InvalidRequest, match=str(MAX_RECORD_BYTES)):
        encode(replace(state, error="x" * MAX_RECORD_BYTES), source="test")


def _foreign(name: str) -> Encoded:
    """A record whose schema this release does not know."""
    encoded = encode(examples()[name], source="test")
    return replace(encoded, value=MAGIC + b"\0" * 8 + encoded.value[10:])


@pytest.mark.parametrize("name", ["replica_state", "channel_pointer", "rollout_served"])
def test_an_optional_event_of_an_unknown_schema_is_skipped(name: str) -> None:
    record = _foreign(name)
    found = decode(record.value, record.headers)
    assert isinstance(found, Skipped)
    assert found.type.startswith("stitch.")


@pytest.mark.parametrize("name", ["run_claimed", "version_published", "version_retired", "format_raised"])
def test_a_decision_of_an_unknown_schema_is_never_skipped(name: str) -> None:
    record = _foreign(name)
    with pytest.raises(UnreadableEvent, match="upgrade"):
        decode(record.value, record.headers)


def test_bytes_left_over_are_refused() -> None:
    encoded = encode(examples()["version_retired"], source="test")
    with pytest.raises(UnreadableEvent, match="left over"):
        decode(encoded.value + b"\0", encoded.headers)


@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_are_unreadable_never_a_crash(data: bytes) -> None:
    with pytest.raises(UnreadableEvent):
        decode(data, ())


@given(name=st.sampled_from(sorted(examples())), cut=st.integers(min_value=0, max_value=400))
def test_a_truncated_record_is_unreadable(name: str, cut: int) -> None:
    encoded = encode(examples()[name], source="test")
    if cut < len(encoded.value):
        with pytest.raises(UnreadableEvent):
            decode(encoded.value[:cut], ())


@given(name=st.sampled_from(sorted(examples())), at=st.integers(min_value=10), flip=st.integers(1, 255))
def test_a_damaged_record_is_read_as_an_event_or_refused(name: str, at: int, flip: int) -> None:
    encoded = encode(examples()[name], source="test")
    damaged = bytearray(encoded.value)
    damaged[10 + at % (len(damaged) - 10)] ^= flip
    try:
        event: Event | Skipped | None = decode(bytes(damaged), ())
    except UnreadableEvent:
        event = None
    assert event is None or type(event) is type(examples()[name])


def test_every_schema_file_is_named_after_what_it_holds() -> None:
    types = {schema.type for schema in registry().by_fingerprint.values()}
    assert {f"stitch.{event}.v1" for event in registry().newest} <= types
