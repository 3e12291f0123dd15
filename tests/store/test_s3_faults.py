"""An S3 store behind a wire, a server and a disk that fail: real versitygw, a proxy that misbehaves, files that are damaged."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stitch.core.errors import CorruptObject, Unavailable, VersionConflict
from stitch.core.ids import Digest, PolicyId, RunId, VersionNumber, VersionRef
from stitch.core.manifest import StoredFile
from stitch.store import s3_calls, s3_upload
from stitch.store.hashing import digest_bytes
from stitch.store.port import Body, Receipt
from stitch.store.s3 import S3Store, parse_s3
from stitch.weights.fetch import Fetcher
from tests.support.s3 import BUCKET, REGION, S3Server, start_s3
from tests.support.s3_front import Fault, Front, Kind, front_of

pytestmark = [pytest.mark.chaos, pytest.mark.s3]

PART_BYTES = 5 << 20
RANGE_BYTES = 2 << 20
ALWAYS = 1 << 30


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_calls, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(s3_calls, "LONGEST_PAUSE_S", 0.01)


@pytest.fixture
def front(s3_store_url: str) -> Iterator[Front]:
    endpoint = parse_s3(s3_store_url).endpoint
    if endpoint is None or not endpoint.startswith("http://127.0.0.1:"):
        pytest.skip("signatures of other servers do not pass a proxy")
    with front_of(endpoint) as made:
        yield made


def behind(front: Front, url: str) -> S3Store:
    place = parse_s3(url)
    ours = f"s3://{place.bucket}/{place.prefix}?endpoint={front.endpoint}&region={place.region or REGION}"
    return S3Store(parse_s3(ours), part_bytes=PART_BYTES, range_bytes=RANGE_BYTES)


@pytest.fixture
def store(front: Front, s3_store_url: str) -> Iterator[S3Store]:
    with behind(front, s3_store_url) as made:
        yield made


LARGE = secrets.token_bytes(PART_BYTES + 100)
CALLS: dict[str, tuple[str, str, Callable[[S3Store], object]]] = {
    "put": ("PUT", "/new", lambda store: store.put("new", b"n")),
    "create an upload": ("POST", "uploads", lambda store: store.put("large", LARGE)),
    "put a part": ("PUT", "partNumber=2", lambda store: store.put("large", LARGE)),
    "complete": ("POST", "uploadId", lambda store: store.put("large", LARGE)),
    "get": ("GET", "/old", lambda store: store.get("old", limit=3)),
    "stat": ("HEAD", "/old", lambda store: store.stat("old")),
    "list": ("GET", "list-type", lambda store: list(store.entries(""))),
    "delete": ("DELETE", "/old", lambda store: store.delete("old")),
}
TROUBLES = {
    "SlowDown": Fault(method="", kind=Kind.ANSWER, status=503, code="SlowDown", times=2),
    "500": Fault(method="", kind=Kind.ANSWER, status=500, code="InternalError"),
    "429": Fault(method="", kind=Kind.ANSWER, status=429, code="TooManyRequests"),
    "reset": Fault(method="", kind=Kind.RESET, times=2),
    "answer lost": Fault(method="", kind=Kind.LOSE),
}


def of(trouble: Fault, method: str, contains: str, *, times: int | None = None) -> Fault:
    return Fault(
        method=method,
        contains=contains,
        kind=trouble.kind,
        status=trouble.status,
        code=trouble.code,
        times=trouble.times if times is None else times,
    )


@pytest.mark.parametrize("trouble", list(TROUBLES))
def test_every_call_outlives(store: S3Store, front: Front, trouble: str) -> None:
    store.put("old", b"old")
    results = {}
    for name, (method, contains, act) in CALLS.items():
        before = front.count(method, contains)
        front.script(of(TROUBLES[trouble], method, contains))
        results[name] = act(store)
        assert front.count(method, contains) - before > TROUBLES[trouble].times, f"{name} met no trouble"
        if "large" in {entry.key for entry in store.entries("")}:
            assert store.get("large", limit=len(LARGE), expect=digest_bytes(LARGE)) == LARGE
            store.delete("large")
    assert results["get"] == b"old"
    assert results["put"] == Receipt(key="new", size=1, blake3=digest_bytes(b"n"))
    assert {entry.key for entry in store.entries("")} == {"new"}


@pytest.mark.parametrize("call", list(CALLS))
def test_a_store_that_asks_to_slow_down_for_ever_is_unavailable(store: S3Store, front: Front, call: str) -> None:
    store.put("old", b"old")
    method, contains, act = CALLS[call]
    before = front.count(method, contains)
    front.script(of(TROUBLES["SlowDown"], method, contains, times=ALWAYS))
    with pytest.raises(Unavailable, match=r"SlowDown|503"):
        act(store)
    assert front.count(method, contains) - before == s3_calls.TRIES, "a bounded number of tries"


@pytest.mark.parametrize(("status", "code"), [(409, "ConditionalRequestConflict"), (412, "PreconditionFailed")])
@pytest.mark.parametrize("body", [b"small", LARGE], ids=["whole", "in parts"])
def test_a_create_that_is_refused_for_no_object_begins_again(
    store: S3Store, front: Front, status: int, code: str, body: bytes
) -> None:
    """409: another create was under way, and failed. 412: the object was there, and was deleted since."""
    method, contains = ("PUT", "/k") if body == b"small" else ("POST", "uploadId")
    front.script(Fault(method=method, contains=contains, kind=Kind.ANSWER, status=status, code=code, times=2))
    receipt = store.put("k", body)
    assert store.get("k", limit=len(body), expect=receipt.blake3) == body


def test_a_lost_create_after_which_another_wins_is_a_conflict(store: S3Store, front: Front, s3_store_url: str) -> None:
    with S3Store(parse_s3(s3_store_url)) as other:
        other.put("k", b"theirs")
    front.script(Fault(method="PUT", kind=Kind.RESET))
    with pytest.raises(VersionConflict):
        store.put("k", b"ours")
    assert store.get("k", limit=10) == b"theirs"


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_a_slow_answer_is_asked_for_again(front: Front, s3_store_url: str, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(s3_calls, "READ_TIMEOUT_S", 1.0)
    with behind(front, s3_store_url) as store:
        if method == "GET":
            store.put("k", b"x")
        front.script(Fault(method=method, kind=Kind.SLOW, seconds=3.0))
        assert store.put("k", b"x").size == 1
        assert store.get("k", limit=1) == b"x"
        assert front.count(method) >= 2


def test_a_slow_store_is_right(store: S3Store, front: Front, tmp_path: Path) -> None:
    for method in ("PUT", "POST", "HEAD", "GET"):
        front.script(Fault(method=method, kind=Kind.SLOW, seconds=0.05, times=20))
    receipt = store.put("k", LARGE)
    store.download(receipt, tmp_path / "k")
    assert (tmp_path / "k").read_bytes() == LARGE


def test_answers_that_are_cut_are_continued(store: S3Store, front: Front, tmp_path: Path) -> None:
    receipt = store.put("k", LARGE)
    front.script(Fault(method="GET", kind=Kind.CUT, at=RANGE_BYTES - 7, times=2), Fault(method="GET", kind=Kind.CUT, at=0))
    store.download(receipt, tmp_path / "k")
    assert (tmp_path / "k").read_bytes() == LARGE


def test_a_download_is_continued_by_another_store(store: S3Store, s3_store_url: str, tmp_path: Path) -> None:
    data = secrets.token_bytes(8 * RANGE_BYTES)
    receipt = store.put("k", data)
    path = tmp_path / "k"
    path.write_bytes(data[: 3 * RANGE_BYTES + 5])  # as the serial download of an older release leaves it: any length
    asked: list[str] = []
    with S3Store(parse_s3(s3_store_url), range_bytes=RANGE_BYTES) as later:
        later._calls._client.meta.events.register(
            "before-call.s3.GetObject", lambda params, **_: asked.append(params["headers"]["Range"])
        )
        later.download(receipt, path)
    assert path.read_bytes() == data
    starts = [int(span.removeprefix("bytes=").partition("-")[0]) for span in asked]
    assert min(starts) == 3 * RANGE_BYTES + 5, "what was there is not fetched again"


def test_an_interrupted_download_leaves_a_beginning(store: S3Store, front: Front, tmp_path: Path) -> None:
    data = secrets.token_bytes(8 * RANGE_BYTES)
    receipt = store.put("k", data)
    path = tmp_path / "k"
    front.script(Fault(method="GET", contains=f"bytes={3 * RANGE_BYTES}-", kind=Kind.RESET, times=ALWAYS))
    with pytest.raises(Unavailable):
        store.download(receipt, path)
    assert path.read_bytes() == data[: 3 * RANGE_BYTES], "whatever else arrived, what lies there is a beginning"


def test_left_over_uploads_are_ended(store: S3Store, front: Front, s3_store_url: str) -> None:
    front.script(Fault(method="POST", contains="uploads", kind=Kind.LOSE))  # the first one is known to nobody
    store.put("large", LARGE)
    with S3Store(parse_s3(s3_store_url)) as elsewhere:
        assert elsewhere.sweep(3600.0) == 0, "it is younger"
        assert elsewhere.sweep(0.0) == 1
        assert elsewhere.sweep(0.0) == 0
    assert store.get("large", limit=len(LARGE)) == LARGE


def test_uploads_share_their_room(store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one part and of several, more at once than there is room for: no more parts are in memory than agreed."""
    lock = threading.Lock()
    now = most = 0
    read = s3_upload.read_part

    def counted(body: Body, start: int, length: int) -> bytes | memoryview:
        nonlocal now, most
        if length <= s3_upload.SMALL_BYTES:
            return read(body, start, length)
        with lock:
            now += 1
            most = max(most, now)
        try:
            time.sleep(0.02)  # so that all that may be here at once is
            return read(body, start, length)
        finally:
            with lock:
                now -= 1

    monkeypatch.setattr(s3_upload, "read_part", counted)
    files = []
    for number in range(8):
        files.append(tmp_path / str(number))
        files[-1].write_bytes(bytes([number]) * (PART_BYTES * (1 + number % 2) - 7))
    with ThreadPoolExecutor(len(files)) as pool:
        receipts = list(pool.map(lambda file: store.put(f"k/{file.name}", file), files))
    assert [receipt.size for receipt in receipts] == [file.stat().st_size for file in files]
    assert 1 < most <= s3_upload.PARTS_AT_ONCE


