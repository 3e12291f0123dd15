"""The names of `stitch` are a promise."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import stitch
from stitch.core import errors

pytestmark = pytest.mark.unit

NAMES = {
    "AsyncRolloutClient",
    "Constraint",
    "CorruptObject",
    "Fenced",
    "InvalidRequest",
    "LogDiverged",
    "OutcomeUnknown",
    "Publication",
    "Publisher",
    "Rejected",
    "RolloutClient",
    "StitchError",
    "Unavailable",
    "VersionConflict",
    "VersionGone",
    "VersionRef",
    "WeightVersionNotReady",
    "open_log",
    "open_store",
    "replay",
}


def test_the_names_are_these() -> None:
    assert set(stitch.__all__) == NAMES
    assert list(stitch.__all__) == sorted(stitch.__all__)
    assert set(dir(stitch)) >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_there_and_documented(name: str) -> None:
    assert (getattr(stitch, name).__doc__ or "").strip()


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = stitch.nonsense


def test_the_error_tree_is_as_promised() -> None:
    for name in ("Fenced", "VersionConflict", "WeightVersionNotReady", "VersionGone", "CorruptObject", "InvalidRequest"):
        assert issubclass(getattr(stitch, name), stitch.Rejected)
    for name in ("Rejected", "LogDiverged", "OutcomeUnknown", "Unavailable"):
        error = getattr(stitch, name)
        assert error is getattr(errors, name)
        assert issubclass(error, stitch.StitchError)
        assert error is stitch.Rejected or not issubclass(error, stitch.Rejected)


def test_arguments_are_as_promised() -> None:
    opened = inspect.signature(stitch.Publisher.open).parameters
    promised = ["policy", "run", "log", "store", "boot_version", "base", "take_over", "timeout"]
    assert [name for name in opened if name in promised] == promised
    assert opened["take_over"].default is False
    published = list(inspect.signature(stitch.Publisher.publish).parameters)
    assert published == ["self", "weights", "number", "kind", "metadata", "probes", "timeout"]
    asked = inspect.signature(stitch.AsyncRolloutClient.generate).parameters
    promised = ["prompt", "input_ids", "sampling_params", "channel", "min_version", "exact_version", "max_lag", "wait", "session"]
    assert [name for name in asked if name in promised] == promised
    assert list(inspect.signature(stitch.RolloutClient).parameters) == ["url", "policy", "run", "token"]
    assert list(inspect.signature(stitch.replay).parameters) == ["log", "until"]


def test_importing_the_package_loads_nothing() -> None:
    code = (
        "import sys, stitch; print(sorted(m for m in sys.modules if m.startswith('stitch') or m in ('numpy', 'aiohttp', 'torch')))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['stitch']"


def test_publishing_needs_no_optional_extra() -> None:
    assert loaded_by("stitch.Publisher, stitch.RolloutClient", "torch", "boto3", "aiokafka") == set()


def loaded_by(expression: str, *packages: str) -> set[str]:
    """The modules of these packages that a fresh interpreter has after the expression."""
    code = f"import sys, stitch; {expression}; print(*(m for m in sys.modules if m.partition('.')[0] in {packages}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
