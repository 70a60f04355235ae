"""Lines of logs that metrics count: the programs write them as the patterns of :mod:`farcall_infra` expect."""

from __future__ import annotations

import fnmatch
import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import psycopg
import pytest

from farcall_common.errors import Unauthenticated, Unavailable
from farcall_common.store.postgres import unavailable
from farcall_infra.constructs.metrics import AUTHORIZER_FAILED, CONNECTIONS_REFUSED, WAKING, LineCount
from farcall_lambdas.answers import error_response
from farcall_lambdas.handlers import authorizer
from tests.support.memory_api import MemoryApi, invocation


def matches(count: LineCount, line: Mapping[str, Any]) -> bool:
    """Whether CloudWatch Logs counts a line: the pattern compares one field with a text, which may end with ``*``."""
    found = re.fullmatch(r'\{ \$\.(\w+) = "([^"]*)" \}', count.pattern)
    assert found is not None
    return fnmatch.fnmatchcase(str(line.get(found[1], "")), found[2])


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """The lines, once the test has made them."""
    written: list[dict[str, Any]] = []

    class Recorded(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append({**vars(record), "level": record.levelname})

    handler = Recorded()
    logging.getLogger().addHandler(handler)
    with caplog.at_level(logging.INFO):
        yield written
    logging.getLogger().removeHandler(handler)


def test_refused_connections_are_counted(lines: list[dict[str, Any]]) -> None:
    refused = psycopg.OperationalError('FATAL: too many connections for role "farcall_api"')
    for error in (unavailable(refused, refused=True), unavailable(refused)):
        error.__cause__ = refused
        body = json.loads(error_response(error, request_id="r1").body or "")
        assert "farcall_api" not in json.dumps(body)
    assert [matches(CONNECTIONS_REFUSED, line) for line in lines] == [True, False]


class Asleep:
    """A fleet without forwarders."""

    idle_s = 60.0

    def wake(self, *, on_demand: bool = False) -> None:
        """The forwarders do not start."""

    def sleep(self) -> None:
        """They sleep."""


def test_requests_for_a_sleeping_forwarder_are_counted(lines: list[dict[str, Any]]) -> None:
    api = MemoryApi(fleet=Asleep())
    answer = api.call("POST", "/v3/stream", {"public_key": "k" * 40})
    assert answer.body["code"] == "FORWARDER_WAKING"
    api.call("GET", "/v2/version")
    assert [matches(WAKING, line) for line in lines if line["msg"] == "request"] == [True, False]


def test_tokens_that_cannot_be_verified_are_counted(
    lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Provider:
        error: Exception = Unauthenticated("The token has expired.")

        def identify(self, header: str | None) -> None:
            raise self.error

    provider = Provider()
    monkeypatch.setattr(authorizer, "_authorizer", lambda: provider)
    event = {"authorizationToken": "Bearer x", "methodArn": "arn:aws:execute-api:r:0:a/api/GET/"}
    with pytest.raises(PermissionError):
        authorizer.handle(event, invocation())
    assert not any(matches(AUTHORIZER_FAILED, line) for line in lines)
    for error in (Unavailable("The issuer is unavailable."), ZeroDivisionError()):
        provider.error = error
        with pytest.raises(type(error)):
            authorizer.handle(event, invocation())
    assert sum(matches(AUTHORIZER_FAILED, line) for line in lines) == 2
