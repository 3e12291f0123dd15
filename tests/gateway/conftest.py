"""The scene as a fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.gateway.scene import Scene, scene


@pytest.fixture
async def play() -> AsyncIterator[Scene]:
    async with scene() as it:
        yield it
