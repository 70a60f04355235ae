"""Settings of Globus transfers, URLs of their files, and their journal."""

from __future__ import annotations

import posixpath
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common.errors import ConfigurationError
from farcall_endpoint.config.reader import parse_config
from farcall_endpoint.files.movers import MoveError
from farcall_endpoint.files.movers.globus_documents import place_of_url
from farcall_endpoint.files.movers.globus_journal import Item, Journal, Transfer
from farcall_endpoint.files.settings import GlobusSettings
from farcall_endpoint.services.directory import EndpointDirectory

UUID = "6c54cade-bde5-45c1-bdea-f4bd71dba2cc"


def settings_of(text: str, tmp_path: Path) -> GlobusSettings | None:
    return GlobusSettings.of_config(parse_config(text, source="config.yaml"), EndpointDirectory.of(tmp_path, "lab"))


def test_the_settings_of_an_endpoint(tmp_path: Path) -> None:
    assert settings_of("files: {cache: 10}", tmp_path) is None
    own = tmp_path / "endpoints" / "lab"
    globus = f"{{collection: {UUID.upper()}, directory: ~/exchange}}"
    found = settings_of(f"files: {{transfer_limit: 60, globus: {globus}}}", tmp_path)
    directory = str(Path("~/exchange").expanduser())
    assert found == GlobusSettings(
        collection=UUID,
        path=directory,
        directory=directory,
        login_file=str(own / "globus.json"),
        endpoint_name="lab",
        journal=str(own / "globus"),
        limit_s=60,
    )
    found = settings_of(f"files: {{globus: {{collection: {UUID}, directory: /a, path: /~/b}}}}", tmp_path)
    assert found is not None
    assert (found.directory, found.path) == ("/a", "/~/b")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{collection: lab, directory: /a}", "a UUID, such as"),
        (f"{{collection: {UUID}}}", "directory"),
        (f"{{collection: {UUID}, directory: exchange}}", "Begin it with / or ~/"),
        (f"{{collection: {UUID}, directory: /a, path: exchange}}", "Begin it with / or /~/"),
    ],
)
def test_problems_of_the_section(section: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as raised:
        settings_of(f"files: {{globus: {section}}}", tmp_path)
    assert message in str(raised.value)


def test_a_storage_of_globus_has_no_options(tmp_path: Path) -> None:
    storage = f"{{url: 'globus://{UUID}/shared', submitters: '*', write: true}}"
    settings_of(f"files: {{storages: [{storage}]}}", tmp_path)
    with pytest.raises(ConfigurationError, match="has no options"):
        settings_of(f"files: {{storages: [{storage[:-1]}, options: {{region: x}}}}]}}", tmp_path)


@given(st.lists(st.sampled_from([*"ab./%2eF~?#\\", "%2e", "%2F", "..", "//"]), max_size=12).map("".join))
def test_a_path_stays_below_the_prefix_of_its_url(rest: str) -> None:
    try:
        place = place_of_url(f"globus://{UUID}/shared/{rest}")
    except MoveError:
        return
    assert place.collection == UUID
    assert posixpath.normpath(place.path) == place.path
    assert place.path.startswith("/shared/")


def transfer(submission_id: str) -> Transfer:
    item = Item(f"globus://{UUID}/a", "/a", 3, "3 yesterday")
    return Transfer(
        submission_id=submission_id,
        mode="r",
        collection=UUID,
        own_collection=UUID,
        own_path="/exchange",
        created_at=1.0,
        verify=True,
        items={0: item, 12: item},
    )


def test_the_journal_has_what_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "globus")
    assert journal.load() == []
    first, second = transfer("1"), transfer("2")
    journal.write(first)
    journal.write(second)
    changed = msgspec.structs.replace(second, task_id="t", items={12: second.items[12]})
    journal.write(changed)
    (tmp_path / "globus" / "3.draft").write_bytes(b"{")  # of a process that was killed
    (tmp_path / "globus" / "4.json").symlink_to("gone")  # another thread has removed the file after it was listed
    assert Journal(tmp_path / "globus").load() == [first, changed]
    journal.remove("1")
    journal.remove("1")
    assert journal.load() == [changed]
    assert (tmp_path / "globus" / "2.json").stat().st_mode & 0o077 == 0
