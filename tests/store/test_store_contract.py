"""What every BlobStore promises, checked on each."""

from __future__ import annotations

import dataclasses
import functools
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stitch.core.errors import CorruptObject, InvalidRequest, VersionConflict
from stitch.core.ids import Digest
from stitch.store.directory import DirectoryStore
from stitch.store.faulty import FaultyStore
from stitch.store.hashing import digest_bytes
from stitch.store.memory import MemoryStore
from stitch.store.port import MAX_KEY_BYTES, MAX_SEGMENT_BYTES, BlobStore, Body, PutCancelled, Receipt

pytestmark = pytest.mark.contract

PART_BYTES = 5 << 20  # S3's smallest part, so that a large object here has several
LARGE_BYTES = 2 * PART_BYTES + 12_345
RACERS = 16


@pytest.fixture(params=["memory", "directory", "faulty", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    with make_store(request, tmp_path) as made:
        yield made


def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    match request.param:
        case "memory":
            return MemoryStore()
        case "directory":
            return DirectoryStore(tmp_path / "store")
        case "faulty":  # without a fault it must be as good as what it wraps
            return FaultyStore(MemoryStore())
        case _:
            from stitch.store.s3 import S3Store, parse_s3

            return S3Store(parse_s3(request.getfixturevalue("s3_store_url")), part_bytes=PART_BYTES, range_bytes=1 << 20)


def at_once(count: int, act: Callable[[int], object]) -> list[object]:
    """`act(0)` … `act(count - 1)` from threads that start together; what each returned or raised."""
    barrier = threading.Barrier(count)

    def run(index: int) -> object:
        barrier.wait()
        try:
            return act(index)
        except (VersionConflict, KeyError) as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def keys_of(store: BlobStore, prefix: str = "") -> list[str]:
    return [entry.key for entry in store.entries(prefix)]


def test_put_then_get_stat_and_list(store: BlobStore) -> None:
    receipt = store.put("r1/7.e1/abc", b"weights")
    assert receipt == Receipt(key="r1/7.e1/abc", size=7, blake3=digest_bytes(b"weights"))
    assert store.get("r1/7.e1/abc", limit=7, expect=receipt.blake3) == b"weights"
    entry = store.stat("r1/7.e1/abc")
    assert entry is not None
    assert (entry.key, entry.size) == ("r1/7.e1/abc", 7)
    assert entry.modified_ms > 0
    assert [(e.key, e.size) for e in store.entries("")] == [("r1/7.e1/abc", 7)]


def test_bodies_may_be_bytes_views_and_files(store: BlobStore, tmp_path: Path) -> None:
    file = tmp_path / "body"
    file.write_bytes(b"same")
    bodies: list[Body] = [b"same", memoryview(b"-same-")[1:5], file]
    receipts = {store.put(f"k/{n}", body).blake3 for n, body in enumerate(bodies)}
    assert receipts == {digest_bytes(b"same")}
    assert [store.get(f"k/{n}", limit=4) for n in range(3)] == [b"same"] * 3


def test_a_view_of_wider_items_counts_in_bytes(store: BlobStore) -> None:
    view = memoryview(b"\x01\x00\x02\x00").cast("H")
    assert store.put("wide", view).size == 4
    assert store.get("wide", limit=4) == b"\x01\x00\x02\x00"


def test_a_missing_body_file_is_refused(store: BlobStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        store.put("k", tmp_path / "nothing")
    assert refused.value.field == "body"
    assert store.stat("k") is None


def test_create_once(store: BlobStore) -> None:
    first = store.put("k", b"first")
    assert store.put("k", b"first") == first
    for other in (b"other", b"longer than the first", b""):
        with pytest.raises(VersionConflict):
            store.put("k", other)
    assert store.get("k", limit=100) == b"first"


def test_create_race_of_different_bytes_has_one_winner(store: BlobStore) -> None:
    for round_number in range(3):
        key = f"race/{round_number}"
        results = at_once(RACERS, lambda n, key=key: store.put(key, f"content {n:02}".encode()))  # type: ignore[misc]
        winners = [n for n, result in enumerate(results) if isinstance(result, Receipt)]
        assert len(winners) == 1, results
        assert sum(isinstance(result, VersionConflict) for result in results) == RACERS - 1
        assert store.get(key, limit=100) == f"content {winners[0]:02}".encode()


def test_create_race_of_equal_bytes_has_no_loser(store: BlobStore) -> None:
    results = at_once(RACERS, lambda _: store.put("race", b"the same"))
    assert results == [Receipt(key="race", size=8, blake3=digest_bytes(b"the same"))] * RACERS
    assert keys_of(store) == ["race"]


def test_race_of_large_objects_has_one_winner(store: BlobStore, tmp_path: Path) -> None:
    bodies = [bytes([n]) * (PART_BYTES + 1) for n in range(4)]
    results = at_once(4, lambda n: store.put("race", bodies[n]))
    winners = [n for n, result in enumerate(results) if isinstance(result, Receipt)]
    assert len(winners) == 1, results
    assert store.get("race", limit=PART_BYTES + 1) == bodies[winners[0]]
    assert keys_of(store) == ["race"]


def test_empty_object(store: BlobStore, tmp_path: Path) -> None:
    receipt = store.put("empty", b"")
    assert receipt.size == 0
    assert store.put("empty", b"") == receipt
    assert store.get("empty", limit=0, expect=receipt.blake3) == b""
    store.download(receipt, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b""
    with pytest.raises(KeyError):
        store.download(dataclasses.replace(receipt, key="none"), tmp_path / "file")


@pytest.mark.parametrize("as_file", [True, False])
def test_large_object(store: BlobStore, tmp_path: Path, as_file: bool) -> None:
    data = secrets.token_bytes(LARGE_BYTES)
    file = tmp_path / "body"
    file.write_bytes(data)
    receipt = store.put("large", file if as_file else data)
    assert receipt == Receipt(key="large", size=LARGE_BYTES, blake3=digest_bytes(data))
    assert store.put("large", memoryview(data)) == receipt
    with pytest.raises(VersionConflict):
        store.put("large", data[:-1])
    with pytest.raises(VersionConflict):
        store.put("large", data[:-1] + bytes([data[-1] ^ 1]))
    store.download(receipt, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    assert store.get("large", limit=LARGE_BYTES, expect=receipt.blake3) == data


@pytest.mark.parametrize("size", [10, LARGE_BYTES])
def test_put_under_a_name_made_of_the_digest(store: BlobStore, tmp_path: Path, size: int) -> None:
    data = secrets.token_bytes(size)
    file = tmp_path / "body"
    file.write_bytes(data)
    expected = Receipt(key=f"k/{digest_bytes(data)}", size=size, blake3=digest_bytes(data))
    assert store.put_named(lambda digest: f"k/{digest}", file) == expected
    assert store.put_named(lambda digest: f"k/{digest}", data) == expected
    with pytest.raises(PutCancelled):
        store.put_named(lambda digest: f"l/{digest}", file, cancelled=lambda: True)
    assert list(store.entries("l/")) == []
    assert store.get(expected.key, limit=size) == data
    with pytest.raises(VersionConflict):
        store.put_named(lambda _: expected.key, b"other")
    with pytest.raises(InvalidRequest):
        store.put_named(lambda _: "../out", b"other")
    assert keys_of(store) == [expected.key]


def test_a_sweep_spares_every_object(store: BlobStore) -> None:
    store.put("k", b"x")
    assert store.sweep(0.0) == 0
    assert keys_of(store) == ["k"]


def test_get_holds_its_limit(store: BlobStore) -> None:
    store.put("k", b"12345")
    assert store.get("k", limit=5) == b"12345"
    with pytest.raises(CorruptObject):
        store.get("k", limit=4)


def test_get_verifies_the_digest(store: BlobStore) -> None:
    store.put("k", b"12345")
    with pytest.raises(CorruptObject):
        store.get("k", limit=5, expect=digest_bytes(b"12346"))


@pytest.mark.parametrize(
    "wrong",
    [{"blake3": Digest("0" * 64)}, {"size": 4}, {"size": 6}, {"size": 0}],
    ids=["digest", "longer than expected", "shorter than expected", "expected to be empty"],
)
@pytest.mark.parametrize("part", [None, b"12"], ids=["fresh", "resumed"])
def test_a_download_that_differs_leaves_no_file(
    store: BlobStore, tmp_path: Path, wrong: dict[str, object], part: bytes | None
) -> None:
    receipt = store.put("k", b"12345")
    path = tmp_path / "file"
    if part is not None:
        path.write_bytes(part)
    with pytest.raises(CorruptObject):
        store.download(dataclasses.replace(receipt, **wrong), path)  # type: ignore[arg-type]
    assert not path.exists()


def test_download_continues_a_part(store: BlobStore, tmp_path: Path) -> None:
    data = secrets.token_bytes(3 << 20)
    receipt = store.put("k", data)
    path = tmp_path / "file"
    for left in (data[:1], data[: 1 << 20], data[:-1], data):
        path.write_bytes(left)
        store.download(receipt, path)
        assert path.read_bytes() == data


def test_download_heals_a_wrong_part(store: BlobStore, tmp_path: Path) -> None:
    receipt = store.put("k", b"the whole object")
    path = tmp_path / "file"
    for left in (b"XXX", b"XXX whole object", b"X" * receipt.size, b"the whole object and more"):
        path.write_bytes(left)
        store.download(receipt, path)
        assert path.read_bytes() == b"the whole object"


def test_what_is_missing(store: BlobStore, tmp_path: Path) -> None:
    store.put("there/is/one", b"x")
    for key in ("none", "there/is/two", "there", "there/is", "there/is/one/below"):
        with pytest.raises(KeyError):
            store.get(key, limit=1)
        with pytest.raises(KeyError):
            store.download(Receipt(key=key, size=1, blake3=digest_bytes(b"x")), tmp_path / "file")
        assert store.stat(key) is None
        store.delete(key)
    assert not (tmp_path / "file").exists()
    assert keys_of(store) == ["there/is/one"]


def test_entries_are_in_key_order(store: BlobStore) -> None:
    keys = ["a-b", "a.b/c", "a/b", "a/b-c/d", "a/b.c", "a0", "r/10.e1/x", "r/9.e1/x", "r/9.e1.json", "é", "中/文", "𝄞"]
    for key in reversed(keys):
        store.put(key, key.encode())
    assert keys_of(store) == sorted(keys)


def test_a_prefix_is_the_beginning_of_a_key(store: BlobStore) -> None:
    for key in ("r/7.e1/x", "r/7.e1/y", "r/7.e1.json", "r/71.e1/x", "r2/7.e1/x"):
        store.put(key, b"")
    assert keys_of(store, "r/7.e1/") == ["r/7.e1/x", "r/7.e1/y"]
    assert keys_of(store, "r/7") == ["r/7.e1.json", "r/7.e1/x", "r/7.e1/y", "r/71.e1/x"]
    assert keys_of(store, "r/7.e1/x") == ["r/7.e1/x"]
    assert keys_of(store, "r/7.e1/x/") == []
    assert keys_of(store, "none/") == []
    assert len(keys_of(store, "r")) == 5


def test_many_entries(store: BlobStore) -> None:
    keys = sorted(f"many/{n}" for n in range(150))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    assert keys_of(store, "many/") == keys


def test_delete_is_idempotent(store: BlobStore) -> None:
    store.put("a/b/c", b"1")
    store.put("a/b/d", b"2")
    store.delete("a/b/c")
    store.delete("a/b/c")
    assert keys_of(store) == ["a/b/d"]
    store.delete("a/b/d")
    store.put("a", b"a folder that became empty is no obstacle")
    store.delete("a")
    store.put("a/b/c", b"another time, other bytes")
    assert keys_of(store) == ["a/b/c"]


BAD_KEYS = [
    "",
    "/absolute",
    "trailing/",
    "empty//segment",
    "..",
    "../out",
    "a/../b",
    "a/..",
    "./a",
    "a/.",
    "back\\slash",
    "new\nline",
    "nul\0",
    "del\x7f",
    "c1\x85",
    "lone\ud800",
    "x" * (MAX_SEGMENT_BYTES + 1),
    "é" * (MAX_SEGMENT_BYTES // 2 + 1),
    "/".join(["x" * 200] * 5),
    ".stitch-uploads/x",
]


def test_keys_that_are_refused(store: BlobStore, tmp_path: Path) -> None:
    for key in BAD_KEYS:
        receipt = Receipt(key=key, size=0, blake3=digest_bytes(b""))
        acts: list[Callable[[], object]] = [
            functools.partial(store.put, key, b""),
            functools.partial(store.get, key, limit=0),
            functools.partial(store.download, receipt, tmp_path / "file"),
            functools.partial(store.stat, key),
            functools.partial(store.delete, key),
        ]
        for act in acts:
            with pytest.raises(InvalidRequest) as refused:
                act()
            assert refused.value.field == "key", key
    assert keys_of(store) == []


def test_prefixes_that_are_refused(store: BlobStore) -> None:
    for prefix in ("/", "../", "a/../", "a//b", "a\\", "x" * (MAX_KEY_BYTES + 1)):
        with pytest.raises(InvalidRequest) as refused:
            store.entries(prefix)
        assert refused.value.field == "key", prefix


def test_keys_that_are_odd_but_right(store: BlobStore) -> None:
    odd = ["x" * MAX_SEGMENT_BYTES, "/".join(["y" * 224] * 4), "...", ".hidden/..x", "sp ace/+&=?#%41~*'\"<>", "ümläut", "_/\ufeff"]
    for key in odd:
        receipt = store.put(key, key.encode())
        assert keys_of(store, key) == [key]
        assert store.get(key, limit=1000, expect=receipt.blake3) == key.encode()
    assert keys_of(store) == sorted(odd)


def test_an_object_is_whole_whenever_it_is_visible(store: BlobStore) -> None:
    """Readers poll while a large object is created: they see nothing, or all of it."""
    data = secrets.token_bytes(LARGE_BYTES)
    done = threading.Event()
    seen: list[int] = []

    def watch() -> None:
        while not done.is_set():
            entry = store.stat("k")
            listed = [found.size for found in store.entries("")]
            seen.extend([entry.size] if entry is not None else [])
            seen.extend(listed)

    with ThreadPoolExecutor(2) as pool:
        watchers = [pool.submit(watch) for _ in range(2)]
        try:
            store.put("k", data)
        finally:
            done.set()
        for watcher in watchers:
            watcher.result()
    assert set(seen) <= {LARGE_BYTES}
    assert keys_of(store) == ["k"]


def test_threads_share_a_store(store: BlobStore, tmp_path: Path) -> None:
    def work(n: int) -> None:
        for step in range(5):
            data = f"{n}/{step}".encode()
            receipt = store.put(f"t{n}/{step}", data)
            assert store.get(receipt.key, limit=20, expect=receipt.blake3) == data
            store.download(receipt, tmp_path / f"{n}-{step}")
            if step % 2:
                store.delete(receipt.key)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert keys_of(store) == [f"t{n}/{step}" for n in range(8) for step in (0, 2, 4)]


def test_close_twice(store: BlobStore) -> None:
    store.put("k", b"")
    store.close()
    store.close()
