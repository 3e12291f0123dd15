"""Traces of the protocol's review at the publisher; docs/reliability.md lists where each of the others is held."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.core.errors import UnreadableEvent
from stitch.core.events import FORMAT_LEVEL, FormatRaised
from stitch.core.ids import EventId, WriterId
from stitch.log.opening import open_log
from stitch.log.port import Draft, Stream
from stitch.store.opening import open_store
from stitch.trainer.portal import LoopThread
from stitch.weights.safetensors import write_checkpoint
from stitch.wire.codec import encode
from tests.trainer.places import Place, weights

pytestmark = pytest.mark.unit


def test_d4_equal_files_of_two_versions_are_two_objects(tmp_path: Path) -> None:
    """A tokenizer is the same in every version. Were it one object, a collector could take it from under the newest of them."""
    place = Place.in_memory()
    with place.publisher() as publisher:
        for number in range(2):
            folder = tmp_path / str(number)
            write_checkpoint(folder, weights(number))
            (folder / "tokenizer.json").write_text("{}")
            publisher.publish(folder, kind="full")

    files = [{file.key for file in (*m.weights, *m.files)} for m in (place.manifest(0), place.manifest(1))]
    tokenizers = [{file.blake3 for file in place.manifest(n).files if file.path == "tokenizer.json"} for n in (0, 1)]
    assert tokenizers[0] == tokenizers[1]
    assert files[0].isdisjoint(files[1])
    with open_store(place.store_url) as store:
        for key in files[0]:
            store.delete(key)  # as a collector would, once version 0 is retired
    tensors, carried = place.read_back(1)
    assert carried["tokenizer.json"] == b"{}"
    assert set(tensors) == set(weights(1))


def test_d4_a_number_that_is_published_again_in_a_later_epoch_has_objects_of_its_own() -> None:
    """The bytes of a dead attempt at a number may be collected while the next attempt at it is under way."""
    place = Place.in_memory()
    with place.publisher() as publisher:
        publisher.publish(weights(0))
        publisher.publish(weights(1))
    with place.publisher(boot_version=0) as publisher:
        publisher.publish(weights(1))
    first, second = place.manifest(1), place.manifest(2)
    assert (first.epoch, second.epoch) == (1, 2)
    assert {file.key for file in first.weights}.isdisjoint(file.key for file in second.weights)


def test_d13_a_publisher_stops_at_a_format_level_beyond_its_own() -> None:
    """What it would write could be judged by rules that it does not know."""
    place = Place.in_memory()
    raised = encode(FormatRaised(level=FORMAT_LEVEL + 1, event_id=EventId("f"), writer=WriterId("w")), source="a later release")

    async def raise_level() -> None:
        async with open_log(place.log_url) as log:
            await log.append(Stream.PUBLICATIONS, Draft(key=raised.key, value=raised.value, headers=raised.headers))

    loop = LoopThread()
    with place.publisher() as publisher:
        publisher.publish(weights(0))
        loop.call(raise_level)
        with pytest.raises(UnreadableEvent, match="upgrade it"):
            publisher.publish(weights(1))
    with pytest.raises(UnreadableEvent, match="upgrade it"), place.publisher():
        pass
    loop.close()
