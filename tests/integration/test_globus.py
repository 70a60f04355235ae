"""Files of Globus collections, moved by a stand-in of Globus Transfer, and by the real service where there is a login.

For the real service, set ``FARCALL_TEST_GLOBUS_COLLECTION``, ``FARCALL_TEST_GLOBUS_PATH`` and
``FARCALL_TEST_GLOBUS_DIRECTORY`` (one directory, as a collection of yours and as this machine name it), and
``FARCALL_TEST_GLOBUS_LOGIN``: the ``globus.json`` of an endpoint that is logged in.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import globus_sdk
import msgspec
import pytest
from globus_sdk.testing import RegisteredResponse, get_response_set
from globus_sdk.transport import RetryConfig

from farcall_common.errors import ErrorRecord
from farcall_endpoint.files.movers import BatchMover, Found, Move, MoveError
from farcall_endpoint.files.movers.globus import GlobusMover, transfer_client
from farcall_endpoint.files.movers.globus_journal import Journal
from farcall_endpoint.files.settings import GlobusSettings
from tests.support.globus_service import Collection, GlobusService, serving
from tests.waiting import WAIT_S, wait_until

REAL = ("COLLECTION", "PATH", "DIRECTORY", "LOGIN")
MISSING = [name for name in REAL if not os.environ.get(f"FARCALL_TEST_GLOBUS_{name}")]


class Clock:
    """Monotonic seconds that pass while something waits."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@dataclasses.dataclass
class Results:
    """What a mover says of its moves."""

    found: dict[int, Found] = dataclasses.field(default_factory=dict)
    errors: dict[int, ErrorRecord] = dataclasses.field(default_factory=dict)
    reports: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    unwanted: set[int] = dataclasses.field(default_factory=set)

    def done(self, number: int, outcome: Found | MoveError) -> None:
        assert number not in self.found.keys() | self.errors.keys(), "a file has two results"
        if isinstance(outcome, MoveError):
            self.errors[number] = outcome.record
        else:
            self.found[number] = outcome

    def report(self, number: int, bytes_done: int) -> None:
        self.reports.append((number, bytes_done))

    @property
    def codes(self) -> dict[int, str]:
        return {number: record.code for number, record in self.errors.items()}

    @property
    def error(self) -> ErrorRecord:
        (found,) = self.errors.values()
        return found


