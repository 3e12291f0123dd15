"""The probe finds nothing in stores that are right, and each flaw in one that is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stitch.core.errors import Unavailable
from stitch.store import s3_calls
from stitch.store.directory import DirectoryStore
from stitch.store.faulty import ALWAYS, Fault, FaultyStore, Kind
from stitch.store.memory import MemoryStore
from stitch.store.opening import open_store
from stitch.store.port import BlobStore
from stitch.store.probe import Probe, probe
from tests.support.s3 import BUCKET, REGION
from tests.support.s3_unsafe import Flaw, unsafe_s3


def is_sound(told: Probe) -> bool:
    measured = told.put_mib_s > 0 and told.get_mib_s > 0 and told.latency_ms > 0
    return told.conditional_writes and told.checksums and told.read_back and measured and told.findings == ()


@pytest.mark.unit
@pytest.mark.parametrize("make", [lambda _: MemoryStore(), DirectoryStore], ids=["memory", "directory"])
def test_a_local_store_is_sound(make: Callable[[Path], BlobStore], tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    told = probe(store)
    assert is_sound(told)
    assert told.clock_skew_s is None
    assert list(store.entries("")) == []


@pytest.mark.unit
def test_an_object_that_does_not_come_back_is_found() -> None:
    store = FaultyStore(MemoryStore(), Fault(call="get", key="sample", kind=Kind.FLIP, at=77))
    told = probe(store)
    assert not told.read_back
    assert ["does not come back" in text for text in told.findings] == [True]


@pytest.mark.unit
def test_a_store_that_is_away_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        probe(FaultyStore(MemoryStore(), Fault(call="stat", kind=Kind.FAIL_BEFORE, times=ALWAYS)))


@pytest.mark.integration
@pytest.mark.s3
def test_versitygw_is_sound(s3_store_url: str) -> None:
    with open_store(s3_store_url) as store:
        told = probe(store)
        assert is_sound(told), told
        assert told.clock_skew_s is not None
        assert abs(told.clock_skew_s) < 60
        assert list(store.entries("")) == []


def probed(*flaws: Flaw) -> tuple[Probe, list[str]]:
    """What is told of a server with these flaws, and what is left on it."""
    with unsafe_s3(*flaws) as server, open_store(f"s3://{BUCKET}/p?endpoint={server.endpoint}&region={REGION}") as store:
        told = probe(store)
        return told, list(server.objects)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_calls, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(s3_calls, "LONGEST_PAUSE_S", 0.01)


@pytest.mark.integration
@pytest.mark.usefixtures("s3_environment")
def test_the_fake_without_a_flaw_is_sound() -> None:
    told, left = probed()
    assert is_sound(told), told
    assert left == []


@pytest.mark.integration
@pytest.mark.usefixtures("s3_environment")
@pytest.mark.parametrize(
    ("flaw", "spoilt", "finding"),
    [
        (Flaw.IGNORES_CONDITIONS, {"conditional_writes"}, "conditional writes do not hold"),
        (Flaw.LOOKS_THEN_WRITES, {"conditional_writes"}, "conditional writes do not hold"),
        (Flaw.IGNORES_CONDITIONS_IN_PARTS, {"conditional_writes"}, "upload in parts overwrites"),
        (Flaw.IGNORES_CHECKSUMS, {"checksums"}, "checksum is wrong"),
        (Flaw.KEEPS_TRAILERS, {"read_back"}, "does not come back as it was written"),
        (Flaw.FORBIDS_LISTING, set(), "listing objects is refused"),
        (Flaw.FORBIDS_DELETING, set(), "deleting objects fails"),
        (Flaw.FORBIDS_WRITING, {"conditional_writes", "checksums", "read_back"}, "writing objects is refused"),
        (Flaw.CLOCK_IS_OFF, set(), "clock is +36"),
    ],
)
def test_each_flaw_is_found(flaw: Flaw, spoilt: set[str], finding: str) -> None:
    told, left = probed(flaw)
    found = {name for name in ("conditional_writes", "checksums", "read_back") if not getattr(told, name)}
    assert found >= spoilt, told
    assert any(finding in text for text in told.findings), told
    if flaw is not Flaw.KEEPS_TRAILERS:  # which no object survives
        assert found == spoilt, told
        assert len(told.findings) <= 2, told
    assert (left != []) is (flaw is Flaw.FORBIDS_DELETING)
