"""How a replica stages: into one buffer, by what changed, from an anchor that comes later; and what it does about damage."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stitch.core.events import AnchorAdded, Phase, Transition
from stitch.core.ids import Epoch, EventId, VersionNumber, WriterId
from stitch.core.manifest import Manifest, ManifestRef, StoredFile
from stitch.engines.reference.model import init, to_bf16
from stitch.log.events import append
from stitch.store.manifests import attempt_prefix, object_key, write_manifest
from stitch.store.opening import open_store
from stitch.weights import building
from stitch.weights.encode import encode_full
from stitch.weights.safetensors import WEIGHTS_FILE, TensorFile
from stitch.weights.staging import Verify
from tests.replica.world import POLICY, RUN, SMALL, Trainer, World, check_truth, misbehaving, ref, until
from tests.support.provision import eventually

pytestmark = [pytest.mark.integration, pytest.mark.chaos]


async def test_with_a_single_buffer_it_follows_and_answers_all_the_while(world: World) -> None:
    replica = await world.replica(single_buffer=True)
    async with world.trainer() as trainer:
        await replica.serves(ref(0))
        stop = asyncio.Event()
        answers: list[Any] = []

        async def ask() -> None:
            while not stop.is_set():
                status, answer = await replica.generate()
                assert status == 200, answer
                check_truth(world, answer)
                answers.append(answer)

        asking = asyncio.create_task(ask())
        for number in (1, 2, 3):
            version = await trainer.publish(kind="delta")
            assert version == ref(number)
            await replica.serves(version)
        stop.set()
        await asking
        assert answers
        folder = replica.config.workdir
        assert [path.name for path in (folder / "buffers").iterdir()] == ["a"]
        assert (await replica.info())["buffers"]["path"] == str(folder / "staged" / RUN / "weight_v000003")
    async with world.trainer(boot_version=1):  # back to what is not on the disk any more
        await replica.serves(ref(1))
        status, answer = await replica.generate()
        assert status == 200
        check_truth(world, answer)


async def test_with_a_single_buffer_an_engine_that_ends_meanwhile_is_given_the_new_version(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer is on its way when the engine dies: there is nothing that it could be started on, until the next life has the new
    version."""
    begun, go_on = threading.Event(), threading.Event()
    original = building.Chain.apply

    def apply(self: building.Chain, *arguments: Any, **options: Any) -> None:
        begun.set()
        go_on.wait(60)
        original(self, *arguments, **options)

    async with world.trainer() as trainer:
        replica = await world.replica(single_buffer=True, command=misbehaving())
        await replica.serves(ref(0))
        path = Path((await replica.info())["buffers"]["path"])
        monkeypatch.setattr(building.Chain, "apply", apply)
        await trainer.publish(kind="delta")
        await until(begun.is_set, "the buffer is on its way")
        assert not await asyncio.to_thread(path.exists)
        assert (await replica.info())["buffers"] == {"active": None, "path": None}
        status, answer = await replica.generate()
        assert status == 200
        check_truth(world, answer)
        with contextlib.suppress(aiohttp.ClientError):
            await replica.misbehave(die="now")
        await until(lambda: all(task.get_name() != "watchdog" for task in asyncio.all_tasks()), "the watchdog noticed")
        go_on.set()
        assert await replica.exit_code() == 70
        second = await world.replica(single_buffer=True)
        await second.serves(ref(1))
        status, answer = await second.generate()
        assert status == 200
        check_truth(world, answer)


async def test_what_a_scrub_finds_is_built_anew_and_loaded_again(world: World) -> None:
    replica = await world.replica(verify=Verify.INCREMENTAL, scrub_seconds=0.3)
    async with world.trainer() as trainer:
        for _ in range(2):
            await replica.serves(await trainer.publish(kind="delta"))
        info = await replica.info()
        before = info["activations"]
        _flip(Path(info["buffers"]["path"]) / WEIGHTS_FILE)

        async def again() -> bool:
            now = await replica.info()
            return bool(now["activations"] > before and now["gate"]["open"])

        await eventually(again, "the version is loaded again")
        assert world.of("replica-0", Transition.ACTIVATED)[-1].serving == ref(2)
        status, answer = await replica.generate()
        assert status == 200
        check_truth(world, answer)
        await replica.serves(await trainer.publish(kind="delta"))
    await replica.stop()


def _flip(path: Path) -> None:
    with TensorFile(path) as file:
        place = file.offset("output.bias") + 3
    with path.open("r+b") as handle:
        handle.seek(place)
        byte = handle.read(1)
        handle.seek(place)
        handle.write(bytes([byte[0] ^ 16]))


async def test_a_joiner_profits_from_an_anchor_that_is_added_while_it_loads(world: World) -> None:
    """The chain behind it is gone, so it cannot load; the anchor moves no channel, and yet it is enough. A replica that serves
    is not moved by it."""
    async with world.trainer() as trainer:
        serving = await world.replica("serving")
        weights = to_bf16(init(SMALL, 77))
        done = trainer.note(await asyncio.to_thread(lambda: trainer.publisher.publish(weights, kind="delta")))
        await serving.serves(done)
        (base,) = (world.folder / "store" / POLICY / RUN).glob("0.base-*/")
        shutil.rmtree(base)
        joiner = await world.replica("joiner")
        await until(lambda: bool(world.of("joiner", Transition.STAGE_FAILED)), "it cannot load")
        staged = len(world.of("serving", Transition.STAGE_STARTED))
        await _add_anchor(world, trainer, weights)
        await joiner.serves(done)
        status, answer = await joiner.generate()
        assert status == 200
        check_truth(world, answer)
        await serving.serves(await trainer.publish())
        assert len(world.of("serving", Transition.STAGE_STARTED)) == staged + 1
        assert [r.phase for r in world.of("serving", Transition.ACTIVATED)][-1] is Phase.SERVING


async def _add_anchor(world: World, trainer: Trainer, weights: Any) -> None:
    """A full form of version 1, as a compactor adds it."""
    with open_store(world.store_url) as store:
        scratch = world.folder / "anchor"
        encoded = encode_full(weights, scratch)
        prefix = attempt_prefix(POLICY, ref(1).run, VersionNumber(1), Epoch(1))
        stored = []
        for file in encoded.weights:
            receipt = store.put_named(lambda digest: object_key(prefix, digest), file.source)
            stored.append(StoredFile(path=file.path, key=receipt.key, size=receipt.size, blake3=receipt.blake3))
        config = store.put_named(lambda digest: object_key(prefix, digest), world.folder / f"base-{RUN}" / "config.json")
        manifest = Manifest(
            policy=POLICY,
            run=ref(1).run,
            number=VersionNumber(1),
            epoch=Epoch(1),
            kind=encoded.kind,
            codec=encoded.codec,
            parent=None,
            base=None,
            tensors=encoded.tensors,
            weights_digest=encoded.weights_digest,
            weights=tuple(stored),
            files=(StoredFile(path="config.json", key=config.key, size=config.size, blake3=config.blake3),),
        )
        anchor: ManifestRef = write_manifest(store, manifest)
    event = AnchorAdded(
        policy=POLICY,
        version=ref(1),
        event_id=EventId(uuid.uuid4().hex),
        writer=WriterId("compactor"),
        epoch=Epoch(1),
        manifest=anchor,
        size=1,
    )
    await append(world.events, event, source="test")
