"""What the transfer benches share: a server of their own, a checkpoint, and s3transfer as boto3 users have it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from boto3.s3.transfer import TransferConfig

from stitch.store.s3 import S3Place, parse_s3
from stitch.weights.safetensors import write_checkpoint
from stitch.weights.tensors import host_tensors
from tests.support.s3 import CREDENTIALS, ISOLATION, start_s3

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    folder: Path
    place: S3Place
    client: Any
    """boto3's client for the same bucket, with its defaults."""

    def below(self, name: str) -> str:
        """The URL of a prefix."""
        return S3Place(bucket=self.place.bucket, prefix=f"{name}/", endpoint=self.place.endpoint, region=self.place.region).url

    def upload(self, files: list[Path], prefix: str) -> None:
        """The bare upload of the same bytes: boto3's own transfer manager, one file after the other, parts in parallel."""
        for file in files:
            self.client.upload_file(str(file), self.place.bucket, f"{prefix}/{file.name}", Config=TransferConfig())

    def download(self, key: str, path: Path) -> None:
        self.client.download_file(self.place.bucket, key, str(path), Config=TransferConfig())

    def empty(self, prefix: str) -> None:
        """Removes what lies below the prefix, so that the disk does not fill up with every turn."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.place.bucket, Prefix=f"{prefix}/")
        for page in pages:
            for row in page.get("Contents", ()):
                self.client.delete_object(Bucket=self.place.bucket, Key=row["Key"])


@contextlib.contextmanager
def world() -> Iterator[World]:
    os.environ.update(CREDENTIALS | ISOLATION)
    with tempfile.TemporaryDirectory(prefix="stitch-bench-") as name:
        folder = Path(name)
        server = start_s3(folder / "s3")
        try:
            place = parse_s3(server.url)
            client = boto3.session.Session().client("s3", endpoint_url=place.endpoint, region_name=place.region)
            try:
                yield World(folder=folder, place=place, client=client)
            finally:
                client.close()
        finally:
            server.stop()


def checkpoint(folder: Path, size: int, *, seed: int) -> Path:
    """A sharded checkpoint of random bf16-like words, `size` bytes in all, as four files."""
    rng = np.random.default_rng(seed)
    count = 32
    tensors = {
        f"layers.{index:02}.weight": rng.integers(0, 1 << 63, size // count // 8, dtype=np.int64).view(np.float16).reshape(16, -1)
        for index in range(count)
    }
    folder.mkdir(parents=True)
    write_checkpoint(folder, host_tensors(tensors), size // 4 + MIB)
    return folder
