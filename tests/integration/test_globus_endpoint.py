"""``farcall-endpoint globus``, the check of a login, and files of Globus collections in the transfer process."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from typer.testing import CliRunner, Result

from farcall_common.file_arguments import File, collecting, with_outputs
from farcall_common.login import Login, keep, read
from farcall_common.staged_files import FileUse, pack_files, uses
from farcall_endpoint.agent.shell.launch import transfer_settings
from farcall_endpoint.app.cli import app
from farcall_endpoint.config.reader import read_config
from farcall_endpoint.diagnose import gather
from farcall_endpoint.files import orders
from farcall_endpoint.files.access import Access
from farcall_endpoint.files.movers import MoveError
from farcall_endpoint.services.directory import EndpointDirectory
from tests.integration.identity_provider import IdentityProvider
from tests.integration.identity_provider import serving as serving_logins
from tests.support.endpoint import FakeCloud, running_endpoint
from tests.support.globus_service import Collection, GlobusService, serving
from tests.support.transfers import TransferProcess, transfer_process
from tests.waiting import WAIT_S, wait_until

ALL = "urn:globus:auth:scope:transfer.api.globus.org:all"


class Lab:
    """An endpoint with a collection, as its owner uses it."""

    def __init__(self, home: Path, provider: IdentityProvider, service: GlobusService) -> None:
        self.home = home
        self.provider = provider
        self.service = service
        self.directory = EndpointDirectory.of(home, "lab")
        self.directory.create()
        self.remote = service.add(Collection(home / "remote"))
        self.own = service.add(Collection(home / "own"))
        self.configure(collection=self.own.id, directory=str(self.own.root / "exchange"), path="/exchange")

    @property
    def login_file(self) -> Path:
        return self.directory.globus_login_file

    @property
    def login(self) -> Login:
        found = read(self.login_file)
        assert found is not None
        return found

    def configure(self, *, storages: tuple[Any, ...] = (), **globus: str) -> None:
        files = {"globus": globus, "storages": list(storages)} if globus else {}
        self.directory.config_file.write_text(yaml.safe_dump({"files": files}))

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["--config-dir", str(self.home), "globus", *arguments])

    def exchange(self) -> list[Path]:
        """What is in the directory that Globus sees."""
        directory = self.own.root / "exchange"
        return list(directory.iterdir()) if directory.exists() else []

    def transfers(self) -> contextlib.AbstractContextManager[TransferProcess]:
        """The transfer process of the endpoint."""
        settings = transfer_settings(read_config(self.directory.config_file), self.directory)
        return transfer_process(self.directory.path, globus=settings.globus, storages=settings.storages)

    def log_in(self) -> None:
        keep(
            self.login_file,
            Login(
                api_url=self.service.url,
                provider="globus",
                client_id=self.provider.client_id,
                scope=ALL,
                token_url=f"{self.provider.issuer}/v2/oauth2/token",
                access_token="a-token",
                refresh_token="a-refresh-token",
            ),
        )


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    for name in os.environ:
        if name.startswith(("FARCALL_", "GLOBUS_")):
            monkeypatch.delenv(name)
    with serving_logins() as provider, serving() as service:
        monkeypatch.setenv("GLOBUS_SDK_SERVICE_URL_AUTH", f"{provider.issuer}/")
        monkeypatch.setenv("GLOBUS_SDK_SERVICE_URL_TRANSFER", service.url)
        yield Lab(tmp_path, provider, service)


@pytest.fixture
def pasted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a user opens, who then pastes the code."""
    opened: list[str] = []

    def paste(_text: str, **_: Any) -> str:
        with urllib.request.urlopen(opened[-1], timeout=WAIT_S) as answer:
            return str(json.load(answer)["code"])

    def show(text: str, **_: Any) -> None:
        opened.extend(word for word in text.split() if word.startswith("http"))

    monkeypatch.setattr("typer.prompt", paste)
    monkeypatch.setattr("farcall_common.globus.typer.echo", show)
    return opened


# -- the login ---------------------------------------------------------------------------------------------------------


def test_an_owner_logs_in_and_out(lab: Lab, pasted: list[str]) -> None:
    result = lab("login", "lab", "--client-id", lab.provider.client_id)
    assert result.exit_code == 0, result.output
    assert "good" in result.output
    assert lab.own.name in result.output
    assert parse_qs(urlsplit(pasted[0]).query)["scope"] == [ALL]
    assert stat.S_IMODE(lab.login_file.stat().st_mode) == 0o600
    tokens = {lab.login.access_token, lab.login.refresh_token}
    assert "logged out" in lab("logout", "lab").output
    assert not lab.login_file.exists()
    assert set(lab.provider.revoked) == tokens
    assert "was not logged in" in lab("logout", "lab").output


