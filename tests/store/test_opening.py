"""Which store a URL means, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stitch.core.errors import InvalidRequest
from stitch.store.opening import open_store
from stitch.store.s3 import S3Place, S3Store, parse_s3

pytestmark = pytest.mark.unit


def test_memory_without_a_name_is_fresh() -> None:
    open_store("memory://").put("k", b"x")
    assert open_store("memory://").stat("k") is None


def test_memory_with_a_name_is_shared() -> None:
    first = open_store("memory://opening-test")
    first.put("k", b"x")
    first.close()
    again = open_store("memory://opening-test")
    assert again.url == "memory://opening-test"
    assert again.get("k", limit=1) == b"x"
    assert open_store("memory://opening-test-2").stat("k") is None


def test_an_absolute_directory(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/new/store") as store:
        assert store.url == f"file://{tmp_path}/new/store"
        store.put("a/k", b"x")
    assert (tmp_path / "new/store/a/k").read_bytes() == b"x"


def test_a_relative_directory_is_that_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = open_store("file://objects")
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.put("k", b"x")
    assert store.url == f"file://{tmp_path}/objects"
    assert (tmp_path / "objects/k").read_bytes() == b"x"


@pytest.mark.parametrize("url", ["", "objects", "/var/objects", "ftp://x", "S3://bucket", "file:/x"])
def test_other_urls_are_refused_and_told_what_there_is(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"file:///PATH, s3://BUCKET.*memory://NAME") as refused:
        open_store(url)
    assert refused.value.field == "store"


@pytest.mark.parametrize("url", ["file://", "memory://a/b", "memory://a?b"])
def test_malformed_places_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_store(url)
    assert refused.value.field == "store"


def test_an_s3_place() -> None:
    place = parse_s3("s3://my-bucket/team/stitch/?endpoint=http://127.0.0.1:9000&region=eu-central-1")
    assert place == S3Place(bucket="my-bucket", prefix="team/stitch/", endpoint="http://127.0.0.1:9000", region="eu-central-1")
    assert place.url == "s3://my-bucket/team/stitch?endpoint=http://127.0.0.1:9000&region=eu-central-1"
    assert parse_s3(place.url) == place
    plain = parse_s3("s3://my-bucket")
    assert plain == S3Place(bucket="my-bucket", prefix="", endpoint=None, region=None)
    assert plain.url == "s3://my-bucket"


def test_an_s3_prefix_with_odd_characters_survives_its_url() -> None:
    place = S3Place(bucket="my-bucket", prefix="what?/50%25 ü#1/", endpoint=None, region=None)
    assert parse_s3(place.url) == place


@pytest.mark.parametrize(
    ("query", "url"),
    [
        ("?endpoint=http://s3.test:9000", "http://s3.test:9000/my-bucket/k"),
        ("?endpoint=http://s3.test:9000&addressing=path", "http://s3.test:9000/my-bucket/k"),
        ("?endpoint=http://s3.test:9000&addressing=virtual", "http://my-bucket.s3.test:9000/k"),
        ("?region=eu-west-1&addressing=virtual", "https://my-bucket.s3.eu-west-1.amazonaws.com/k"),
        ("?region=eu-west-1&addressing=path", "https://s3.eu-west-1.amazonaws.com/my-bucket/k"),
    ],
)
def test_where_the_bucket_stands_in_an_address(query: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    place = parse_s3(f"s3://my-bucket{query}")
    assert parse_s3(place.url) == place
    with S3Store(place) as store:
        signed = store._calls._client.generate_presigned_url("get_object", Params={"Bucket": "my-bucket", "Key": "k"})
    assert signed.partition("?")[0] == url


def test_credentials_of_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard chain: here a file that the environment names, and a profile in it."""
    file = tmp_path / "credentials"
    file.write_text("[team]\naws_access_key_id = ours\naws_secret_access_key = s\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "team")
    with S3Store(parse_s3("s3://my-bucket?endpoint=http://s3.test:9000")) as store:
        signed = store._calls._client.generate_presigned_url("get_object", Params={"Bucket": "my-bucket", "Key": "k"})
    assert "Credential=ours" in signed


SECRET = "hunter2secret"


@pytest.mark.parametrize(
    "url",
    [
        f"s3://key:{SECRET}@my-bucket/p",
        f"s3://my-bucket/p?secret={SECRET}",
        f"s3://my-bucket/p?endpoint=http://user:{SECRET}@host:9000",
        f"s3://my-bucket/p?endpoint=http://host:9000/?token={SECRET}",
        f"s3://my-bucket/p#{SECRET}",
        "s3://",
        "s3:///prefix",
        "s3://Bucket_Name/p",
        "s3://my-bucket/a/../b",
        "s3://my-bucket/a//b",
        "s3://my-bucket/" + "p" * 124,
        "s3://my-bucket/p?endpoint=",
        "s3://my-bucket/p?endpoint=localhost:9000",
        "s3://my-bucket/p?endpoint=ftp://host",
        "s3://my-bucket/p?endpoint=http://host:port",
        "s3://my-bucket/p?endpoint=http://[::1",
        "s3://my-bucket/p?region=",
        "s3://my-bucket/p?addressing=",
        "s3://my-bucket/p?addressing=auto",
        "s3://my-bucket/p?addressing=path&addressing=path",
        "s3://my-bucket/p?region=a.evil.example/",
        "s3://my-bucket/p?endpoint=http://a&endpoint=http://b",
    ],
)
def test_malformed_s3_urls_are_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_store(url)
    assert refused.value.field == "store"
    assert SECRET not in str(refused.value)


WITHOUT_BOTO3 = """
import sys
sys.modules["boto3"] = None
from stitch.core.errors import InvalidRequest
from stitch.store.opening import open_store
assert open_store("memory://").url == "memory://"
try:
    open_store("s3://my-bucket")
except InvalidRequest as error:
    print(error)
"""


def test_without_boto3_the_extra_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_BOTO3], capture_output=True, text=True, check=True)
    assert "stitch-rl[s3]" in done.stdout


def test_boto3_is_imported_only_for_s3() -> None:
    code = "import sys; from stitch.store.opening import open_store; open_store('memory://'); sys.exit('boto3' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
