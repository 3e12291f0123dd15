"""How many versions are built on each: kept as versions come and go, so that nobody looks at all of them to retire one."""

from __future__ import annotations

from immutables import Map

from stitch.core.events import RunVersion


def counted(dependents: Map[RunVersion, int], link: RunVersion | None, by: int) -> Map[RunVersion, int]:
    """With `by` more that are built on `link` directly; only what is not zero is held."""
    if link is None:
        return dependents
    count = dependents.get(link, 0) + by
    return dependents.set(link, count) if count else dependents.delete(link)