def test_consents_are_added_to_those_of_before(lab: Lab, pasted: list[str]) -> None:
    options = ("--client-id", lab.provider.client_id)
    assert lab("login", "lab", *options, "--collection", lab.remote.id).exit_code == 0
    assert lab("login", "lab", "--collection", lab.own.id.upper()).exit_code == 0  # the client id is known
    (scope,) = parse_qs(urlsplit(pasted[-1]).query)["scope"]
    expected = " ".join(
        f"*https://auth.globus.org/scopes/{each}/data_access" for each in sorted((lab.remote.id, lab.own.id))
    )
    assert scope == f"{ALL}[{expected}]"
    assert lab.login.scope == scope


@pytest.mark.parametrize("names", ["FARCALL_GLOBUS_CLIENT", "GLOBUS_CLI_CLIENT"])
def test_a_service_logs_in_with_its_secret(lab: Lab, monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    monkeypatch.setenv("FARCALL_CLIENT_ID", "of-another-provider")
    monkeypatch.setenv("FARCALL_CLIENT_SECRET", "of-another-provider")
    monkeypatch.setenv(f"{names}_ID", lab.provider.client_id)
    monkeypatch.setenv(f"{names}_SECRET", lab.provider.client_secret)
    result = lab("login", "lab")
    assert result.exit_code == 0, result.output
    assert lab.provider.grants == ["client_credentials"]
    assert lab.login.refresh_token is None
    assert lab.provider.client_secret not in lab.login_file.read_text()
    keep(lab.login_file, lab.login.with_tokens({"access_token": "old", "expires_in": 0}, now=0.0))
    assert _findings(lab) == [
        (True, f"Globus: collection {lab.own.name} ({lab.own.id}) has {lab.own.root}/exchange as /exchange")
    ]
    assert lab.provider.grants == ["client_credentials"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lab",), "the client id is missing"),
        (("lab", "--client-id", "x", "--collection", "lab-storage"), "'lab-storage' is not the UUID of a collection"),
        (("lib", "--client-id", "x"), "There is no endpoint lib"),
    ],
)
def test_what_a_login_needs(lab: Lab, arguments: tuple[str, ...], message: str) -> None:
    result = lab("login", *arguments)
    assert result.exit_code == 78
    assert message in result.output
    assert not lab.login_file.exists()


def test_a_login_before_the_collection_is_configured(lab: Lab, pasted: list[str]) -> None:
    lab.configure()
    result = lab("login", "lab", "--client-id", lab.provider.client_id)
    assert result.exit_code == 0, result.output
    assert "files.globus" in result.output


# -- the check ---------------------------------------------------------------------------------------------------------


def _findings(lab: Lab) -> list[tuple[bool | None, str]]:
    report = gather(lab.directory, home=lab.home, environ=os.environ, with_environments=False)
    assert "a-refresh-token" not in "".join(report.files.values())
    return [(each.good, each.text) for each in report.findings if each.text.startswith("Globus")]


def test_diagnose_finds_what_is_missing(lab: Lab) -> None:
    ((good, text),) = _findings(lab)
    assert not good
    assert "farcall-endpoint globus login lab" in text
    lab.log_in()
    assert _findings(lab)[0][0] is True
    lab.own.entity_type = "GCSv5_mapped_collection"
    assert f"farcall-endpoint globus login lab --collection {lab.own.id}" in _findings(lab)[0][1]
    lab.own.high_assurance = True
    assert _findings(lab)[0][0] is True
    lab.own.is_connected = False
    assert "is not connected to Globus" in _findings(lab)[0][1]
    lab.own.is_connected = True
    lab.configure(collection=lab.own.id, directory=str(lab.home / "elsewhere"), path="/exchange")
    assert f"/exchange of collection {lab.own.name} ({lab.own.id}) is not {lab.home}/elsewhere" in _findings(lab)[0][1]
    lab.configure(collection=lab.remote.id.replace(lab.remote.id[:4], "0000"), directory=str(lab.home / "own"))
    assert "No such endpoint" in _findings(lab)[0][1]
    lab.service.refused_tokens.add("a-token")
    assert "farcall-endpoint globus login lab" in _findings(lab)[0][1]
    lab.configure()
    assert _findings(lab) == []


def test_the_check_leaves_nothing(lab: Lab) -> None:
    lab.log_in()
    assert _findings(lab)[0][0] is True
    assert lab.exchange() == []


# -- the transfer process ----------------------------------------------------------------------------------------------


@pytest.fixture
def transfers(lab: Lab) -> Iterator[TransferProcess]:
    lab.log_in()
    with lab.transfers() as found:
        yield found


