"""The rooms of the house, and which of them may look into which. Read from the source, so nothing is imported here."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.unit

ROOT: Final = Path(__file__).resolve().parent.parent / "stitch"
MODULE_LINES: Final = 500
PORTS: Final = frozenset({"log", "store", "weights", "engines", "pools"})
ABOVE_PORTS: Final = frozenset({"core", "wire", "http"}) | PORTS
ALLOWED: Final = {
    "core": frozenset[str](),
    "wire": frozenset({"core"}),
    "log": frozenset({"core", "wire"}),
    "store": frozenset({"core"}),
    "weights": frozenset({"core", "store"}),
    "engines": frozenset({"core", "weights"}),  # the reference engine reads checkpoints
    "pools": frozenset({"core"}),
    "http": frozenset({"core", "engines"}),  # an engine's adapter declares its routes
    "replica": ABOVE_PORTS,
    "gateway": ABOVE_PORTS,
    "trainer": ABOVE_PORTS,
    "audit": ABOVE_PORTS,
    "operators": ABOVE_PORTS,
    "cli": ABOVE_PORTS | {"replica", "gateway", "trainer", "audit", "operators"},
}
"""Besides itself. `cli` wires everything; `stitch` itself, the public surface, may name any room but `cli`."""
ADAPTERS: Final = {
    "log": ("kafka", frozenset({"aiokafka"})),
    "store": ("s3", frozenset({"boto3", "botocore"})),
    "weights": ("numba", frozenset({"numba"})),
}
"""Modules of these rooms whose names begin so are adapters: they may import their optional packages, and only a function of
another module may import them."""
OPTIONAL: Final = frozenset(
    {"aiokafka", "boto3", "botocore", "numba", "xxhash", "torch", "sglang", "vllm", "modal", "kubernetes", "opentelemetry"}
)
CORE_MAY_USE: Final = frozenset({"blake3", "immutables", "rfc8785"})
CORE_MAY_NOT_USE: Final = frozenset(
    {
        "asyncio",
        "http",
        "os",
        "random",
        "secrets",
        "select",
        "shutil",
        "socket",
        "sqlite3",
        "subprocess",
        "threading",
        "time",
        "uuid",
    }
)


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else "stitch"


def package_of(path: Path) -> str:
    return ".".join(("stitch", *path.relative_to(ROOT).parts[:-1]))


def imports(path: Path, node: ast.AST | None = None, *, lazy: bool) -> Iterator[tuple[str, int]]:
    """Every module that is imported, with its line. Those inside functions are `lazy`; those for type checkers alone count not."""
    for child in ast.iter_child_nodes(node or tree(path)):
        match child:
            case ast.Import():
                yield from ((alias.name, child.lineno) for alias in child.names)
            case ast.ImportFrom():
                yield from ((name, child.lineno) for name in _from(path, child))
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() if not lazy:
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) if not lazy:
                continue
            case _:
                yield from imports(path, child, lazy=lazy)


def _from(path: Path, node: ast.ImportFrom) -> Iterator[str]:
    module = node.module or ""
    if node.level:
        above = package_of(path).split(".")
        module = ".".join([*above[: len(above) - node.level + 1], *filter(None, [module])])
    # `from stitch import core` names a room just as `from stitch.core import x` does.
    yield from (f"{module}.{alias.name}" for alias in node.names) if module == "stitch" else (module,)


def named(paths: list[Path]) -> list[object]:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def test_every_room_has_its_rules() -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert rooms <= set(ALLOWED) | {"schemas"}


@pytest.mark.parametrize("path", named(modules()))
def test_rooms_look_into_no_other_than_they_may(path: Path) -> None:
    own = room(path)
    allowed = set(ALLOWED) - ({"cli"} if path.name == "__init__.py" else set()) if own == "stitch" else ALLOWED[own] | {own}
    wrong = [
        f"line {line}: {name}"
        for name, line in imports(path, lazy=True)
        if name.startswith("stitch.") and (other := name.split(".")[1]) in ALLOWED and other not in allowed
    ]
    assert not wrong, f"{own} may not import {wrong}"


@pytest.mark.parametrize("path", named([path for path in modules() if room(path) != "stitch"]))
def test_rooms_do_not_import_the_public_surface(path: Path) -> None:
    """It imports them; the other way round would be a circle."""
    rooms = {f"stitch.{name}" for name in ALLOWED}
    wrong = [
        f"line {line}: {name}"
        for name, line in imports(path, lazy=True)
        if name.split(".")[0] == "stitch" and ".".join(name.split(".")[:2]) not in rooms
    ]
    assert not [w for w in wrong if "__version__" not in w]


def adapter(name: str) -> frozenset[str] | None:
    """The optional packages of an adapter, by its full module name; None for any other module."""
    _, own, *rest = [*name.split("."), "", ""]
    prefix, packages = ADAPTERS.get(own, ("", frozenset()))
    return packages if prefix and rest[0].startswith(prefix) else None


@pytest.mark.parametrize("path", named(modules()))
def test_optional_packages_are_imported_where_they_are_needed_only(path: Path) -> None:
    """A gateway installs without torch, a replica without Kafka."""
    own = adapter(f"{package_of(path)}.{path.stem}")
    eager = list(imports(path, lazy=False))
    wrong = [f"line {n}: {name}" for name, n in eager if name.split(".")[0] in OPTIONAL - (own or frozenset())]
    wrong += [f"line {n}: {name}" for name, n in eager if own is None and adapter(name) is not None]
    assert not wrong


def test_rooms_have_an_order() -> None:
    """No circle among the rules themselves."""
    below = {name: set(allowed) for name, allowed in ALLOWED.items()}
    while below:
        lowest = {name for name, allowed in below.items() if not allowed}
        assert lowest, f"a circle among {sorted(below)}"
        below = {name: allowed - lowest for name, allowed in below.items() if name not in lowest}


@pytest.mark.parametrize("path", named([path for path in modules() if room(path) == "core"]))
def test_core_is_pure(path: Path) -> None:
    """No clock, no chance, no input or output: what it decides follows from what it is given."""
    for name, line in imports(path, lazy=True):
        top = name.split(".")[0]
        assert top == "stitch" or top in CORE_MAY_USE or top in sys.stdlib_module_names, f"line {line}: {name}"
        assert top not in CORE_MAY_NOT_USE, f"line {line}: {name}"
    calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    for call in calls:
        called = ast.unparse(call.func)
        assert called not in {"open", "print", "input"}, f"line {call.lineno}: {called}"
        assert not called.endswith((".now", ".utcnow", ".today", ".read_text", ".read_bytes", ".write_text", ".write_bytes")), (
            f"line {call.lineno}: {called}"
        )
    assert not [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.Global)]


@pytest.mark.parametrize("path", named(modules()))
def test_modules_are_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MODULE_LINES, f"{lines} lines: this is two modules"


@pytest.mark.parametrize("path", named(modules()))
def test_no_star_imports_and_every_module_says_what_it_is_for(path: Path) -> None:
    stars = [n.lineno for n in ast.walk(tree(path)) if isinstance(n, ast.ImportFrom) and any(a.name == "*" for a in n.names)]
    assert not stars
    assert not tree(path).body or ast.get_docstring(tree(path))


def test_the_check_sees_what_it_is_there_for(tmp_path: Path) -> None:
    """On source that breaks each rule."""
    path = tmp_path / "x.py"
    path.write_text(
        "import torch\nfrom stitch import gateway\n"
        "def f():\n    import boto3\n    from stitch.replica.gate import Gate\n"
        "if TYPE_CHECKING:\n    import aiokafka\n"
    )
    eager = {name for name, _ in imports(path, ast.parse(path.read_text()), lazy=False)}
    everything = {name for name, _ in imports(path, ast.parse(path.read_text()), lazy=True)}
    assert eager == {"torch", "stitch.gateway"}
    assert everything == eager | {"boto3", "stitch.replica.gate", "aiokafka"}
