"""Where fixtures come from: each server's live in its own module under tests/support."""

from __future__ import annotations

pytest_plugins = [
    "tests.support.kafka",
    "tests.support.s3",
    "tests.support.sglang",
]