def test_files_of_tasks_come_and_go(lab: Lab, transfers: TransferProcess) -> None:
    (lab.remote.root / "raw").mkdir()
    for name in ("1", "2"):
        (lab.remote.root / "raw" / name).write_text(name)
    reads = [FileUse(f"globus://{lab.remote.id}/raw/{number}") for number in (1, 2, 3)]
    written = FileUse(f"globus://{lab.remote.id}/out/result", "w")
    transfers.make("t", writes=(written.url,))
    transfers.client.order([orders.Fetch(number, "", use, ("t",)) for number, use in enumerate(reads)])
    reports = {each.number: each for each in transfers.wait_for(orders.Fetched, orders.Failed, count=3)}
    assert [each.error["code"] for each in reports.values() if isinstance(each, orders.Failed)] == ["FILE_NOT_FOUND"]
    assert isinstance(reports[2], orders.Failed)
    assert transfers.place(reads[1]).read_text() == "2"
    assert transfers.place(reads[1]).stat().st_mode & 0o222 == 0
    transfers.place(written).write_text("result")
    assert isinstance(transfers.move(written), orders.Stored)
    assert (lab.remote.root / "out" / "result").read_text() == "result"
    assert len(lab.service.tasks) == 2
    wait_until(lambda: lab.exchange() == [])


def test_many_batches_that_take_long_wait_for_their_turn(lab: Lab, transfers: TransferProcess) -> None:
    lab.service.is_paused = True
    uses = []
    for number in range(250):
        (lab.remote.root / str(number)).write_text(str(number))
        uses.append(FileUse(f"globus://{lab.remote.id}/{number}"))
    transfers.make("t")
    for use in uses:
        transfers.order(use, "t")
        transfers.listen()  # each is a batch of its own
    transfers.wait_until(lambda: len(lab.service.tasks) >= 10, "transfers")
    assert transfers.losses == []
    lab.service.is_paused = False
    found = transfers.wait_for(orders.Fetched, count=len(uses))
    assert (len(found), transfers.losses) == (250, [])
    assert len(lab.service.tasks) < 100


def test_submitters_share_no_transfer_and_hold_none_up(lab: Lab) -> None:
    lab.log_in()
    storage = {"url": f"globus://{lab.remote.id}/", "submitters": "*"}
    exchange = {"directory": str(lab.own.root / "exchange"), "path": "/exchange"}
    lab.configure(collection=lab.own.id, storages=(storage,), **exchange)
    for name in ("a", "b"):
        (lab.remote.root / name).write_text(name)
    with lab.transfers() as transfers:
        uses = {name: FileUse(f"globus://{lab.remote.id}/{name}") for name in ("a", "b")}
        for name in uses:
            transfers.make("t", submitter=name)
        transfers.client.order([orders.Fetch(number, name, uses[name], ("t",)) for number, name in enumerate(uses)])
        transfers.wait_for(orders.Fetched, count=2)
        assert sorted(len(task.document["DATA"]) for task in lab.service.tasks.values()) == [1, 1]


def test_a_file_that_is_known_is_not_transferred_again(lab: Lab, transfers: TransferProcess) -> None:
    (lab.remote.root / "a").write_text("a")
    use = FileUse(f"globus://{lab.remote.id}/a")
    transfers.make("t", "u")
    assert [transfers.move(use, task_id).cached for task_id in ("t", "u")] == [False, True]
    assert len(lab.service.copied) == 1


def test_the_cache_knows_a_copy_after_the_directory_for_globus_is_cleared(lab: Lab, transfers: TransferProcess) -> None:
    (lab.remote.root / "a").write_text("a")
    use = FileUse(f"globus://{lab.remote.id}/a")
    transfers.make("t")
    transfers.move(use)
    wait_until(lambda: lab.exchange() == [])
    transfers.client.close()
    with contextlib.closing(sqlite3.connect(transfers.directory / "files" / "index.sqlite")) as index:
        ((changed_at,),) = index.execute("SELECT ctime_ns FROM copies").fetchall()
    assert transfers.place(use).stat().st_ctime_ns == changed_at  # so it need not be read again


def test_a_transfer_process_that_is_killed_transfers_nothing_twice(lab: Lab, transfers: TransferProcess) -> None:
    (lab.remote.root / "a").write_bytes(b"a" * 100)
    lab.service.bytes_each_time = 60
    use = FileUse(f"globus://{lab.remote.id}/a")
    transfers.make("t")
    transfers.order(use, "t")
    transfers.wait_until(lambda: lab.service.tasks and lab.service.task.bytes_transferred, "the transfer has begun")
    transfers.process.kill()
    transfers.wait_until(lambda: transfers.losses, "the loss is noticed")
    assert isinstance(transfers.move(use), orders.Fetched)
    assert len(lab.service.tasks) == 1
    assert len(lab.service.copied) == 1
    assert transfers.place(use).read_bytes() == b"a" * 100


