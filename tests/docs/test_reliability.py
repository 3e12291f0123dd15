"""docs/reliability.md promises nothing that no test shows: each test that it names exists, and what must be there is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([a-z0-9_/]+::test_[a-z0-9_]+)`", PAGE)))

REPORTS = {
    "aiokafka": (911, 1101, 1017, 510, 1145, 703, 1155, 773),
    "quix-streams": (1017, 1114, 817),
    "kafka-flow": (850,),
    "faststream": (2618,),
    "fastavro": (401, 489),
    "boto3": (4435, 4366),
    "httpcore": (1093,),
    "uvicorn": (451,),
    "iceberg": (2317,),
}


@cache
def _tests_of(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for name in NAMED:
        file, _, function = name.partition("::")
        path = TESTS / f"{file}.py"
        if not path.is_file() or function not in _tests_of(path):
            missing.append(name)
    assert missing == [], "renamed or removed: docs/reliability.md must follow"


def test_whatever_looks_like_a_test_is_named_in_full() -> None:
    assert set(re.findall(r"`([^`]*test_[^`]*)`", PAGE)) == set(NAMED)


@pytest.mark.parametrize("report", [f"{project} {number}" for project, numbers in REPORTS.items() for number in numbers])
def test_every_report_has_a_test_or_a_reason(report: str) -> None:
    (row,) = re.findall(rf"^\| {re.escape(report)} \|.*$", PAGE, re.MULTILINE)
    *_, answer, _ = row.split("|")
    assert "::test_" in answer or len(answer.split()) > 5


@pytest.mark.parametrize("trace", [f"D{number}" for number in range(1, 22)])
def test_every_trace_of_the_review_has_its_test(trace: str) -> None:
    (row,) = re.findall(rf"^\| {trace} \|.*$", PAGE, re.MULTILINE)
    assert "::test_" in row


@pytest.mark.parametrize("part", ["trainer", "replica", "engine", "gateway", "log", "brokers", "store"])
def test_every_part_of_the_system_has_its_failures(part: str) -> None:
    sections = re.findall(r"^### (.*)\n((?:(?!^##).*\n)*)", PAGE, re.MULTILINE)
    (text,) = (text for title, text in sections if part in title)
    assert text.count("::test_") >= 3


def test_every_table_has_as_many_cells_as_its_head() -> None:
    for table in re.findall(r"(?:^\|.*\|\n)+", PAGE, re.MULTILINE):
        rows = table.splitlines()
        assert {row.count("|") for row in rows} == {rows[0].count("|")}, rows[0]
