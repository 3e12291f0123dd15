"""A directory's files are uploaded while its tensors are digested: what comes of them where the publish goes another way."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stitch.core.errors import CorruptObject, Unavailable, VersionConflict
from stitch.core.ids import Digest
from stitch.core.manifest import weights_digest
from stitch.store.faulty import Fault, FaultyStore, Kind
from stitch.store.memory import MemoryStore
from stitch.store.port import Body, Cancelled, PutCancelled, Receipt, never
from stitch.weights.digest import spec_of
from stitch.weights.safetensors import write_checkpoint
from stitch.weights.tensors import host_tensors
from tests.trainer.places import POLICY, Place, weights

pytestmark = pytest.mark.integration


def checkpoint(folder: Path, seed: int) -> Path:
    folder.mkdir()
    write_checkpoint(folder, host_tensors(weights(seed)), 1 << 20)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore())


def puts(store: FaultyStore) -> list[str]:
    return [key for call, key in store.calls if call == "put" and not key.endswith(".json")]


def test_each_file_is_uploaded_once(store: FaultyStore, tmp_path: Path) -> None:
    with Place.on_disk(tmp_path).publisher(store=store) as publisher:
        publication = publisher.publish(checkpoint(tmp_path / "c", 0))
        assert len(puts(store)) == 2
        assert all(key.startswith(f"{POLICY}/r1/0.e1/") for key in puts(store))
        assert publisher.publish(checkpoint(tmp_path / "d", 0), number=0) == publication
        assert len(puts(store)) == 2, "a version that is there is not uploaded again"


def test_a_store_that_is_away_meanwhile_is_waited_out(store: FaultyStore, tmp_path: Path) -> None:
    store.add(Fault(call="put", key="/0.e1/", kind=Kind.FAIL_AFTER, times=3))
    with Place.on_disk(tmp_path).publisher(store=store) as publisher:
        assert publisher.publish(checkpoint(tmp_path / "c", 0)).ref.number == 0


def test_a_number_that_is_taken_uploads_nothing(store: FaultyStore, tmp_path: Path) -> None:
    with Place.on_disk(tmp_path).publisher(store=store) as publisher:
        publisher.publish(checkpoint(tmp_path / "c", 0))
        before = puts(store)
        with pytest.raises(VersionConflict):
            publisher.publish(checkpoint(tmp_path / "d", 1), number=0)
        assert puts(store) == before


def test_a_damaged_directory_leaves_the_publisher_usable(store: FaultyStore, tmp_path: Path) -> None:
    with Place.on_disk(tmp_path).publisher(store=store) as publisher:
        broken = checkpoint(tmp_path / "c", 0)
        (broken / "model.safetensors").write_bytes(b"\0" * 100)
        with pytest.raises(CorruptObject):
            publisher.publish(broken)
        assert publisher.publish(checkpoint(tmp_path / "d", 1)).ref.number == 0


class Rewriting(MemoryStore):
    """Away when a file is first uploaded; when it is back, the trainer has written its next checkpoint over it."""

    def __init__(self, rewrite: Callable[[], object]) -> None:
        super().__init__()
        self._rewrite = rewrite
        self._asked = 0

    def put_named(self, key_of: Callable[[Digest], str], body: Body, *, cancelled: Cancelled = never) -> Receipt:
        if isinstance(body, Path) and body.suffix == ".safetensors":
            self._asked += 1
            if self._asked == 1:
                raise Unavailable("away")
            if self._asked == 2:
                self._rewrite()
        return super().put_named(key_of, body, cancelled=cancelled)


def test_a_directory_that_is_written_over_while_it_is_published_is_refused(tmp_path: Path) -> None:
    """Its bytes would not be those whose digests the version states, and no replica could take it."""
    latest = checkpoint(tmp_path / "latest", 0)
    following = (checkpoint(tmp_path / "following", 1) / "model.safetensors").read_bytes()
    store = Rewriting(lambda: (latest / "model.safetensors").write_bytes(following))
    with Place.on_disk(tmp_path).publisher(store=store) as publisher:
        with pytest.raises(CorruptObject, match=r"latest/.*was changed while it was published"):
            publisher.publish(latest)
        publication = publisher.publish(latest)
        assert publication.ref.number == 0
        assert publication.weights_digest == weights_digest(map(spec_of, host_tensors(weights(1))))


class Endless(MemoryStore):
    """Takes weights until nobody wants it to, from the moment on at which the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.endless = False
        self.given_up = 0

    def put_named(self, key_of: Callable[[Digest], str], body: Body, *, cancelled: Cancelled = never) -> Receipt:
        if self.endless and isinstance(body, Path) and body.suffix == ".safetensors":
            while not cancelled():
                time.sleep(0.01)
            self.given_up += 1
            raise PutCancelled("given up")
        return super().put_named(key_of, body, cancelled=cancelled)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_deadline_ends_an_upload_under_way(tmp_path: Path, ahead: bool) -> None:
    """Whether it was begun ahead, as that of a directory's files, or when all was encoded."""
    store = Endless()
    with Place.on_disk(tmp_path).publisher(store=store) as publisher:
        publisher.publish(checkpoint(tmp_path / "b", 0))
        store.endless = True
        with pytest.raises(Unavailable, match="no answer before the deadline of 1 s"):
            publisher.publish(checkpoint(tmp_path / "c", 1) if ahead else weights(1), timeout=1)
        assert store.given_up
        store.endless = False
        assert publisher.publish(checkpoint(tmp_path / "d", 1)).ref.number == 1
