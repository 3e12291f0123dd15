"""An S3 server for tests: the one that STITCH_TEST_S3 names (`s3://bucket/prefix?endpoint=URL`), else versitygw on loopback.

versitygw is built by Go into the cache once. It keeps its objects as files of a temporary folder, so a killed server can be
started again on them.
"""

from __future__ import annotations

import dataclasses
import http.client
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from stitch.store.opening import open_store
from stitch.store.s3 import parse_s3
from tests.support.provision import Running, cache_folder, file_lock, free_port, start, unavailable, wait_until

VERSITYGW: Final = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
BUILD_TIMEOUT_S: Final = 900.0
"""Two minutes on an idle machine, with all its modules to fetch."""
REGION: Final = "us-east-1"
BUCKET: Final = "stitch-test"
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret123"}
ISOLATION: Final = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""So that no profile of whoever runs the tests has a say."""


@dataclasses.dataclass(slots=True, kw_only=True)
class S3Server:
    """versitygw on a folder. It keeps port and objects over `kill` and `restart`. The bucket is there."""

    folder: Path
    port: int
    process: Running
    disk_bytes: int | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}?endpoint={self.endpoint}&region={REGION}"

    def kill(self) -> None:
        self.process.kill()

    def restart(self) -> None:
        self.process.stop()
        self.process = _launch(self.folder, self.port, self.disk_bytes)

    def stop(self) -> None:
        self.process.stop()


def start_s3(folder: Path, *, disk_bytes: int | None = None) -> S3Server:
    """A server on `folder`, which may hold another's objects. Whoever starts it stops it.

    With `disk_bytes` its objects lie on a disk of that size in memory, which nobody else sees and which ends with it.
    """
    port = free_port()
    (folder / "data" / BUCKET).mkdir(parents=True, exist_ok=True)  # to versitygw a folder is a bucket
    (folder / "iam").mkdir(exist_ok=True)
    return S3Server(folder=folder, port=port, process=_launch(folder, port, disk_bytes), disk_bytes=disk_bytes)


def _launch(folder: Path, port: int, disk_bytes: int | None = None) -> Running:
    options: list[str | Path] = [
        "--port",
        f"127.0.0.1:{port}",
        "--quiet",
        "--keep-alive",
        "--health",
        "/health",
        "--iam-dir",
        folder / "iam",
    ]
    command: list[str | Path] = [versitygw(), *options, "posix", folder / "data"]
    if disk_bytes is not None:
        mount = f'mount -t tmpfs -o size={disk_bytes} none "$0" && mkdir "$0/{BUCKET}" && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", mount, folder / "data", *command]
    process = start(
        command,
        output=folder / "versitygw.log",
        name="versitygw",
        env={"ROOT_ACCESS_KEY": CREDENTIALS["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_KEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"]},
    )
    try:
        wait_until(lambda: _healthy(port), "versitygw answers", process=process)
    except BaseException:
        process.stop()
        raise
    return process


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def versitygw() -> Path:
    """The binary, built where the cache lacks it; skips (or fails, see STITCH_REQUIRE) where that cannot be."""
    target = cache_folder() / "bin" / "versitygw"
    with file_lock(cache_folder() / "versitygw.lock"):
        if not target.exists():
            _build(target)
    return target


def _build(target: Path) -> None:
    go = shutil.which("go")
    if go is None:
        unavailable("s3", "STITCH_TEST_S3 is not set, and there is no Go to build versitygw with")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        try:
            subprocess.run(
                [go, "install", VERSITYGW],
                env={**os.environ, "GOBIN": scratch},
                check=True,
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT_S,
            )
        except subprocess.CalledProcessError as error:
            unavailable("s3", f"versitygw cannot be built: {error.stderr[-500:]}")
        except subprocess.TimeoutExpired:
            unavailable("s3", f"versitygw was not built within {BUILD_TIMEOUT_S} s")
        (Path(scratch) / target.name).rename(target)


@pytest.fixture(scope="session")
def s3_environment() -> Iterator[None]:
    """Credentials of our own servers in the environment, for this process and those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("STITCH_TEST_S3"):
            for name, value in (CREDENTIALS | ISOLATION).items():
                patch.setenv(name, value)
            patch.delenv("AWS_SESSION_TOKEN", raising=False)
        yield


@pytest.fixture(scope="session")
def s3_url(s3_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket (or a prefix of one) on a server that lives as long as the session."""
    given = os.environ.get("STITCH_TEST_S3")
    if given:
        yield given
        return
    server = start_s3(tmp_path_factory.mktemp("s3"))
    try:
        yield server.url
    finally:
        server.stop()


@pytest.fixture
def s3_store_url(s3_url: str) -> Iterator[str]:
    """A prefix of its own for one test, emptied afterwards."""
    url = below(s3_url, f"t-{secrets.token_hex(6)}")
    yield url
    with open_store(url) as store:
        store.sweep(0.0)
        for entry in store.entries(""):
            store.delete(entry.key)


@pytest.fixture
def s3_server(s3_environment: None, tmp_path: Path) -> Iterator[S3Server]:
    """A server of the test's own, to be killed and restarted; never the user's."""
    if os.environ.get("STITCH_TEST_S3"):
        pytest.skip("STITCH_TEST_S3 names a server that is not ours to kill")
    server = start_s3(tmp_path / "s3")
    try:
        yield server
    finally:
        server.stop()


def below(url: str, name: str) -> str:
    """The same store's prefix `name`."""
    return dataclasses.replace(place := parse_s3(url), prefix=f"{place.prefix}{name}/").url
