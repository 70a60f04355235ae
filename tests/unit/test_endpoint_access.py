"""Access of an agent to the API: the endpoint's credential, and its owner's login."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from farcall_common.credentials import Credentials
from farcall_common.errors import (
    ConfigurationError,
    FarcallError,
    NotFound,
    Unauthenticated,
    Unavailable,
    UserNotAllowed,
)
from farcall_endpoint.agent.shell.access import Access
from farcall_endpoint.services.cloud import Cloud, ConnectAnswer
from farcall_endpoint.services.directory import EndpointDirectory

URL = "http://127.0.0.1:1"
OWNER = Credentials(URL, "owner")
ANSWER = ConnectAnswer((), "ticket", 0.0)


class Api:
    """An API with one endpoint, that accepts the owner's token and the last credential. ``steps`` are the requests with
    the tokens that they were sent with."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str]] = []
        self.accepted = {"owner"}
        self.refusal: FarcallError = Unauthenticated("The endpoint's credential was revoked or replaced.")
        self.credential_error: FarcallError | None = None
        self.made = 0

    def of(self, credentials: Credentials) -> Cloud:
        return _FakeCloud(self, credentials)


class _FakeCloud(Cloud):
    def __init__(self, api: Api, credentials: Credentials) -> None:
        super().__init__(credentials)
        self._api, self._token = api, credentials.token

    def register(self, **_: Any) -> str:
        self._step("register")
        return "e1"

    def connect(self, endpoint_id: str, **_: Any) -> ConnectAnswer:
        self._step("connect")
        return ANSWER

    def make_credential(self, endpoint_id: str) -> str:
        self._step("credential")
        if self._api.credential_error:
            raise self._api.credential_error
        self._api.made += 1
        self._api.accepted = {"owner", f"own-{self._api.made}"}
        return f"own-{self._api.made}"

    def _step(self, name: str) -> None:
        self._api.steps.append((name, self._token))
        if self._token not in self._api.accepted:
            raise self._api.refusal


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def directory(tmp_path: Path) -> EndpointDirectory:
    directory = EndpointDirectory.of(tmp_path, "lab")
    directory.create()
    directory.config_file.touch()
    directory.write_endpoint_id("e1")
    return directory


def connect(access: Access) -> ConnectAnswer:
    return access.connect("e1", public_key="k")


def test_the_first_connect_gets_a_credential_and_later_ones_need_no_login(
    api: Api, directory: EndpointDirectory
) -> None:
    assert connect(Access(directory, OWNER, cloud_of=api.of)) is ANSWER
    assert connect(Access(directory, OWNER, cloud_of=api.of)) is ANSWER
    assert connect(Access(directory, None, cloud_of=api.of)) is ANSWER

    assert api.steps == [("credential", "owner"), ("connect", "owner"), ("connect", "own-1"), ("connect", "own-1")]
    file = directory.path / "credential.secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert directory.read_credential() == Credentials(URL, "own-1")
    directory.write_owner_id("alice")
    assert directory.read_credential() == Credentials(URL, "own-1")


@pytest.mark.parametrize("refusal", [Unauthenticated("revoked"), UserNotAllowed("no longer")])
def test_a_refused_credential_is_replaced_with_the_owners_login(
    api: Api, directory: EndpointDirectory, refusal: FarcallError
) -> None:
    directory.write_credential(Credentials(URL, "revoked"))
    api.refusal = refusal
    access = Access(directory, OWNER, cloud_of=api.of)

    assert connect(access) is ANSWER
    assert connect(access) is ANSWER

    assert api.steps == [
        ("connect", "revoked"),
        ("credential", "owner"),
        ("connect", "owner"),
        ("connect", "own-1"),
    ]
    assert directory.read_credential() == Credentials(URL, "own-1")


