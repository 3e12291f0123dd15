"""Real SGLang on CPUs for tests: an environment of its own, installed once, and one server for a whole run."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.support import provision

VERSION: Final = "0.5.23"
STAMP: Final = f".ok-sglang-{VERSION}-v1"
INSTALL_TIMEOUT_S: Final = 1_200.0
MODELS_TIMEOUT_S: Final = 180.0
"""Importing torch and transformers takes most of it."""
READY_TIMEOUT_S: Final = 300.0
"""Three processes import torch; a minute on two idle cores."""
SEEDS: Final = (11, 12, 13)
"""One checkpoint each: versions 0, 1, 2 of one policy."""

# SGLang's own pins pull in the CUDA builds, so what it imports on a CPU is named here and SGLang comes without dependencies.
TORCH: Final = ("torch==2.13.0", "torchvision==0.28.0", "transformers==5.19.0", "tokenizers==0.23.2")
PINNED: Final = (
    "apache-tvm-ffi==0.1.11",
    "blobfile==3.0.0",
    "compressed-tensors==0.18.0",
    "kernels>=0.14.1,<0.15",
    "numba==0.65.1",
    "openai-harmony==0.0.4",
    "openai==2.8.0",
    "outlines==0.1.11",
    "sentencepiece==0.2.1",
    "soundfile==0.13.1",
    "timm==1.0.25",
    "xgrammar==0.2.7",
)
FREE: Final = (
    "aiohttp",
    "anthropic",
    "build",
    "datasets",
    "distro",
    "einops",
    "easydict",
    "fastapi",
    "gguf",
    "interegular",
    "IPython",
    "llguidance",
    "mistral_common",
    "modelscope",
    "msgspec",
    "ninja",
    "nvidia-ml-py",
    "orjson",
    "partial_json_parser",
    "prometheus-client",
    "psutil",
    "py-spy",
    "pybase64",
    "python-multipart",
    "pyzmq",
    "scipy",
    "setproctitle",
    "tiktoken",
    "torch_memory_saver",
    "uvicorn",
    "uvloop",
    "watchfiles",
    "xxhash",
    "zstandard",
)

# The registry's torchvision is a CUDA build: it expects operators that a CPU build of torch does not have, so they are
# declared first.
_OPERATORS_MODULE: Final = "_stitch_declare_operators"
_DECLARE_OPERATORS: Final = """
import importlib.abc
import sys


class DeclareFirst(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.stitch_operators = self  # keeps the library, which would take its operators away with it
        return None


sys.meta_path.insert(0, DeclareFirst())
"""
# There is no CPU build of the kernels; their names are imported, but the native path of torch calls none.
_NO_KERNELS: Final = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} does not exist on a CPU")

    return absent
"""


class CannotProvide(Exception):
    """No SGLang here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangServer:
    """`models`: checkpoint directories of versions 0, 1, 2; the server began with the first, under the label 0."""

    url: str
    models: tuple[Path, ...]
    process: provision.Running


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def wheel_folder() -> str | None:
    """Where a CPU build of torch may lie: UV_FIND_LINKS, or a folder of wheels beside the checkout."""
    given = os.environ.get("UV_FIND_LINKS")
    if given:
        return given
    beside = Path(__file__).resolve().parents[3] / "shared" / "wheels"
    return str(beside) if beside.is_dir() else None


def _run(command: Sequence[str | Path], timeout: float, what: str) -> None:
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise CannotProvide(f"{what} did not finish within {timeout:.0f} s") from None
    if done.returncode != 0:
        raise CannotProvide(f"{what} failed: {(done.stdout + done.stderr)[-1500:]}")


def environment() -> Path:
    """The virtual environment, made where it is missing or half made. It stays in place: scripts in it name their path."""
    folder = provision.cache_folder() / "sglang"
    with provision.file_lock(provision.cache_folder() / "sglang.lock"):
        if not (folder / STAMP).exists():
            _install(folder)
            (folder / STAMP).touch()
    return folder


def _install(folder: Path) -> None:
    uv = shutil.which("uv")
    if uv is None:
        raise CannotProvide("it is not installed, and there is no uv to install it with")
    shutil.rmtree(folder, ignore_errors=True)
    _run([uv, "venv", "-q", "--python", "3.11", folder], INSTALL_TIMEOUT_S, "making the environment")
    wheels = wheel_folder()
    install = [uv, "pip", "install", "-q", "--python", python_of(folder), *(["--find-links", wheels] if wheels else [])]
    _run([*install, *TORCH, *PINNED, *FREE], INSTALL_TIMEOUT_S, "installing what SGLang needs")
    _run([*install, "--no-deps", f"sglang=={VERSION}"], INSTALL_TIMEOUT_S, "installing SGLang")
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / f"{_OPERATORS_MODULE}.py").write_text(_DECLARE_OPERATORS)
    (site / f"{_OPERATORS_MODULE}.pth").write_text(f"import {_OPERATORS_MODULE}\n")
    (site / "sgl_kernel").mkdir()
    (site / "sgl_kernel" / "__init__.py").write_text(_NO_KERNELS)
    _run([python_of(folder), "-c", "import torchvision, sglang"], MODELS_TIMEOUT_S, "importing SGLang")


def make_models(python: Path, folder: Path, seeds: Sequence[int] = SEEDS) -> tuple[Path, ...]:
    """A checkpoint directory per seed."""
    directories = tuple(folder / f"qwen-{seed}" for seed in seeds)
    words = [word for directory, seed in zip(directories, seeds, strict=True) for word in (directory, str(seed))]
    _run([python, Path(__file__).with_name("tiny_qwen.py"), *words], MODELS_TIMEOUT_S, "making tiny models")
    return directories


def server_command(python: Path, model: Path, port: int) -> list[str | Path]:
    """What starts a server on a CPU; small enough for two to fit beside the tests."""
    options = {
        "--model-path": str(model),
        "--device": "cpu",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "bfloat16",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--mem-fraction-static": "0.1",
        "--max-total-tokens": "8192",
        "--max-running-requests": "16",
        "--weight-version": "0",
    }
    return [python, "-m", "sglang.launch_server", *(word for option in options.items() for word in option)]


def server_environment(python: Path) -> dict[str, str]:
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PATH": path}


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def running_server(folder: Path) -> Iterator[SglangServer]:
    """A server of this run's own, with its models and its log in `folder`."""
    python = python_of(environment())
    models = make_models(python, folder)
    port = provision.free_port()
    process = provision.start(
        server_command(python, models[0], port), output=folder / "sglang.log", name="sglang", env=server_environment(python)
    )
    try:
        url = f"http://127.0.0.1:{port}"
        provision.wait_until(lambda: is_ready(url), "SGLang is ready", timeout=READY_TIMEOUT_S, process=process)
        yield SglangServer(url=url, models=models, process=process)
    finally:
        process.stop()


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """The run's one SGLang server. A test leaves it resumed and without requests; what it loaded may stay."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(running_server(tmp_path_factory.mktemp("sglang")))
        except CannotProvide as reason:
            provision.unavailable("sglang", str(reason))
        yield server