@dataclasses.dataclass
class Scene:
    """A collection with files, the endpoint's own collection, and a mover between them."""

    settings: GlobusSettings
    remote: Collection
    drafts: Path
    make: Callable[[], globus_sdk.TransferClient]
    clock: Any
    wait: Callable[[float], None]

    def mover(self, **changes: Any) -> GlobusMover:
        settings = msgspec.structs.replace(self.settings, **changes)
        return GlobusMover(settings, self.make(), clock=self.clock, wait=self.wait)

    def url(self, name: str) -> str:
        """The URL of a file in the collection."""
        return f"globus://{self.remote.id}/{name}"

    def put(self, name: str, data: bytes) -> str:
        """Make a file in the collection; its URL."""
        path = self.remote.local(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return self.url(name)

    def reads(self, mover: BatchMover, urls: list[str]) -> list[Move]:
        found = mover.stat_many(urls)
        moves = []
        for number, url in enumerate(urls):
            state = found[url]
            assert isinstance(state, Found), state
            moves.append(Move(number, url, "r", self.draft(number), state))
        return moves

    def draft(self, number: int) -> Path:
        path = self.drafts / str(number)
        path.touch()
        return path

    def write(self, number: int, url: str, data: bytes) -> Move:
        path = self.drafts / f"source-{number}"
        path.write_bytes(data)
        return Move(number, url, "w", path, Found(len(data)))

    def journal(self) -> list[Any]:
        return Journal(Path(self.settings.journal)).load()

    def left(self) -> list[Path]:
        """What is in the directory that Globus sees."""
        directory = Path(self.settings.directory)
        return sorted(directory.iterdir()) if directory.exists() else []


def run(mover: BatchMover, moves: list[Move], results: Results | None = None) -> Results:
    results = results or Results()
    mover.run(moves, results.report, results.done, results.unwanted.__contains__)
    return results


def quick_client(service: GlobusService) -> globus_sdk.TransferClient:
    """A client whose retries do not wait."""
    retries = RetryConfig(max_retries=2, backoff=lambda _: 0.0)
    return globus_sdk.TransferClient(
        base_url=service.url, authorizer=globus_sdk.AccessTokenAuthorizer("a-token"), retry_config=retries
    )


@pytest.fixture
def service() -> Iterator[GlobusService]:
    with serving() as found:
        yield found


@pytest.fixture
def clients() -> Iterator[list[globus_sdk.TransferClient]]:
    made: list[globus_sdk.TransferClient] = []
    yield made
    for client in made:
        client.close()


@pytest.fixture
def scene(service: GlobusService, tmp_path: Path, clients: list[globus_sdk.TransferClient]) -> Scene:
    remote = service.add(Collection(tmp_path / "remote"))
    own = service.add(Collection(tmp_path / "own"))
    drafts = tmp_path / "drafts"
    drafts.mkdir()
    settings = GlobusSettings(
        collection=own.id,
        path="/exchange",
        directory=str(own.root / "exchange"),
        login_file=str(tmp_path / "globus.json"),
        endpoint_name="lab",
        journal=str(tmp_path / "journal"),
        limit_s=300,
    )

    def make() -> globus_sdk.TransferClient:
        clients.append(quick_client(service))
        return clients[-1]

    clock = Clock()
    return Scene(settings, remote, drafts, make, clock, clock.wait)


@pytest.fixture(params=["stand-in", "real"])
def any_scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    """A scene with the stand-in, and one with the real service: its other collection is the endpoint's own."""
    if request.param == "stand-in":
        yield request.getfixturevalue("scene")
        return
    if MISSING:
        pytest.skip(f"no login at Globus: FARCALL_TEST_GLOBUS_{MISSING[0]} is not set")
    collection, path, directory, login = (os.environ[f"FARCALL_TEST_GLOBUS_{name}"] for name in REAL)
    mark = f"farcall-test-{uuid.uuid4()}"
    remote = Collection(Path(directory) / mark, id=collection)
    remote.root.mkdir()
    settings = GlobusSettings(
        collection=collection, path=path, directory=directory, login_file=login, endpoint_name="lab",
        journal=str(tmp_path / "journal"),
    )  # fmt: skip
    (tmp_path / "drafts").mkdir()
    client = transfer_client(Path(login), environ=os.environ)

    class RealScene(Scene):
        def url(self, name: str) -> str:
            return f"globus://{collection}{path.rstrip('/')}/{mark}/{name}"

    with client:
        yield RealScene(settings, remote, tmp_path / "drafts", lambda: client, time.monotonic, time.sleep)


# -- what works --------------------------------------------------------------------------------------------------------


def test_files_come_and_go(any_scene: Scene) -> None:
    mover = any_scene.mover()
    first, second = any_scene.put("raw/a b.h5", b"first"), any_scene.put("raw/2.h5", b"second")
    moves = any_scene.reads(mover, [first, second])
    written = any_scene.write(7, any_scene.url("out/result.h5"), b"result")
    results = run(mover, [*moves, written])
    assert results.errors == {}
    assert [move.path.read_bytes() for move in moves] == [b"first", b"second"]
    assert any_scene.remote.local("out/result.h5").read_bytes() == b"result"
    assert {number: found.size_bytes for number, found in results.found.items()} == {0: 5, 1: 6, 7: 6}
    assert results.found[0].version == moves[0].found.version != ""
    assert any_scene.journal() == []


def test_a_missing_file_and_a_directory_are_found_by_a_look_up(any_scene: Scene) -> None:
    any_scene.put("raw/1.h5", b"1")
    (any_scene.remote.local("raw") / "folder").mkdir()
    urls = [any_scene.url(name) for name in ("raw/1.h5", "raw/2.h5", "raw/folder", "nowhere/3.h5")]
    found = any_scene.mover().stat_many(urls)
    states = [found[url] for url in urls]
    kinds = [each.record.code if isinstance(each, MoveError) else each.size_bytes for each in states]
    assert kinds == [1, "FILE_NOT_FOUND", "FILE_UNSUPPORTED", "FILE_NOT_FOUND"]


def test_a_missing_source_fails_its_own_file_only(any_scene: Scene) -> None:
    mover = any_scene.mover()
    urls = [any_scene.put(f"raw/{number}", b"x" * number) for number in range(1, 4)]
    moves = any_scene.reads(mover, urls)
    any_scene.remote.local("raw/2").unlink()
    results = run(mover, moves)
    assert results.found.keys() == {0, 2}
    assert results.codes == {1: "FILE_NOT_FOUND"}
    assert "Globus: task " in results.error.message
    assert not results.error.retryable


def test_a_large_file_is_reported_on_its_way(scene: Scene, service: GlobusService) -> None:
    service.bytes_each_time = 100
    mover = scene.mover()
    moves = scene.reads(mover, [scene.put("a", b"a" * 300), scene.put("b", b"b" * 100)])
    results = run(mover, moves)
    assert results.errors == {}
    assert [bytes_done for number, bytes_done in results.reports if number == 0] == [75, 150, 225, 300]


# -- few requests ------------------------------------------------------------------------------------------------------


def test_many_files_are_one_listing_and_one_transfer(scene: Scene, service: GlobusService) -> None:
    mover = scene.mover()
    urls = [scene.put(f"raw/{number:04}", b"x") for number in range(1000)]
    moves = scene.reads(mover, urls)
    results = run(mover, moves)
    assert len(results.found) == 1000
    assert service.count("GET /v0.10/operation") == 1
    assert service.count("POST /v0.10/transfer") == 1
    assert len(service.requests) < 10


def test_files_of_two_collections_are_two_transfers_at_a_time(scene: Scene, service: GlobusService) -> None:
    other = service.add(Collection(scene.remote.root.parent / "other"))
    (other.root / "b").write_bytes(b"b")
    mover = scene.mover()
    results = run(mover, scene.reads(mover, [scene.put("a", b"a"), f"globus://{other.id}/b"]))
    assert results.found.keys() == {0, 1}
    assert [len(task.document["DATA"]) for task in service.tasks.values()] == [1, 1]
    assert service.requests.index("POST /v0.10/transfer") < service.requests.index(
        f"GET /v0.10/task/{next(iter(service.tasks))}"
    )


def test_two_tasks_that_write_one_file_leave_one_of_both(scene: Scene, service: GlobusService) -> None:
    moves = [scene.write(1, scene.url("out"), b"one"), scene.write(2, scene.url("out"), b"two")]
    assert run(scene.mover(), moves).errors == {}
    assert scene.remote.local("out").read_bytes() in (b"one", b"two")
    assert len(service.tasks) == 2


def test_what_is_submitted(scene: Scene, service: GlobusService) -> None:
    mover = scene.mover()
    run(mover, scene.reads(mover, [scene.put("a", b"a")]))
    document = service.task.document
    assert document["verify_checksum"]
    assert document["skip_source_errors"]
    assert not any(document[f"notify_on_{event}"] for event in ("succeeded", "failed", "inactive"))
    assert document["submission_id"] in document["label"]
    assert "sync_level" not in document
    assert document["DATA"][0]["source_path"] == "/a"


@pytest.mark.parametrize("side", ["remote", "own"])
def test_checksums_are_not_requested_where_they_cannot_be_computed(
    scene: Scene, service: GlobusService, side: str
) -> None:
    changed = scene.remote if side == "remote" else service.collections[scene.settings.collection]
    changed.disable_verify = True
    mover = scene.mover()
    for name in ("a", "b"):
        assert run(mover, scene.reads(mover, [scene.put(name, b"x")])).errors == {}
    assert [task.document["verify_checksum"] for task in service.tasks.values()] == [False, False]
    assert service.count("GET /v0.10/endpoint/") <= 2  # looked up once


# -- what may go wrong -------------------------------------------------------------------------------------------------


def test_a_transfer_with_a_missing_file_that_stays_active_is_cancelled_at_the_limit(
    scene: Scene, service: GlobusService
) -> None:
    service.missing_keeps_active = True
    mover = scene.mover(limit_s=50)
    moves = scene.reads(mover, [scene.put(name, b"x") for name in ("a", "ab", "b")])
    scene.remote.local("a").unlink()
    results = run(mover, moves)
    assert service.task.status == "FAILED"  # it does not block its successor
    assert service.count(f"POST /v0.10/task/{service.task.task_id}/cancel") == 1
    assert 50 <= sum(scene.clock.waits) < 80
    assert results.codes == {0: "FILE_NOT_FOUND"}
    assert "No such file or directory" in results.error.message
    assert service.task.task_id in results.error.message
    assert results.found.keys() == {1, 2}  # what came before counts


def test_a_destination_that_refuses_is_denied(scene: Scene, service: GlobusService) -> None:
    scene.remote.denied.add("/out/secret")
    moves = [scene.write(1, scene.url("out/secret/x"), b"1"), scene.write(2, scene.url("out/y"), b"2")]
    results = run(scene.mover(limit_s=30), moves)
    assert results.codes == {1: "FILE_DENIED"}
    assert "permission denied" in results.error.message
    assert results.found.keys() == {2}


def test_a_source_that_refuses_is_denied(scene: Scene) -> None:
    mover = scene.mover()
    moves = scene.reads(mover, [scene.put("a", b"a")])
    scene.remote.denied.add("/a")
    assert run(mover, moves).codes == {0: "FILE_DENIED"}
    found = mover.stat_many([scene.url("a")])[scene.url("a")]
    assert isinstance(found, MoveError)
    assert (found.record.code, "Denied by endpoint" in found.record.message) == ("FILE_DENIED", True)


@pytest.mark.parametrize("side", ["remote", "own"])
def test_a_collection_that_is_not_connected_times_out_with_the_words_of_globus(
    scene: Scene, service: GlobusService, side: str
) -> None:
    mover = scene.mover(limit_s=30)
    moves = scene.reads(mover, [scene.put("a", b"a")])
    changed = scene.remote if side == "remote" else service.collections[scene.settings.collection]
    changed.is_connected = False
    results = run(mover, moves)
    assert results.codes == {0: "FILE_TIMEOUT"}
    assert "endpoint not connected" in results.error.message
    assert service.task.task_id in results.error.message


def test_a_paused_transfer_times_out_with_the_words_of_its_administrator(scene: Scene, service: GlobusService) -> None:
    service.is_paused = True
    mover = scene.mover(limit_s=30)
    results = run(mover, scene.reads(mover, [scene.put("a", b"a")]))
    assert results.codes == {0: "FILE_TIMEOUT"}
    assert "maintenance until Monday" in results.error.message


def test_expired_credentials_end_a_transfer_at_once(scene: Scene, service: GlobusService) -> None:
    service.is_inactive = True
    mover = scene.mover()
    results = run(mover, scene.reads(mover, [scene.put("a", b"a")]))
    assert results.codes == {0: "FILE_DENIED"}
    assert "farcall-endpoint globus login lab" in results.error.hint
    assert sum(scene.clock.waits) < 60


def test_a_transfer_that_was_cancelled_at_globus_is_not_tried_again(scene: Scene, service: GlobusService) -> None:
    service.bytes_each_time = 1
    mover = scene.mover()
    moves = scene.reads(mover, [scene.put("a", b"abc")])

    def wait(seconds: float) -> None:
        service.answer("POST", f"/task/{service.task.task_id}/cancel", {}, {})
        scene.clock.wait(seconds)

    scene.wait = wait
    results = run(scene.mover(), moves)
    assert results.codes == {0: "FILE_UNSUPPORTED"}
    assert "canceled by the owner" in results.error.message
    assert not results.error.retryable


def test_a_missing_consent_says_which_command_grants_it(scene: Scene) -> None:
    mover = scene.mover()
    moves = scene.reads(mover, [scene.put("a", b"a")])
    scene.remote.needs_consent = True
    command = f"farcall-endpoint globus login lab --collection {scene.remote.id}"
    found = mover.stat_many([scene.url("a")])[scene.url("a")]
    assert isinstance(found, MoveError)
    results = run(mover, moves)
    for record in (found.record, results.error):
        assert record.code == "FILE_DENIED"
        assert command in record.hint
        assert "data_access" in record.message
    assert scene.journal() == []


def test_an_unknown_collection_and_a_refused_login(scene: Scene, service: GlobusService) -> None:
    mover, url = scene.mover(), f"globus://{uuid.uuid4()}/a"
    found = mover.stat_many([url])[url]
    assert isinstance(found, MoveError)
    assert (found.record.code, "No such endpoint" in found.record.message) == ("FILE_UNSUPPORTED", True)
    moves = scene.reads(mover, [scene.put("a", b"a")])
    service.refused_tokens.add("a-token")
    results = run(mover, moves)
    assert results.codes == {0: "FILE_DENIED"}
    assert "farcall-endpoint globus login lab" in results.error.hint


def test_too_many_requests_wait_as_long_as_globus_says(
    scene: Scene, service: GlobusService, clients: list[globus_sdk.TransferClient]
) -> None:
    asked: list[float | None] = []

    def backoff(context: Any) -> float:
        asked.append(context.backoff)
        return 0.0

    clients.append(
        globus_sdk.TransferClient(
            base_url=service.url,
            authorizer=globus_sdk.AccessTokenAuthorizer("a-token"),
            retry_config=RetryConfig(backoff=backoff),
        )
    )
    mover = GlobusMover(scene.settings, clients[-1], clock=scene.clock, wait=scene.wait)
    moves = scene.reads(mover, [scene.put("a", b"a")])
    service.too_many = 3
    assert run(mover, moves).errors == {}
    assert asked == [1.0, 1.0, 1.0]


def test_a_service_that_is_down_is_tried_again_later(scene: Scene, service: GlobusService) -> None:
    mover = scene.mover()
    moves = scene.reads(mover, [scene.put("a", b"abc")])
    service.bytes_each_time = 1
    waits = iter(range(100))

    def wait(seconds: float) -> None:
        service.is_down = 1 <= next(waits) < 4
        scene.clock.wait(seconds)

    scene.wait = wait
    results = run(scene.mover(), moves)
    assert results.errors == {}
    assert len(service.copied) == 1


def test_an_answer_of_a_portal_is_none_of_globus(scene: Scene, service: GlobusService) -> None:
    mover = scene.mover(limit_s=20)
    urls = [scene.put("a", b"a"), scene.put("b", b"b")]
    moves = scene.reads(mover, urls)
    service.is_portal = True
    results = run(mover, moves)
    assert results.codes == {0: "FILE_UNREACHABLE", 1: "FILE_UNREACHABLE"}
    assert all(record.retryable for record in results.errors.values())
    for some in (urls, urls[:1]):
        found = mover.stat_many(some).values()
        assert {each.record.code for each in found if isinstance(each, MoveError)} == {"FILE_UNREACHABLE"}
    service.is_portal = False
    assert run(mover, moves).errors == {}


def test_a_transfer_goes_on_while_globus_does_not_answer_for_long(scene: Scene, service: GlobusService) -> None:
    service.bytes_each_time = 1
    mover = scene.mover(limit_s=20)
    moves = scene.reads(mover, [scene.put("a", b"abc")])

    def wait(seconds: float) -> None:
        service.is_down = True
        scene.clock.wait(seconds)

    scene.wait = wait
    results = run(scene.mover(limit_s=20), moves)
    assert results.codes == {0: "FILE_UNREACHABLE"}
    assert results.error.retryable
    assert service.task.task_id in results.error.message
    service.is_down, service.bytes_each_time = False, None
    assert run(mover, moves).errors == {}  # the next attempt finds it
    assert len(service.tasks) == 1
    assert scene.journal() == []


def test_a_directory_that_is_not_that_of_the_collection_is_the_fault_of_the_configuration(
    scene: Scene, tmp_path: Path
) -> None:
    mover = scene.mover(directory=str(tmp_path / "elsewhere"))
    moves = [*scene.reads(mover, [scene.put("a", b"a")]), scene.write(1, scene.url("b"), b"b")]
    results = run(mover, moves)
    assert results.codes == {0: "FILE_UNSUPPORTED", 1: "FILE_UNSUPPORTED"}
    assert all("files.globus" in record.message for record in results.errors.values())


@pytest.mark.parametrize("path", ["../etc/passwd", "a/../../b", "a/%2e%2e/b", "a//b", "./a", "a/%2E/b", "%2e%2e%2fb"])
def test_a_path_cannot_leave_the_directory_that_a_submitter_may_use(scene: Scene, path: str) -> None:
    mover, url = scene.mover(), scene.url(path)
    found = mover.stat_many([url])[url]
    assert isinstance(found, MoveError)
    assert found.record.code == "FILE_UNSUPPORTED"
    results = run(mover, [Move(1, url, "r", scene.draft(1), Found(None))])
    assert results.codes == {1: "FILE_UNSUPPORTED"}


def test_a_url_without_the_uuid_of_a_collection_is_refused(scene: Scene, service: GlobusService) -> None:
    found = scene.mover().stat_many(["globus://lab-storage/a"])["globus://lab-storage/a"]
    assert isinstance(found, MoveError)
    assert "globus://UUID/path" in found.record.message
    assert service.requests == []


def test_what_is_not_needed_any_more_is_cancelled_at_globus(scene: Scene, service: GlobusService) -> None:
    service.bytes_each_time = 1
    mover, results = scene.mover(), Results()
    moves = scene.reads(mover, [scene.put("a", b"abcdef"), scene.put("b", b"abcdef")])

    def wait(seconds: float) -> None:
        results.unwanted.add(len(results.unwanted))
        scene.clock.wait(seconds)

    scene.wait = wait
    run(scene.mover(), moves, results)
    assert (results.found, results.errors) == ({}, {})
    assert service.task.status == "FAILED"
    assert (scene.left(), scene.journal()) == ([], [])


def test_a_file_that_is_not_needed_any_more_does_not_stop_the_others(scene: Scene, service: GlobusService) -> None:
    mover, results = scene.mover(), Results(unwanted={0})
    run(mover, scene.reads(mover, [scene.put("a", b"a"), scene.put("b", b"b")]), results)
    assert results.found.keys() == {1}


def test_a_full_disk_of_the_endpoint(scene: Scene, service: GlobusService, tmp_path: Path) -> None:
    mover = scene.mover()
    moves = scene.reads(mover, [scene.put("a", b"a" * 2**20)])
    full = Path("/dev/full")  # writing to it fails like a full disk; links cannot be made to it
    results = run(mover, [moves[0]._replace(path=full)])
    assert results.codes == {0: "FILES_NO_ROOM"}
    assert results.error.retryable


def test_nothing_is_left_behind(scene: Scene) -> None:
    mover = scene.mover()
    moves = [*scene.reads(mover, [scene.put("a", b"a")]), scene.write(1, scene.url("b"), b"b")]
    assert run(mover, moves).errors == {}
    assert (scene.left(), scene.journal()) == ([], [])
    assert Path(scene.settings.journal).stat().st_mode & 0o077 == 0
    assert Path(scene.settings.directory).stat().st_mode & 0o077 == 0


# -- restarts ----------------------------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
import globus_sdk, msgspec
from farcall_endpoint.files.movers import Found, Move
from farcall_endpoint.files.movers.globus import GlobusMover, transfer_client
from farcall_endpoint.files.settings import GlobusSettings

url, settings, moves, hold = msgspec.json.decode(sys.argv[1])

def done(number, outcome):
    if number == hold:
        print("held", flush=True)
        sys.stdin.read()

client = globus_sdk.TransferClient(base_url=url, authorizer=globus_sdk.AccessTokenAuthorizer("a-token"))
mover = GlobusMover(msgspec.convert(settings, GlobusSettings), client)
batch = [Move(number, url, mode, Path(path), Found(*found)) for number, url, mode, path, found in moves]
mover.run(batch, lambda *_: None, done, lambda _: False)
"""


def start_child(scene: Scene, service: GlobusService, moves: list[Move], hold: int = -1) -> subprocess.Popen[str]:
    """A process that moves files, and stops when the file ``hold`` is done."""
    rows = [(move.number, move.url, move.mode, str(move.path), tuple(move.found)) for move in moves]
    argument = msgspec.json.encode((service.url, scene.settings, rows, hold)).decode()
    command = [sys.executable, "-c", CHILD, argument]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=WAIT_S)


@pytest.mark.parametrize("is_processed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", range(10))
def test_a_process_killed_at_any_request_transfers_nothing_twice(
    scene: Scene, service: GlobusService, step: int, is_processed: bool
) -> None:
    moves = scene.reads(scene.mover(), [scene.put("a", b"a" * 30), scene.put("b", b"b" * 30)])
    moves.append(scene.write(5, scene.url("out"), b"c" * 30))
    service.bytes_each_time = 25
    service.hold(step, is_processed=is_processed)
    with start_child(scene, service, moves) as child:
        assert service.held.wait(WAIT_S)
        kill(child)
    service.release()
    again = [move._replace(path=scene.draft(10 + move.number)) if move.mode == "r" else move for move in moves]
    results = run(scene.mover(), again)
    assert results.errors == {}
    assert [again[0].path.read_bytes(), again[1].path.read_bytes()] == [b"a" * 30, b"b" * 30]
    assert scene.remote.local("out").read_bytes() == b"c" * 30
    assert sorted(Path(source).name for source, _ in service.copied) == ["0", "a", "b"]  # each once
    assert len(service.tasks) == 2
    assert (scene.left(), scene.journal()) == ([], [])


@pytest.mark.parametrize("hold", [0, 1])
def test_a_process_killed_while_it_hands_files_on_transfers_nothing_twice(
    scene: Scene, service: GlobusService, hold: int
) -> None:
    moves = scene.reads(scene.mover(), [scene.put("a", b"a"), scene.put("b", b"b")])
    with start_child(scene, service, moves, hold) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        kill(child)
    again = [move._replace(path=scene.draft(10 + move.number)) for move in moves]
    assert run(scene.mover(), again).errors == {}
    assert [move.path.read_bytes() for move in again] == [b"a", b"b"]
    assert len(service.copied) == 2
    assert (scene.left(), scene.journal()) == ([], [])


def test_an_answer_that_was_lost_makes_no_second_transfer(scene: Scene, service: GlobusService) -> None:
    mover = scene.mover()
    moves = [*scene.reads(mover, [scene.put("a", b"a")]), scene.write(1, scene.url("b"), b"b")]
    service.loses_answer = True
    assert run(mover, moves).errors == {}
    assert len(service.copied) == 2


def test_files_of_a_former_process_wait_for_their_tasks_for_a_day(scene: Scene, service: GlobusService) -> None:
    moves = scene.reads(scene.mover(), [scene.put("a", b"a" * 30), scene.put("b", b"b" * 30)])
    service.bytes_each_time = 25
    service.hold(3, is_processed=True)
    with start_child(scene, service, moves) as child:
        assert service.held.wait(WAIT_S)
        kill(child)
    service.release()
    assert run(scene.mover(), [moves[0]]).errors == {}
    assert [len(transfer.items) for transfer in scene.journal()] == [1]
    assert len(scene.left()) == 1
    late = GlobusMover(
        scene.settings, scene.make(), clock=scene.clock, wait=scene.wait, now=lambda: time.time() + 90_000
    )
    assert run(late, []).errors == {}
    assert (scene.left(), scene.journal()) == ([], [])


def test_a_transfer_of_a_former_process_is_not_taken_for_a_file_that_changed(
    scene: Scene, service: GlobusService
) -> None:
    moves = scene.reads(scene.mover(), [scene.put("a", b"old")])
    with start_child(scene, service, moves, 0) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        kill(child)
    mover = scene.mover()
    again = scene.reads(mover, [scene.put("a", b"new one")])
    assert run(mover, again).errors == {}
    assert again[0].path.read_bytes() == b"new one"


def test_a_transfer_that_globus_does_not_know_any_more_is_made_again(scene: Scene, service: GlobusService) -> None:
    moves = scene.reads(scene.mover(), [scene.put("a", b"a")])
    with start_child(scene, service, moves, 0) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        kill(child)
    service.tasks.clear()
    results = run(scene.mover(), moves)
    assert (results.codes, results.error.retryable) == ({0: "FILE_UNREACHABLE"}, True)
    assert run(scene.mover(), moves).errors == {}


def test_a_journal_entry_that_cannot_be_read_stops_nothing(scene: Scene) -> None:
    Path(scene.settings.journal).mkdir()
    (Path(scene.settings.journal) / "broken.json").write_bytes(b"{")
    mover = scene.mover()
    assert run(mover, scene.reads(mover, [scene.put("a", b"a")])).errors == {}


# -- the stand-in ------------------------------------------------------------------------------------------------------


def shape(value: Any) -> Any:
    """A document's keys and kinds of values; None may be anything."""
    if isinstance(value, Mapping):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return None if value is None else type(value)


def assert_same_shape(ours: Any, theirs: Any, *, more: frozenset[str] = frozenset()) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() - more == theirs.keys()
        for name, kind in theirs.items():
            assert_same_shape(ours[name], kind)
    elif isinstance(theirs, list) and theirs and ours:
        assert_same_shape(ours[0], theirs[0])
    elif theirs is not None and ours is not None and not isinstance(theirs, list):
        assert ours == theirs


def published(name: str) -> Any:
    """The answer that globus-sdk publishes."""
    found = get_response_set(f"transfer.{name}").lookup("default")
    assert isinstance(found, RegisteredResponse)
    return found.json


def test_the_stand_in_answers_in_the_shapes_that_globus_sdk_publishes(scene: Scene, service: GlobusService) -> None:
    client = scene.make()
    url = scene.put("dir/a", b"a")
    mover = scene.mover()
    run(mover, scene.reads(mover, [url]))
    task_id = service.task.task_id
    assert_same_shape(shape(client.get_submission_id().data), shape(published("get_submission_id")))
    assert_same_shape(shape(client.operation_stat(scene.remote.id, "/dir/a").data), shape(published("operation_stat")))
    task, published_task = client.get_task(task_id).data, published("task_list")["DATA"][0]
    more = frozenset({"DATA_TYPE", "source_base_path", "destination_base_path"})
    assert_same_shape(shape(task), shape(published_task), more=more)
    repeated = client.submit_transfer(service.task.document).data
    assert repeated["code"] == "Duplicate"
    assert_same_shape(shape(repeated), shape(published("submit_transfer")))
    cancelled = client.cancel_task(task_id).data
    assert_same_shape(shape(cancelled), shape(published("cancel_task")))
    page = client.task_successful_transfers(task_id).data
    known = published("endpoint_manager_task_successful_transfers")
    more = frozenset({"checksum", "checksum_algorithm", "dynamic", "size"})
    assert shape(page).keys() == shape(known).keys()
    assert page["DATA"][0].keys() - more == known["DATA"][0].keys()
    endpoint, known = client.get_endpoint(scene.remote.id).data, published("get_endpoint")
    assert endpoint.keys() - known.keys() == {"high_assurance"}  # of later releases of the service
    for name in endpoint.keys() & known.keys():
        assert None in (endpoint[name], known[name]) or type(endpoint[name]) is type(known[name]), name


@pytest.mark.parametrize(
    ("name", "case", "request_of"),
    [
        ("operation_stat", "not_found", lambda client, scene: client.operation_stat(scene.remote.id, "/nowhere")),
        ("operation_stat", "permission_denied", lambda client, scene: client.operation_stat(scene.remote.id, "/no/a")),
        (
            "submit_transfer",
            "failure",
            lambda client, scene: client.submit_transfer(
                globus_sdk.TransferData(scene.remote.id, scene.settings.collection)
            ),
        ),
    ],
)
def test_the_stand_in_refuses_as_globus_does(
    scene: Scene, name: str, case: str, request_of: Callable[[globus_sdk.TransferClient, Scene], Any]
) -> None:
    scene.remote.denied.add("/no/")
    with pytest.raises(globus_sdk.TransferAPIError) as raised:
        request_of(scene.make(), scene)
    known = get_response_set(f"transfer.{name}").lookup(case)
    assert isinstance(known, RegisteredResponse)
    assert isinstance(known.json, dict)
    assert (raised.value.http_status, raised.value.code) == (known.status, known.json["code"])
    assert_same_shape(shape(raised.value.raw_json), shape(known.json))


def test_waiting_ends(service: GlobusService) -> None:
    """The server ends with its test, also while it holds a request."""
    service.hold(0, is_processed=False)
    with subprocess.Popen([sys.executable, "-c", f"import urllib.request as u; u.urlopen('{service.url}x')"]) as child:
        wait_until(service.held.is_set)
        child.kill()
