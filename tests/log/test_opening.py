# ruff: noqa: ASYNC240 - a test may block its own loop
from __future__ import annotations

from pathlib import Path

import pytest

from stitch.core.errors import InvalidRequest
from stitch.log.kafka_settings import parse_kafka_url
from stitch.log.opening import open_log
from stitch.log.port import Draft, Stream

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "url",
    [
        "",
        "log.db",
        "/tmp/x",
        "redis://localhost",
        "sqlite://",
        "sqlite:///folder/",
        "sqlite:///x?mode=ro",
        "memory://Not A Name",
        "kafka://",
        "kafka://host",
        "kafka://host:0/ns",
        "kafka://host:99999/ns",
        "kafka://host:9092,/ns",
        "kafka://host:9092/Bad Namespace",
        "kafka://host:9092/a/b",
        "kafka://host:9092/ns?acks=0",
        "kafka://host:9092/ns?security_protocol=TLS",
        "kafka://host:9092/ns?replication=0",
        "kafka://host:9092/ns?sasl_mechanism=PLAIN&sasl_mechanism=PLAIN",
    ],
)
async def test_a_wrong_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_log(url)
    assert refused.value.field == "log"


@pytest.mark.parametrize("url", ["", "redis://localhost"])
async def test_the_refusal_names_the_schemes(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"sqlite:///.*kafka://.*memory://"):
        open_log(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memory://", "memory://"),
        ("memory://name", "memory://name"),
        ("sqlite:///var/log.db", "sqlite:///var/log.db"),
        ("sqlite://log.db", "sqlite://log.db"),
        ("kafka://a:9092", "kafka://a:9092/stitch"),
        ("kafka://a:9092/", "kafka://a:9092/stitch"),
        ("kafka://a:9092,b:9093/team.one", "kafka://a:9092,b:9093/team.one"),
        ("kafka://[::1]:9092/ns", "kafka://[::1]:9092/ns"),
    ],
)
async def test_a_log_shows_its_url(url: str, shown: str) -> None:
    async with open_log(url) as log:
        assert log.url == shown
    assert not Path("log.db").exists()


async def test_no_secret_is_shown() -> None:
    url = "kafka://a:9092/ns?security_protocol=SASL_SSL&sasl_mechanism=PLAIN&sasl_plain_username=u%40x&sasl_plain_password=hunter2"
    async with open_log(url) as log:
        assert log.url == "kafka://a:9092/ns"
    options = parse_kafka_url(url).client_options()
    assert options["sasl_plain_username"] == "u@x"
    assert options["sasl_plain_password"] == "hunter2"
    assert options["ssl_context"] is not None
    for wrong in ("kafka://u:hunter2@a:9092/ns", url + "&x=1", url.replace("SASL_SSL", "NONE")):
        with pytest.raises(InvalidRequest) as refused:
            open_log(wrong)
        assert "hunter2" not in str(refused.value)


async def test_a_missing_certificate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="certificates"):
        parse_kafka_url("kafka://a:9092/ns?security_protocol=SSL&ssl_cafile=/does/not/exist").client_options()


async def test_only_a_named_log_in_memory_is_shared() -> None:
    async with open_log("memory://shared") as one, open_log("memory://shared") as two, open_log("memory://") as three:
        await one.append(Stream.PUBLICATIONS, Draft(key="p", value=b"x"))
        assert (await two.bounds(Stream.PUBLICATIONS)).end == 1
        assert (await three.bounds(Stream.PUBLICATIONS)).end == 0
    async with open_log("memory://") as four:
        assert (await four.bounds(Stream.PUBLICATIONS)).end == 0