def test_a_refused_credential_without_a_login_ends_with_a_hint(api: Api, directory: EndpointDirectory) -> None:
    directory.write_credential(Credentials(URL, "revoked"))

    with pytest.raises(Unauthenticated, match=r"refused, and there is no login: .*revoked or replaced") as caught:
        connect(Access(directory, None, cloud_of=api.of))

    assert "farcall login" in str(caught.value.record.hint)
    assert not caught.value.record.retryable


def test_an_outage_is_no_refusal(api: Api, directory: EndpointDirectory) -> None:
    directory.write_credential(Credentials(URL, "own-0"))
    api.refusal = Unavailable("away")

    with pytest.raises(Unavailable):
        connect(Access(directory, OWNER, cloud_of=api.of))

    assert api.steps == [("connect", "own-0")]


@pytest.mark.parametrize("error", [NotFound("no such route"), Unavailable("away")])
def test_an_api_that_makes_no_credentials_is_connected_with_the_login(
    api: Api, directory: EndpointDirectory, error: FarcallError
) -> None:
    api.credential_error = error

    assert connect(Access(directory, OWNER, cloud_of=api.of)) is ANSWER

    assert directory.read_credential() is None


def test_a_credential_that_cannot_be_stored_is_used_nevertheless(api: Api, directory: EndpointDirectory) -> None:
    (directory.path / "credential.secret").mkdir()
    access = Access(directory, OWNER, cloud_of=api.of)

    connect(access)
    connect(access)

    assert api.steps[-1] == ("connect", "own-1")


def test_another_api_does_not_receive_the_credential(api: Api, directory: EndpointDirectory) -> None:
    directory.write_credential(Credentials("http://127.0.0.1:2", "own-0"))

    connect(Access(directory, OWNER, cloud_of=api.of))

    assert [token for _, token in api.steps] == ["owner", "owner"]


def test_a_new_registration_needs_the_login_and_ends_the_former_credential(
    api: Api, directory: EndpointDirectory
) -> None:
    directory.write_credential(Credentials(URL, "own-0"))
    (directory.path / "endpoint.json").unlink()

    assert directory.read_credential() is None
    with pytest.raises(Unauthenticated, match="no login"):
        Access(directory, None, cloud_of=api.of).register(name="n", display_name="d", metadata={})
    assert Access(directory, OWNER, cloud_of=api.of).register(name="n", display_name="d", metadata={}) == "e1"
    directory.write_endpoint_id("e2")
    assert directory.read_credential() is None


def test_a_credential_that_others_may_read_is_refused(directory: EndpointDirectory) -> None:
    directory.write_credential(Credentials(URL, "own-0"))
    (directory.path / "credential.secret").chmod(0o640)

    with pytest.raises(ConfigurationError, match="readable by other users"):
        directory.read_credential()


class TestLogin:
    """What an agent starts with."""

    def test_the_login_is_optional_with_a_credential(self, directory: EndpointDirectory, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="is not set"):
            directory.find_login(home=tmp_path, environ={})
        directory.write_credential(Credentials(URL, "own-0"))

        assert directory.find_login(home=tmp_path, environ={}) is None
        assert directory.find_login(home=tmp_path, environ={"FARCALL_API_URL": f"{URL}/"}) is None
        environ = {"FARCALL_API_URL": URL, "FARCALL_TOKEN": "owner"}
        assert directory.find_login(home=tmp_path, environ=environ) == OWNER

    @pytest.mark.parametrize("url", ["http://127.0.0.1:2", "not an address"])
    def test_another_api_needs_a_login(self, directory: EndpointDirectory, tmp_path: Path, url: str) -> None:
        directory.write_credential(Credentials(URL, "own-0"))

        with pytest.raises(ConfigurationError):
            directory.find_login(home=tmp_path, environ={"FARCALL_API_URL": url})
        (tmp_path / "config.toml").write_text(f'[default]\napi_url = "{url}"\n')
        with pytest.raises(ConfigurationError):
            directory.find_login(home=tmp_path, environ={})
