"""Runs one bench and prints its result as one JSON object, last. Progress goes to stderr."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence

import pytest

import tests.bench
from tests.bench import Options


def names() -> list[str]:
    """The benches that there are."""
    found = (module.name for module in pkgutil.iter_modules(tests.bench.__path__))
    return sorted(name for name in found if not name.startswith(("_", "test_")))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("name", choices=names(), metavar="NAME", help="one of: " + ", ".join(names()))
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object to stdout")
    parser.add_argument("--small", action="store_true", help="little work, for a look whether it runs")
    given = parser.parse_args(arguments)
    bench = importlib.import_module(f"tests.bench.{given.name}")
    try:
        result = bench.run(Options(small=given.small))
    except pytest.skip.Exception as missing:  # how tests/support says that a server cannot be had
        print(f"{given.name}: {missing}", file=sys.stderr)
        return 3
    if not given.json:
        for key, value in result.items():
            print(f"{key:>32}  {value}")
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
