"""What is particular to S3: crashes of the server, lost answers, cut streams, refusals, and what is left behind."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
import urllib3
from botocore.exceptions import ClientError, ConnectionClosedError

from stitch.core.errors import CorruptObject, InvalidRequest, Unavailable, VersionConflict
from stitch.store import s3_calls
from stitch.store.hashing import digest_bytes
from stitch.store.port import PutCancelled
from stitch.store.s3 import LOOK_FIRST_BYTES, S3Store, parse_s3
from stitch.store.s3_upload import PARTS_AT_ONCE
from tests.support.provision import free_port
from tests.support.s3 import BUCKET, REGION, S3Server, below

pytestmark = [pytest.mark.integration, pytest.mark.s3]

PART_BYTES = 5 << 20
RANGE_BYTES = 2 << 20
LONG_RANGE_BYTES = 12 << 20
"""More than sockets buffer, so that a server killed within one cuts it."""


@pytest.fixture
def store(s3_store_url: str) -> Iterator[S3Store]:
    with S3Store(parse_s3(s3_store_url), part_bytes=PART_BYTES, range_bytes=RANGE_BYTES) as made:
        yield made


@pytest.fixture
def own_store(s3_server: S3Server) -> Iterator[S3Store]:
    """On a server that the test may kill."""
    place = parse_s3(f"s3://{BUCKET}/p?endpoint={s3_server.endpoint}&region={REGION}")
    with S3Store(place, part_bytes=PART_BYTES, range_bytes=LONG_RANGE_BYTES) as made:
        yield made


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_calls, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(s3_calls, "LONGEST_PAUSE_S", 0.001)


@pytest.fixture
def raw(s3_store_url: str) -> Iterator[Callable[..., Any]]:
    """`raw("put_object", key, …)`: boto3 itself, as other tools would use it."""
    place = parse_s3(s3_store_url)
    client = boto3.session.Session().client("s3", endpoint_url=place.endpoint, region_name=place.region)

    def call(operation: str, key: str | None = None, **arguments: Any) -> Any:
        if key is not None:
            arguments["Key"] = place.prefix + key
        return getattr(client, operation)(Bucket=place.bucket, **arguments)

    yield call
    client.close()


class Spy:
    """Stands before the client's calls: counts them, and lets `instead[operation]` act once in their place."""

    def __init__(self, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self._client = store._calls._client
        self.made: list[str] = []
        self.instead: dict[str, Callable[..., Any]] = {}
        monkeypatch.setattr(store._calls, "_client", self)

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        real: Callable[..., Any] = getattr(self._client, operation)

        def call(**arguments: Any) -> Any:
            self.made.append(operation)
            act = self.instead.pop(operation, None)
            return real(**arguments) if act is None else act(real, **arguments)

        return call


@pytest.fixture
def spy(store: S3Store, monkeypatch: pytest.MonkeyPatch, quick_retries: None) -> Spy:
    return Spy(store, monkeypatch)


def lose_the_answer(real: Callable[..., Any], **arguments: Any) -> Any:
    real(**arguments)
    raise ConnectionClosedError(endpoint_url="http://lost")


@pytest.mark.chaos
def test_a_killed_server_keeps_its_objects(s3_server: S3Server, own_store: S3Store) -> None:
    data = secrets.token_bytes(PART_BYTES + 1)
    small, large = own_store.put("small", b"x"), own_store.put("large", data)
    s3_server.kill()
    s3_server.restart()
    assert [(e.key, e.size) for e in own_store.entries("")] == [("large", len(data)), ("small", 1)]
    assert own_store.get("large", limit=len(data), expect=large.blake3) == data
    assert own_store.put("small", b"x") == small
    with pytest.raises(VersionConflict):
        own_store.put("small", b"y")


@pytest.mark.chaos
@pytest.mark.usefixtures("quick_retries")
def test_a_server_killed_during_an_upload_shows_nothing(
    s3_server: S3Server, own_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = secrets.token_bytes(3 * PART_BYTES)
    spied = Spy(own_store, monkeypatch)

    def kill(real: Callable[..., Any], **arguments: Any) -> Any:
        s3_server.kill()
        return real(**arguments)

    spied.instead["complete_multipart_upload"] = kill
    with pytest.raises(Unavailable):
        own_store.put("large", data)
    s3_server.restart()
    assert own_store.stat("large") is None
    assert list(own_store.entries("")) == []
    receipt = own_store.put("large", data)
    assert own_store.get("large", limit=len(data), expect=receipt.blake3) == data


@pytest.mark.chaos
def test_a_download_goes_on_where_the_server_broke_off(
    s3_server: S3Server, own_store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = secrets.token_bytes(2 * LONG_RANGE_BYTES)
    receipt = own_store.put("large", data)
    spied = Spy(own_store, monkeypatch)
    ranges: list[str | None] = []
    read = own_store._calls.read

    def read_and_kill(body: Any) -> Iterator[bytes]:
        chunks = read(body)
        yield next(chunks)
        monkeypatch.setattr(own_store._calls, "read", read)
        s3_server.kill()
        s3_server.restart()
        yield from chunks

    def note(real: Callable[..., Any], **arguments: Any) -> Any:
        ranges.append(arguments.get("Range"))
        spied.instead["get_object"] = note
        return real(**arguments)

    spied.instead["get_object"] = note
    monkeypatch.setattr(own_store._calls, "read", read_and_kill)
    own_store.download(receipt, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == data
    starts = [int(span.removeprefix("bytes=").partition("-")[0]) for span in ranges if span is not None]
    assert any(start % LONG_RANGE_BYTES for start in starts), "it began again instead of going on"


@pytest.mark.usefixtures("s3_environment", "quick_retries")
def test_an_endpoint_that_refuses_is_unavailable(tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    with S3Store(parse_s3(f"s3://{BUCKET}/p?endpoint={endpoint}&region={REGION}")) as store:
        acts: list[Callable[[], object]] = [
            lambda: store.put("k", b"x"),
            lambda: store.get("k", limit=1),
            lambda: store.stat("k"),
            lambda: list(store.entries("")),
            lambda: store.delete("k"),
        ]
        for act in acts:
            with pytest.raises(Unavailable, match=endpoint) as error:
                act()
            assert "testsecret" not in str(error.value)
    assert time.monotonic() - began < 60


@pytest.mark.usefixtures("s3_environment", "quick_retries")
def test_an_endpoint_that_never_answers_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_calls, "READ_TIMEOUT_S", 0.2)
    monkeypatch.setattr(s3_calls, "GIVE_UP_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"s3://{BUCKET}/p?endpoint=http://127.0.0.1:{silent.getsockname()[1]}&region={REGION}"
        with S3Store(parse_s3(url)) as store, pytest.raises(Unavailable, match="ReadTimeoutError"):
            store.stat("k")


def test_a_bucket_that_is_missing_is_named(s3_url: str) -> None:
    with S3Store(dataclasses.replace(parse_s3(s3_url), bucket="no-such-bucket-here")) as store:
        for act in (lambda: store.put("k", b"x"), lambda: list(store.entries(""))):
            with pytest.raises(InvalidRequest, match="no-such-bucket-here") as refused:
                act()
            assert refused.value.field == "store"


ours = pytest.mark.skipif(bool(os.environ.get("STITCH_TEST_S3")), reason="the credentials for STITCH_TEST_S3 are not ours to spoil")


@ours
@pytest.mark.parametrize("names", [("AWS_SECRET_ACCESS_KEY",), ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")])
def test_wrong_credentials_are_refused(s3_url: str, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    for name in names:
        monkeypatch.setenv(name, "wrongwrong")
    with S3Store(parse_s3(s3_url)) as store, pytest.raises(InvalidRequest, match="credentials") as refused:
        store.put("k", b"x")
    assert refused.value.field == "store"
    assert "wrongwrong" not in str(refused.value)


@ours
def test_no_credentials_are_refused(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with S3Store(parse_s3(s3_url)) as store, pytest.raises(InvalidRequest, match="AWS_ACCESS_KEY_ID"):
        store.put("k", b"x")


@ours
def test_credentials_that_come_late_are_found(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a role or a mounted secret is not there yet when a replica starts."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    known = {name: os.environ[name] for name in names}
    for name in names:
        monkeypatch.delenv(name)
    with S3Store(parse_s3(s3_url)) as store:
        with pytest.raises(InvalidRequest, match="credentials"):
            store.stat("k")
        for name, value in known.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InvalidRequest, match="credentials"):  # this call looks for them
            store.stat("k")
        assert store.stat("k") is None


@pytest.mark.usefixtures("s3_environment")
@pytest.mark.parametrize(
    ("environment", "endpoint", "said"),
    [
        ({"AWS_PROFILE": "nope"}, "http://127.0.0.1:1", "nope"),
        ({"AWS_SECRET_ACCESS_KEY": None}, "http://127.0.0.1:1", "AWS_SECRET_ACCESS_KEY"),
        ({}, "http://my_minio:9000", "my_minio"),
    ],
)
def test_a_store_that_is_configured_wrongly_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str | None], endpoint: str, said: str
) -> None:
    for name, value in environment.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(InvalidRequest, match=said) as refused:
        S3Store(parse_s3(f"s3://{BUCKET}/p?endpoint={endpoint}&region={REGION}"))
    assert refused.value.field == "store"


def test_what_a_server_does_not_know_is_refused_at_once(store: S3Store, spy: Spy) -> None:
    """For a publisher would wait half an hour for an outage to end that is none."""

    def unknown(real: Callable[..., Any], **arguments: Any) -> Any:
        said = {"Code": "NotImplemented", "Message": "A header you provided implies functionality that is not implemented"}
        raise ClientError({"Error": said, "ResponseMetadata": {"HTTPStatusCode": 501}}, "PutObject")

    spy.instead["put_object"] = unknown
    with pytest.raises(InvalidRequest, match=r"A header you provided.*stitch doctor"):
        store.put("k", b"x")
    assert spy.made == ["put_object"]


@pytest.mark.parametrize("error", [urllib3.exceptions.SSLError("bad record mac"), ssl.SSLError("bad record mac")])
def test_a_body_that_breaks_in_any_way_is_continued(store: S3Store, spy: Spy, error: Exception) -> None:
    """Bytes mangled on the way are an error of TLS, which botocore does not translate."""

    class Breaks:
        def __init__(self, body: Any) -> None:
            self._body = body

        def iter_chunks(self, size: int) -> Iterator[bytes]:
            yield next(self._body.iter_chunks(10))
            raise error

        def close(self) -> None:
            self._body.close()

    def broken(real: Callable[..., Any], **arguments: Any) -> Any:
        answer = real(**arguments)
        return {**answer, "Body": Breaks(answer["Body"])}

    data = secrets.token_bytes(100)
    store.put("k", data)
    spy.instead["get_object"] = broken
    assert store.get("k", limit=100) == data
    assert spy.made.count("get_object") == 2


@pytest.mark.parametrize("operation", ["put_object", "upload_part"])
def test_a_body_is_sent_again_however_long_the_first_try_lasted(
    store: S3Store, spy: Spy, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(s3_calls, "GIVE_UP_S", -1.0)  # as if every try lasted longer

    def cut(real: Callable[..., Any], **arguments: Any) -> Any:
        raise ConnectionClosedError(endpoint_url="http://cut")

    def cut_twice(real: Callable[..., Any], **arguments: Any) -> Any:
        spy.instead[operation] = cut
        return cut(real, **arguments)

    spy.instead[operation] = cut_twice
    data = secrets.token_bytes(PART_BYTES + 1 if operation == "upload_part" else 10)
    receipt = store.put("k", data)
    assert store.get("k", limit=len(data), expect=receipt.blake3) == data
    assert spy.made.count(operation) == (4 if operation == "upload_part" else 3)

    spy.instead["head_object"] = cut
    with pytest.raises(Unavailable):
        store.stat("k")


@pytest.mark.parametrize("operation", ["put_object", "complete_multipart_upload"])
def test_a_create_whose_answer_was_lost_succeeds(store: S3Store, spy: Spy, operation: str) -> None:
    data = b"x" * (PART_BYTES + 1 if operation == "complete_multipart_upload" else 10)
    spy.instead[operation] = lose_the_answer
    receipt = store.put("k", data)
    assert spy.made.count(operation) >= 2
    assert store.get("k", limit=len(data), expect=receipt.blake3) == data


def test_a_lost_completion_that_the_server_forgot_succeeds(store: S3Store, spy: Spy) -> None:
    """Some servers answer the repeated completion with NoSuchUpload: the upload became the object."""

    def forget(real: Callable[..., Any], **arguments: Any) -> Any:
        real(**arguments)
        answer: Any = {"Error": {"Code": "NoSuchUpload"}, "ResponseMetadata": {"HTTPStatusCode": 404}}
        raise ClientError(answer, "CompleteMultipartUpload")

    data = b"x" * (PART_BYTES + 1)
    spy.instead["complete_multipart_upload"] = forget
    receipt = store.put("k", data)
    assert spy.made.count("create_multipart_upload") == 1
    assert store.get("k", limit=len(data), expect=receipt.blake3) == data


def test_what_is_too_long_is_not_read(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("k", b"12345")

    def read(_: object) -> Iterator[bytes]:
        raise AssertionError("read")

    monkeypatch.setattr(store._calls, "read", read)
    with pytest.raises(CorruptObject):
        store.get("k", limit=4)


def test_a_create_that_lost_a_race_unseen_learns_it(store: S3Store, spy: Spy, raw: Callable[..., Any]) -> None:
    def overtake(real: Callable[..., Any], **arguments: Any) -> Any:
        raw("put_object", "k", Body=b"theirs")
        raise ConnectionClosedError(endpoint_url="http://lost")

    spy.instead["put_object"] = overtake
    with pytest.raises(VersionConflict):
        store.put("k", b"ours")
    assert store.get("k", limit=10) == b"theirs"


def test_an_object_deleted_between_collision_and_look_is_created(store: S3Store, spy: Spy, raw: Callable[..., Any]) -> None:
    store.put("k", b"old")

    def collide(real: Callable[..., Any], **arguments: Any) -> Any:
        try:
            return real(**arguments)
        finally:
            raw("delete_object", "k")

    spy.instead["put_object"] = collide
    store.put("k", b"new")
    assert store.get("k", limit=10) == b"new"


def mangle(real: Callable[..., Any], **arguments: Any) -> Any:
    body = bytearray(arguments["Body"])
    body[0] ^= 1
    return real(**{**arguments, "Body": bytes(body)})


@pytest.mark.parametrize("operation", ["put_object", "upload_part"])
def test_bytes_mangled_on_the_way_up_are_sent_again(store: S3Store, spy: Spy, operation: str) -> None:
    data = secrets.token_bytes(PART_BYTES + 1 if operation == "upload_part" else 10)
    spy.instead[operation] = mangle
    receipt = store.put("k", data)
    assert spy.made.count(operation) == (3 if operation == "upload_part" else 2)
    assert store.get("k", limit=len(data), expect=receipt.blake3) == data


def test_bytes_that_arrive_mangled_each_time_are_not_stored(store: S3Store, spy: Spy) -> None:
    def mangle_again(real: Callable[..., Any], **arguments: Any) -> Any:
        spy.instead["put_object"] = spy.instead["upload_part"] = mangle_again
        return mangle(real, **arguments)

    spy.instead["put_object"] = spy.instead["upload_part"] = mangle_again
    for data in (b"x", b"x" * (PART_BYTES + 1)):
        with pytest.raises(Unavailable, match=r"BadDigest|Mismatch"):
            store.put("k", data)
    assert list(store.entries("")) == []


def test_a_file_changed_while_it_is_uploaded_is_refused(store: S3Store, spy: Spy, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a" * (2 * PART_BYTES))

    def change(real: Callable[..., Any], **arguments: Any) -> Any:
        file.write_bytes(b"b" * (2 * PART_BYTES))
        return real(**arguments)

    spy.instead["create_multipart_upload"] = change
    with pytest.raises(CorruptObject, match="changed"):
        store.put("k", file)
    assert store.stat("k") is None
    assert spy.made[-2:] == ["abort_multipart_upload", "head_object"]


def test_no_upload_is_framed(store: S3Store) -> None:
    """Some servers write the trailer of a framed body into the object (boto3 4435): ours carry their checksum as a header."""
    sent: list[dict[str, Any]] = []
    store._calls._client.meta.events.register("before-send.s3", lambda request, **_: sent.append(dict(request.headers)))
    store.put("small", b"x")
    store.put("large", b"x" * (PART_BYTES + 1))
    names = {name.lower() for headers in sent for name in headers}
    assert "x-amz-checksum-crc32" in names
    assert names.isdisjoint({"x-amz-trailer", "x-amz-decoded-content-length", "transfer-encoding", "content-encoding"})


def test_a_failed_upload_in_parts_is_aborted(store: S3Store, spy: Spy, raw: Callable[..., Any]) -> None:
    def fail(real: Callable[..., Any], **arguments: Any) -> Any:
        raise RuntimeError("a defect, not the network")

    spy.instead["upload_part"] = fail
    with pytest.raises(RuntimeError):
        store.put("large", b"x" * (3 * PART_BYTES))
    assert spy.made[-1] == "abort_multipart_upload"
    assert [u for u in raw("list_multipart_uploads").get("Uploads", ()) if u["Key"].endswith("/large")] == []
    assert store.stat("large") is None


def test_an_upload_that_nobody_waits_for_any_more_ends_with_the_parts_in_hand(
    store: S3Store, spy: Spy, raw: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(secrets.token_bytes(10 * PART_BYTES))
    with pytest.raises(PutCancelled):
        store.put_named(lambda digest: f"k/{digest}", tmp_path / "large", cancelled=lambda: "upload_part" in spy.made)
    assert 1 <= spy.made.count("upload_part") <= PARTS_AT_ONCE
    assert [u for u in raw("list_multipart_uploads").get("Uploads", ()) if "/k/" in u["Key"]] == []
    assert list(store.entries("")) == []


def test_a_loser_in_parts_is_aborted(store: S3Store, raw: Callable[..., Any]) -> None:
    def put(n: int) -> bool:
        try:
            store.put("large", bytes([n]) * (PART_BYTES + 1))
        except VersionConflict:
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(put, range(3))) == 1
    assert [u for u in raw("list_multipart_uploads").get("Uploads", ()) if u["Key"].endswith("/large")] == []


def test_an_equal_upload_is_recognised_by_its_metadata(store: S3Store, spy: Spy) -> None:
    data = secrets.token_bytes(LOOK_FIRST_BYTES)
    receipt = store.put("k", data)
    spy.made.clear()
    assert store.put("k", data) == receipt
    assert spy.made == ["head_object"]

    def written_otherwise(real: Callable[..., Any], **arguments: Any) -> Any:
        answer = real(**arguments)
        return {**answer, "Metadata": {name.title(): value for name, value in answer["Metadata"].items()}}

    spy.instead["head_object"] = written_otherwise  # as proxies do that canonicalise the names of headers
    assert store.put("k", data) == receipt
    assert spy.made == ["head_object"] * 2


def test_an_object_of_another_tool_is_hashed(store: S3Store, raw: Callable[..., Any], tmp_path: Path) -> None:
    raw("put_object", "k", Body=b"12345")
    assert store.put("k", b"12345").blake3 == digest_bytes(b"12345")
    for other in (b"12346", b"123456"):
        with pytest.raises(VersionConflict):
            store.put("k", other)
    with pytest.raises(CorruptObject):
        store.get("k", limit=5, expect=digest_bytes(b"12346"))


def test_listing_goes_over_all_pages(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = sorted(f"k/{n}" for n in range(10))
    for key in keys:
        store.put(key, b"")
    call = store._calls.call
    pages: list[int] = []

    def small_pages(operation: str, **arguments: Any) -> dict[str, Any]:
        answer = call(operation, **arguments, MaxKeys=3)
        pages.append(len(answer["Contents"]))
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(store._calls, "call", small_pages)
        assert [entry.key for entry in store.entries("k/")] == keys
    assert pages == [3, 3, 3, 1]


def test_what_is_no_key_of_ours_is_not_listed(store: S3Store, raw: Callable[..., Any]) -> None:
    raw("put_object", "folder/", Body=b"")
    raw("put_object", "back\\slash", Body=b"")
    store.put("k", b"")
    listed = [entry.key for entry in store.entries("")]
    for key in ("folder/", "back\\slash"):
        raw("delete_object", key)  # the fixture empties the prefix of our keys only
    assert listed == ["k"]


def test_prefixes_are_apart(s3_store_url: str) -> None:
    with S3Store(parse_s3(below(s3_store_url, "a"))) as one, S3Store(parse_s3(below(s3_store_url, "ab"))) as two:
        one.put("k", b"1")
        two.put("k", b"22")
        assert [(e.key, e.size) for e in one.entries("")] == [("k", 1)]
        assert [(e.key, e.size) for e in two.entries("")] == [("k", 2)]
        one.delete("k")
        assert two.get("k", limit=2) == b"22"


def test_a_key_that_the_server_cannot_hold_is_refused(store: S3Store) -> None:
    """AWS holds `a` beside `a/b`; servers on a file system do not, and say so at once."""
    store.put("a/b", b"1")
    try:
        store.put("a", b"2")
        held = True
    except InvalidRequest:
        held = False
    assert (store.stat("a") is not None) is held
    assert store.get("a/b", limit=1) == b"1"