# --- damage at rest, on a server of the test's own ---


def own(server: S3Server) -> S3Store:
    return S3Store(parse_s3(server.url), part_bytes=PART_BYTES, range_bytes=RANGE_BYTES)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "one bit flipped": flip,
    "replaced": lambda path: path.write_bytes(secrets.token_bytes(path.stat().st_size)),
    "replaced by a longer one": lambda path: path.write_bytes(path.read_bytes() + b"more"),
}


def test_damaged_objects_are_never_taken(s3_server: S3Server, tmp_path: Path) -> None:
    version = VersionRef(policy=PolicyId("p"), run=RunId("r"), number=VersionNumber(7))
    with own(s3_server) as store:
        for size in (100, 3 * RANGE_BYTES):
            for name, damage in DAMAGE.items():
                data = secrets.token_bytes(size)
                receipt = store.put(f"o/{size}-{name}".replace(" ", "-"), data)
                damage(s3_server.folder / "data" / BUCKET / receipt.key)
                with pytest.raises((CorruptObject, KeyError)):
                    store.get(receipt.key, limit=size, expect=receipt.blake3)
                fetcher = Fetcher(store, cache=tmp_path / "cache", files=tmp_path / "files")
                file = StoredFile(path="model.safetensors", key=receipt.key, size=size, blake3=receipt.blake3)
                with pytest.raises(CorruptObject, match=r"r/weight_v000007: model\.safetensors"):
                    fetcher.fetch(version, [file], [], lambda: None, None)
                assert not fetcher.cached(file).exists(), name


