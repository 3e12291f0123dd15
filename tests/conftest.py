"""Where fixtures come from: each server's live in its own module under tests/support."""

from __future__ import annotations

import os

from hypothesis import settings

# A busy machine is no counterexample; and in CI a run tests the same examples each time.
settings.register_profile("stitch", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("stitch")

pytest_plugins = [
    "tests.support.kafka",
    "tests.support.s3",
    "tests.support.sglang",
]