def test_tasks_of_others_reach_what_is_open_to_them(lab: Lab) -> None:
    lab.log_in()
    (lab.remote.root / "open").mkdir()
    (lab.remote.root / "open" / "a").write_text("a")
    (lab.remote.root / "secret").write_text("secret")
    base = f"globus://{lab.remote.id}"
    storage = {"url": f"{base}/open", "submitters": ["bob"]}
    exchange = {"directory": str(lab.own.root / "exchange"), "path": "/exchange"}
    lab.configure(collection=lab.own.id, storages=(storage,), **exchange)
    with lab.transfers() as transfers:
        transfers.make("t", submitter="bob")
        transfers.make("t", submitter="eve")
        for path in ("secret", "open/../secret", "open/%2e%2e/secret", "open?/../secret"):
            code = transfers.code(FileUse(f"{base}/{path}"), submitter="bob")
            assert code in ("FILE_DENIED", "FILE_UNSUPPORTED"), path
        assert transfers.code(FileUse(f"{base}/open/b", "w"), submitter="bob") == "FILE_DENIED"
        assert transfers.code(FileUse(f"{base}/open/a"), submitter="eve") == "FILE_DENIED"
        assert lab.service.copied == []
        assert isinstance(transfers.move(FileUse(f"{base}/open/a"), submitter="bob"), orders.Fetched)


def test_an_endpoint_without_a_collection_says_so(lab: Lab) -> None:
    lab.configure()
    with lab.transfers() as transfers:
        transfers.make("t")
        report = transfers.move(FileUse(f"globus://{lab.remote.id}/a"))
    assert report.error["code"] == "FILE_UNSUPPORTED"
    assert "files.globus" in report.error["message"]


def test_an_endpoint_without_globus_sdk_says_what_to_install(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "globus_sdk", None)
    settings = transfer_settings(read_config(lab.directory.config_file), lab.directory)
    access = Access(settings, unlink=lambda directory, name: None)
    with pytest.raises(MoveError) as raised:
        access.batch_mover("", f"globus://{lab.remote.id}/a", write=False)
    assert raised.value.record.code == "FILE_UNSUPPORTED"
    assert "pip install 'farcall-endpoint[globus]'" in raised.value.record.message


# -- an agent ----------------------------------------------------------------------------------------------------------


def upper(source: File, *, out: File) -> int:
    text = source.path.read_text()
    out.path.write_text(text.upper())
    return len(text)


def submit(cloud: FakeCloud, source: str, target: str) -> str:
    """A call with a file that it reads and one that it writes."""
    with collecting() as found:
        call = cloud.serializer.pack_call((File(source),), with_outputs({"out": File(target)}))
    return cloud.submit_raw(cloud.serializer.pack_function(upper), [pack_files(uses(found), call)])[0]


@pytest.mark.parametrize("kills", [False, True], ids=["", "killed"])
def test_a_task_reads_and_writes_files_of_a_collection(lab: Lab, tmp_path: Path, kills: bool) -> None:
    lab.log_in()
    (lab.remote.root / "a").write_text("some text" * 10)
    lab.service.bytes_each_time = 40 if kills else None
    with running_endpoint(tmp_path / "agent", start=False) as endpoint:
        file = endpoint.directory.config_file
        lab.configure(collection=lab.own.id, directory=str(lab.own.root / "exchange"), path="/exchange")
        file.write_text(file.read_text() + lab.directory.config_file.read_text())
        keep(endpoint.directory.globus_login_file, lab.login)
        endpoint.start()
        base = f"globus://{lab.remote.id}"
        task_id = submit(endpoint.cloud, f"{base}/a", f"{base}/out/a")
        if kills:
            wait_until(lambda: lab.service.tasks and lab.service.task.bytes_transferred)
            endpoint.kill_agent()
            endpoint.start()
            wait_until(lambda: len(lab.service.tasks) > 1)  # the function has returned
            endpoint.kill_agent()
            endpoint.start()
        ended = endpoint.cloud.end(task_id)
        assert (ended.error, ended.value) == ({}, 90)
        assert (lab.remote.root / "out" / "a").read_text() == "SOME TEXT" * 10
        assert len(lab.service.tasks) == 2
        assert len(lab.service.copied) == 2  # each once, though the agent was killed
        wait_until(lambda: lab.exchange() == [])