def test_a_damaged_object_is_no_success_of_a_put(s3_server: S3Server) -> None:
    """Its size tells; a flipped bit is for the readers, since a put does not read back what the server says it holds."""
    with own(s3_server) as store:
        receipt = store.put("k", LARGE)
        path = s3_server.folder / "data" / BUCKET / receipt.key
        path.write_bytes(LARGE[:-1])
        with pytest.raises(VersionConflict):
            store.put("k", LARGE)


def test_a_server_killed_while_parts_arrive_is_waited_out(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_calls, "LONGEST_PAUSE_S", 5.0)  # as long as a start takes on a busy machine
    monkeypatch.setattr(s3_calls, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(s3_calls, "GIVE_UP_S", 60.0)
    monkeypatch.setattr(s3_calls, "TRIES", 12)
    data = secrets.token_bytes(4 * PART_BYTES)
    with own(s3_server) as store:
        hits = 0

        def kill(**_: object) -> None:
            nonlocal hits
            hits += 1
            if hits == 2:
                s3_server.kill()
                s3_server.restart()

        store._calls._client.meta.events.register("before-send.s3.UploadPart", lambda **given: kill(**given))
        receipt = store.put("k", data)
        assert hits >= 4
        store.download(receipt, tmp_path / "k")
        assert (tmp_path / "k").read_bytes() == data


def test_a_full_disk_is_unavailable_until_there_is_room(s3_environment: None, tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs a mount namespace, which this system does not allow")
    server = start_s3(tmp_path / "s3", disk_bytes=3 * len(LARGE))
    try:
        with own(server) as store:
            first = store.put("first", LARGE)
            with pytest.raises(Unavailable):
                store.put("second", LARGE + LARGE + LARGE)
            assert [entry.key for entry in store.entries("")] == ["first"]
            assert store.get("first", limit=first.size, expect=first.blake3) == LARGE
            store.delete("first")
            store.sweep(0.0)
            second = store.put("second", LARGE[:-1])
            assert store.get("second", limit=second.size, expect=second.blake3) == LARGE[:-1]
    finally:
        server.stop()


def test_digests_are_what_is_expected_not_what_is_stored(store: S3Store, tmp_path: Path) -> None:
    receipt = store.put("k", LARGE)
    wrong = Receipt(key="k", size=receipt.size, blake3=Digest("0" * 64))
    with pytest.raises(CorruptObject):
        store.download(wrong, tmp_path / "k")
    assert not (tmp_path / "k").exists()
