"""`stitch pull` as an operator and a script meet it, over SQLite and a folder, and over Kafka and S3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from stitch.cli import pull as command_of_pull
from stitch.cli.progress import stoppable
from stitch.cli.sizes import Size, size_text
from stitch.core.errors import Unavailable
from stitch.store.faulty import Fault, FaultyStore, Kind
from stitch.store.opening import open_store
from stitch.weights.staging import StagingCancelled
from tests.operators.published import CONFIG, Place

pytestmark = pytest.mark.integration


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.on_disk(tmp_path)


def assert_is_version(place: Place, directory: Path, number: int) -> None:
    found = load_file(directory / "model.safetensors")
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in place.weights[number].items()
    }
    assert (directory / "config.json").read_bytes() == CONFIG


def test_a_checkpoint_for_programs(place: Place, tmp_path: Path) -> None:
    told = place.command("pull", "latest", tmp_path / "out", "--json")
    assert told.code == 0
    assert told.json == {
        "version": "r1/weight_v000003",
        "directory": str(tmp_path / "out"),
        "weights_digest": place.made.version(3).manifest.weights_digest,
        "weights": ["model.safetensors"],
        "files": ["config.json"],
        "bytes": told.json["bytes"],
        "bytes_downloaded": told.json["bytes_downloaded"],
    }
    assert_is_version(place, tmp_path / "out", 3)


def test_what_was_pulled_publishes_as_the_version_that_it_is(place: Place, tmp_path: Path) -> None:
    told = place.command("pull", "3", tmp_path / "out")
    assert told.code == 0
    assert "pulled r1/weight_v000003 of policy p into" in told.out
    again = place.command("publish", tmp_path / "out", "--run", "r1", "--number", "3", "--json")
    assert again.code == 0, again.err
    assert again.json["weights_digest"] == place.made.version(3).manifest.weights_digest
    assert again.json["manifest_key"] == place.made.version(3).manifest.key, "the very publication, not another one"
    assert place.command("diff", "latest", "3", "--json").json["way"] == "same"


def test_shards(place: Place, tmp_path: Path) -> None:
    told = place.command("pull", "1", tmp_path / "out", "--max-shard-size", "2kB")
    assert told.code == 0
    assert "4 shards and config.json" in told.out
    assert len(list((tmp_path / "out").glob("model-0000?-of-00004.safetensors"))) == 4


def test_an_interruption_says_where_to_go_on_from(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = place.made.manifest(0).weights[0].key

    def cutting(url: str) -> FaultyStore:
        return FaultyStore(open_store(url), Fault(call="download", kind=Kind.CUT, key=key, at=1000))

    monkeypatch.setattr(command_of_pull, "open_store", cutting)
    told = place.command("pull", "latest", tmp_path / "out")
    assert told.code == 1
    assert f"What was brought so far is in {tmp_path / '.out.stitch-pull'}; the same command goes on from it." in told.err
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert place.command("pull", "latest", tmp_path / "out").code == 0
    assert_is_version(place, tmp_path / "out", 3)
    assert not (tmp_path / ".out.stitch-pull").exists()


def test_a_directory_that_is_not_empty_is_left_alone(place: Place, tmp_path: Path) -> None:
    told = place.command("pull", "latest", tmp_path)
    assert (told.code, told.err.count("\n")) == (1, 1)
    assert "is not empty" in told.err


# --- manners -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"), [("5GB", 5 * 10**9), ("4GiB", 4 << 30), ("1000", 1000), ("1.5 kb", 1500), ("2k", 2000), ("7MiB", 7 << 20)]
)
def test_sizes_as_people_write_them(text: str, count: int) -> None:
    assert Size().convert(text, None, None) == count


@pytest.mark.parametrize("text", ["", "x", "5XB", "-1", "0", "1e9"])
def test_what_is_no_size(place: Place, tmp_path: Path, text: str) -> None:
    told = place.command("pull", "latest", tmp_path / "out", f"--max-shard-size={text}")
    assert told.code == 2
    assert "--max-shard-size" in told.err


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (5_600_000, "5.34 MiB"), (1023 << 20, "1023 MiB")]
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert size_text(count) == text


def test_the_first_signal_asks_and_the_handlers_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def work() -> None:
        with stoppable() as stopped:
            assert not stopped()
            os.kill(os.getpid(), signal.SIGTERM)
            while not stopped():
                time.sleep(0.001)
            raise StagingCancelled("x")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGTERM) is before
    assert "again to stop at once" in capfd.readouterr().err


def test_a_second_signal_ends_the_process_at_once() -> None:
    lines = ("import time", "from stitch.cli.progress import stoppable", "with stoppable():", "    print('ready', flush=True)")
    code = "\n".join((*lines, "    while True: time.sleep(0.01)"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stderr.readline() == "\n"
        assert process.stderr.readline().startswith("stopping once")
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


STUBBORN = """
import asyncio, sys, time
from stitch.cli.options import run

async def work():
    thread = asyncio.create_task(asyncio.to_thread(time.sleep, 600))
    while True:
        try:
            print("waiting", flush=True)
            await asyncio.shield(thread)
        except asyncio.CancelledError:
            pass

run(work(), patience=int(sys.argv[1]))
"""


@pytest.mark.parametrize("patience", [1, 2])
def test_one_signal_more_ends_a_command_that_waits_for_a_thread(patience: int) -> None:
    """Python itself would wait for the thread, which knows of no signal."""
    with subprocess.Popen([sys.executable, "-c", STUBBORN, str(patience)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(patience):
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


def test_other_errors_pass() -> None:
    with pytest.raises(Unavailable), stoppable():
        raise Unavailable("x")


def test_a_killed_pull_goes_on(place: Place, tmp_path: Path) -> None:
    """With SIGKILL at whatever moment it comes, twice; then to the end."""
    arguments = [sys.executable, "-m", "stitch", "pull", "latest", str(tmp_path / "out"), *place.options]
    for pause in (0.0, 0.3):
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not (tmp_path / ".out.stitch-pull").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(pause if process.poll() is None else 0)
        process.kill()
        process.wait()
        if (tmp_path / "out").exists():
            break
    if not (tmp_path / "out").exists():
        told = place.command("pull", "latest", tmp_path / "out")
        assert told.code == 0, told.err
    assert_is_version(place, tmp_path / "out", 3)


# --- the real thing ------------------------------------------------------------------------------------------------------------


@pytest.mark.kafka
@pytest.mark.s3
def test_over_kafka_and_s3(kafka_log_url: str, s3_store_url: str, tmp_path: Path) -> None:
    place: Any = Place(kafka_log_url, s3_store_url)
    assert place.command("pull", "latest", tmp_path / "out").code == 0
    assert_is_version(place, tmp_path / "out", 3)
    verified = place.command("verify", "--all", "--deep", "--json")
    assert verified.code == 0
    assert [row["tensors"] for row in verified.json["versions"]] == [6] * 4
    assert place.command("diff", "0", "1", "--json").json["way"] == "delta"
    assert place.command("diff", "0", "latest", "--json").json["way"] == "values"
    place.spoil(place.made.manifest(2).weights[0].key)
    damaged = place.command("verify", "latest", "--deep")
    assert damaged.code == 1
    assert "r1/weight_v000002: delta.safetensors: object " in damaged.out
