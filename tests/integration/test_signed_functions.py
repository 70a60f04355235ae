"""An endpoint that runs signed functions only: what its workers get to see, and what is refused before."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ed25519

from farcall_common.payload import PickleCode, PickleDataBase64, PickleOutOfBand, PureSourceTextInspect, Strategy
from farcall_common.ssh_signatures import sign, statement
from tests.support.endpoint import EndpointProcess, running_endpoint
from tests.support.endpoint.fake_cloud import Ended
from tests.unit.test_ssh_signatures import KEY, OTHER, line
from tests.waiting import wait_until

EXPIRED = ed25519.Ed25519PrivateKey.from_private_bytes(b"3" * 32)


def double(value: list[int]) -> list[int]:
    return value * 2


def make_file(path: str) -> None:
    import pathlib

    pathlib.Path(path).touch()


class Exploit:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self._path,)


def configure(endpoint: EndpointProcess, text: str) -> Path:
    """Write the file of allowed signers, and name it."""
    file = endpoint.directory.config_file
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"allowed_signers": "allowed_signers"}))
    signers = endpoint.directory.path / "allowed_signers"
    signers.write_text(text)
    signers.chmod(0o600)
    return signers


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path_factory.mktemp("home"), workers=1, start=False) as endpoint:
        expired = line("ssh-ed25519", principals="old@lab.org", options='valid-before="20200101Z"', key=EXPIRED)
        configure(endpoint, f"# of the lab\n{line('ssh-ed25519')}\n{expired}\n")
        endpoint.start()
        yield endpoint


def body_of(endpoint: EndpointProcess, function: object) -> bytes:
    strategies = [PureSourceTextInspect(self_contained=True)]
    return endpoint.cloud.serializer.pack_function(function, strategies=strategies)  # type: ignore[arg-type]


def signature_of(body: bytes, key: ed25519.Ed25519PrivateKey = KEY, *, name: str = "f") -> str:  # type: ignore[assignment]
    return sign(statement(name, hashlib.sha256(body).hexdigest()), key)


def run(endpoint: EndpointProcess, body: bytes, payload: bytes, signature: str) -> Ended:
    [task_id] = endpoint.cloud.submit_raw(body, [payload], signature=signature)
    return endpoint.cloud.end(task_id)


def test_a_signed_function_runs_and_the_log_names_its_signer(endpoint: EndpointProcess) -> None:
    body = body_of(endpoint, double)
    ended = run(endpoint, body, endpoint.cloud.serializer.pack_call(([1, 2],)), signature_of(body))
    assert ended.value == [1, 2, 1, 2]
    assert f"function f ({hashlib.sha256(body).hexdigest()[:12]}) is signed by ada@lab.org" in endpoint.log()


@pytest.mark.parametrize("case", ["unsigned", "another body", "another name", "another key", "expired"])
def test_other_functions_are_refused_before_a_worker_sees_them(
    endpoint: EndpointProcess, tmp_path: Path, case: str
) -> None:
    made, body = tmp_path / "made", body_of(endpoint, make_file)
    signature = {
        "unsigned": "",
        "another body": signature_of(body_of(endpoint, double)),
        "another name": signature_of(body, name="g"),
        "another key": signature_of(body, OTHER),
        "expired": signature_of(body, EXPIRED),
    }[case]
    ended = run(endpoint, body, endpoint.cloud.serializer.pack_call((str(made),)), signature)
    assert (ended.error or {})["code"] == "FUNCTION_NOT_SIGNED"
    assert "farcall functions sign" in (ended.error or {})["hint"]
    assert not made.exists()


@pytest.mark.parametrize("strategy", [PickleDataBase64(), PickleOutOfBand(), PickleCode()])
def test_a_pickled_argument_of_a_signed_function_is_refused(
    endpoint: EndpointProcess, tmp_path: Path, strategy: Strategy
) -> None:
    made, body = tmp_path / "made", body_of(endpoint, double)
    payload = endpoint.cloud.serializer.pack_call((Exploit(str(made)),), strategies=[strategy])
    ended = run(endpoint, body, payload, signature_of(body))
    assert (ended.error or {})["code"] == "DESERIALIZATION_FAILED"
    assert not made.exists()


def test_the_mode_is_shown_and_reported(endpoint: EndpointProcess) -> None:
    wait_until(lambda: endpoint.directory.read_status().get("allowed_signers") == 2)
    assert endpoint.cloud.hellos[-1].capabilities.signed_functions
    assert "only functions signed by one of 2 keys run here" in endpoint.log()


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [("ada ssh-ed25519 x\n", 0o600, "line 1: the key cannot be used"), ("", 0o666, "other users may write")],
)
def test_an_endpoint_with_a_file_that_cannot_be_trusted_does_not_start(
    tmp_path: Path, text: str, mode: int, message: str
) -> None:
    with running_endpoint(tmp_path, start=False) as endpoint:
        configure(endpoint, text).chmod(mode)
        endpoint.start(connected=False)
        assert endpoint.wait() != 0
        assert message in endpoint.log()
