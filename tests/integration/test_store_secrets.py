"""Secrets that are replaced while programs run, and a Secrets Manager that cannot be reached."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import boto3
import pytest

from farcall_common.errors import Unavailable
from farcall_common.store.secrets import Secret
from tests.integration.store_servers import free_port


class Stored:
    """A secret in Secrets Manager, and a reader of it whose clock the test owns."""

    def __init__(self) -> None:
        self.client = boto3.client("secretsmanager")
        self.arn: str = self.client.create_secret(Name="s", SecretString=json.dumps({"key": "old"}))["ARN"]
        self.now = 0.0
        self.secret = Secret(self.arn, max_age_s=60, clock=lambda: self.now)

    def replace(self) -> None:
        self.client.put_secret_value(SecretId=self.arn, SecretString=json.dumps({"key": "new"}))


@pytest.fixture
def stored(s3_environment: None) -> Iterator[Stored]:
    stored = Stored()
    yield stored
    stored.client.delete_secret(SecretId=stored.arn, ForceDeleteWithoutRecovery=True)


def test_an_old_secret_is_read_again(stored: Stored) -> None:
    assert stored.secret.read() == {"key": "old"}
    stored.replace()
    assert stored.secret.read() == {"key": "old"}
    stored.now = 60
    assert stored.secret.read() == {"key": "new"}


def test_a_refused_secret_is_read_again_at_once(stored: Stored) -> None:
    stored.secret.read()
    stored.replace()
    assert stored.secret.read(fresh=True) == {"key": "new"}


def test_an_event_loop_does_not_wait_for_a_secret(stored: Stored) -> None:
    assert stored.secret.latest() == {"key": "old"}
    stored.replace()
    stored.now = 60
    assert stored.secret.latest() == {"key": "old"}, "a thread reads the new one"
    assert stored.secret.read() == {"key": "new"}, "which waits for that thread"
    assert stored.secret.latest() == {"key": "new"}


def test_an_old_secret_is_used_while_there_is_no_other(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.secret.read()
    stored.now = 60
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    assert stored.secret.read() == {"key": "old"}
    with pytest.raises(Unavailable):
        stored.secret.read(fresh=True)


def test_a_secrets_manager_that_cannot_be_reached_is_named_with_its_addresses(
    s3_environment: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
    with caplog.at_level(logging.ERROR), pytest.raises(Unavailable, match=address):
        Secret("arn:nothing").read()
    [line] = [vars(record) for record in caplog.records if record.levelno == logging.ERROR]
    assert (line["host"], line["addresses"]) == (address, "AF_INET 127.0.0.1")


def test_a_program_without_a_region_cannot_read_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(Unavailable, match="region"):
        Secret("arn:nothing").read()
