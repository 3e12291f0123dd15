"""One S3 call at a time: boto3's client, our own retries, and botocore's errors as ours.

botocore's retries are off: a conditional put that it repeats by itself answers 412 to its own lost success, and the caller must
know that the call was repeated. Every call that the store makes may be repeated.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from stitch.core.errors import InvalidRequest, StitchError, Unavailable
from stitch.store.hashing import CHUNK_BYTES
from stitch.store.s3_place import S3Place

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        NoCredentialsError,
        ParamValidationError,
        PartialCredentialsError,
    )
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError
except ModuleNotFoundError as missing:
    raise InvalidRequest("store: s3:// needs boto3; install stitch-rl[s3]", field="store") from missing

CONNECT_TIMEOUT_S: Final = 20.0
"""For a connection, and for a server that stops taking a body on a fresh one: urllib3 knows but one time-out for both."""
READ_TIMEOUT_S: Final = 60.0
"""Between two pieces of an answer; completing a large multipart upload is the slowest."""
TRIES: Final = 5
GIVE_UP_S: Final = 15.0
"""No further try after this long: who called has a deadline and retries of its own, and wants to report progress."""
BODY_TRIES: Final = 3
"""Of a call that carries a body, at the least: on a slow link one try of a part lasts longer than all tries of another call."""
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
MAX_CONNECTIONS: Final = 32

_ABSENT: Final = frozenset({"NoSuchKey", "NotFound", "404"})
_TRANSIENT: Final = frozenset(
    {
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "RequestTimeout",
        "OperationAborted",
        "InternalError",
        "ServiceUnavailable",
        # Bytes mangled on the way up, which the server noticed; the copy here is as it was.
        "BadDigest",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
        "IncompleteBody",
    }
)
_NOT_IMPLEMENTED: Final = 501
_CREDENTIALS: Final = frozenset(
    {
        "AccessDenied",
        "403",
        "401",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
        "RequestTimeTooSkewed",
    }
)
_jitter: Final = random.SystemRandom()


class Refusal(InvalidRequest):
    """The server's definite no; `code` is S3's name for it."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, field="store")
        self.code = code


def pause_before(attempt: int) -> None:
    """Sleeps before try number `attempt` (1 is the second), longer each time, with jitter so that colliders part."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
    time.sleep(longest * _jitter.uniform(0.5, 1.0))


class S3Calls:
    """The client of one bucket."""

    def __init__(self, place: S3Place) -> None:
        self._url = place.url
        self._bucket = place.bucket
        self._place = place
        self._config = Config(
            signature_version="s3v4",
            s3={"addressing_style": place.addressing or ("path" if place.endpoint else "auto")},
            max_pool_connections=MAX_CONNECTIONS,
            retries={"total_max_attempts": 1, "mode": "standard"},  # "max_attempts" would count what follows the first
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            tcp_keepalive=True,
            # Uploads give a checksum of their own; downloads are verified by our digest, which covers multipart objects too.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        self._client = self._new_client()
        self._renewing = threading.Lock()

    def _new_client(self) -> Any:
        endpoint = self._place.endpoint
        try:
            session = boto3.session.Session()
            where = self._place.region or session.region_name or ("us-east-1" if endpoint else None)
            return session.client("s3", endpoint_url=endpoint, region_name=where, config=self._config)
        except (BotoCoreError, ValueError) as error:  # a profile that is none, half a key, an endpoint that is no URL
            raise InvalidRequest(f"store: {self._url} cannot be opened as it is configured: {error}", field="store") from error

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """The answer. KeyError where there is no such object; Refusal, InvalidRequest or Unavailable otherwise."""
        return self._call(operation, arguments, TRIES)

    def once(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """As `call`, in one try."""
        return self._call(operation, arguments, 1)

    def _call(self, operation: str, arguments: dict[str, Any], tries: int) -> dict[str, Any]:
        began = time.monotonic()
        least = BODY_TRIES if "Body" in arguments else 1
        for attempt in range(1, tries + 1):
            client = self._client
            try:
                answer: dict[str, Any] = getattr(client, operation)(Bucket=self._bucket, **arguments)
            except (BotoCoreError, ClientError, ResponseParserError) as error:
                if isinstance(error, NoCredentialsError):
                    self._look_for_credentials(client)
                reason = self._translated(error, operation, str(arguments.get("Key", "")))
                late = attempt >= least and time.monotonic() - began > GIVE_UP_S
                if not isinstance(reason, Unavailable) or attempt == tries or late:
                    raise reason from error
            else:
                return answer
            pause_before(attempt)
        raise AssertionError("the last try returns or raises")

    def read(self, body: Any) -> Iterator[bytes]:
        """The chunks of an answer's body; Unavailable where it is cut short."""
        try:
            yield from body.iter_chunks(CHUNK_BYTES)
        except (BotoCoreError, ClientError, HTTPError, OSError) as error:  # botocore leaves urllib3's TLS errors as they are
            raise self._unavailable("reading", error) from error

    def close(self) -> None:
        self._client.close()

    def _look_for_credentials(self, client: Any) -> None:
        """A client looks for credentials when it is made, and never again: where they came later, the next call has them."""
        with self._renewing:
            if client is self._client:
                self._client = self._new_client()

    def _translated(self, error: Exception, operation: str, name: str) -> StitchError | KeyError:
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return InvalidRequest(f"store: no complete credentials for {self._url}; set AWS_ACCESS_KEY_ID and such", field="store")
        if isinstance(error, ParamValidationError):
            return InvalidRequest(f"store: {self._url}: {operation} was given what S3 does not take: {error}", field="store")
        if not isinstance(error, ClientError):
            return self._unavailable(operation, error)
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code == "NotImplemented" or status == _NOT_IMPLEMENTED:
            said = error.response.get("Error", {}).get("Message") or code or status
            return Refusal(
                f"store: {self._url} does not know what {operation} needs ({said}); `stitch doctor` says what a store must do",
                code=code or str(status),
            )
        if code in _TRANSIENT or status >= 500 or status == 429:
            return Unavailable(f"store {self._url} cannot serve {operation} now: {code or status}")
        if code in _ABSENT:
            return KeyError(name)
        if code == "NoSuchBucket":
            return InvalidRequest(f"store: the bucket of {self._url} does not exist", field="store")
        if code in _CREDENTIALS:
            return InvalidRequest(
                f"store: {self._url} refuses {operation} ({code}): check the credentials and what the bucket allows them",
                field="store",
            )
        return Refusal(f"store: {self._url} refuses {operation}: {code or status}", code=code or str(status))

    def _unavailable(self, operation: str, error: Exception) -> Unavailable:
        return Unavailable(f"store {self._url} cannot be reached ({operation}: {type(error).__name__})")
