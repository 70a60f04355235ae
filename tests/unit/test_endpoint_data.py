"""Directories of tasks and Valkey for them: what is decided, and what is deleted, without processes."""

from __future__ import annotations

import collections
import fcntl
import os
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall import Executor, current
from farcall.testing import FakeCloud
from farcall_common.errors import ConfigurationError, ErrorRecord, TaskFailed, Unavailable
from farcall_endpoint.agent.shell.payers import Payers
from farcall_endpoint.config.reader import read_config
from farcall_endpoint.config.settings import SweepSettings, ValkeySettings
from farcall_endpoint.contracts.agent_manager import ValkeyAddress, ValkeyAnswered, ValkeyRequested
from farcall_endpoint.contracts.manager_worker import Order, ValkeyAnswer, ValkeyRequest
from farcall_endpoint.host.memory_directories import MemoryDirectories
from farcall_endpoint.host.process_directory import ProcessDirectory, remove_leftovers
from farcall_endpoint.host.removal import remove_tree
from farcall_endpoint.manager.core.actions import Answer
from farcall_endpoint.manager.core.events import PacketsReceived
from farcall_endpoint.manager.shell.worker_process import ScratchRemover, WorkerDirectories, Workplace, scratch_of
from farcall_endpoint.services import sweeper
from farcall_endpoint.services.sweeper import StoredFile, Sweeper, choose
from farcall_endpoint.services.valkey import ValkeyTable
from farcall_endpoint.worker.places import SHARED, TaskPlaces
from farcall_endpoint.worker.settings import WorkerSettings
from tests.support.manager import Rig
from tests.waiting import wait_until

ALICE = "018f0000-0000-7000-8000-00000000000a"
BOB = "018f0000-0000-7000-8000-00000000000b"
KEY = "0123456789abcdef" * 2
DAY_S = 86_400.0

# -- removal -----------------------------------------------------------------------------------------------------------


def test_a_tree_deeper_than_python_can_recurse_is_removed(tmp_path: Path) -> None:
    top = os.open(tmp_path, os.O_RDONLY)
    os.mkdir("tree", dir_fd=top)
    inner = os.open("tree", os.O_RDONLY, dir_fd=top)
    for _ in range(3 * sys.getrecursionlimit()):
        os.mkdir("d", dir_fd=inner)
        deeper = os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = deeper
    os.close(inner)
    os.close(top)

    assert remove_tree(str(tmp_path / "tree"))
    assert not list(tmp_path.iterdir())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o500)
    (tmp_path / "tree" / "a").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "link").symlink_to(kept)
    (tmp_path / "link").symlink_to(kept)

    assert remove_tree(str(tmp_path / "tree"))
    assert not remove_tree(str(tmp_path / "link"))
    assert kept.stat().st_mode & 0o777 == 0o500


def test_directories_that_may_not_be_entered_are_removed(tmp_path: Path) -> None:
    locked = tmp_path / "tree" / "locked"
    (locked / "inner").mkdir(parents=True)
    (locked / "inner" / "file").touch()
    (locked / "inner").chmod(0)
    locked.chmod(0)

    assert remove_tree(str(tmp_path / "tree"))


def test_what_does_not_exist_is_removed() -> None:
    assert remove_tree("/nowhere/at-all")


# -- directories of processes ------------------------------------------------------------------------------------------


def test_only_directories_of_dead_processes_are_removed(tmp_path: Path) -> None:
    own = ProcessDirectory(tmp_path, prefix="p-")
    (own.path / "file").touch()
    (tmp_path / "p-dead").mkdir()
    (tmp_path / "p-dead" / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "p-link").symlink_to(tmp_path / "other")
    assert own.path.stat().st_mode & 0o777 == 0o700

    remove_leftovers(tmp_path, prefix="p-")
    assert {each.name for each in tmp_path.iterdir()} == {own.path.name, "other", "p-link"}

    own.remove()
    assert {each.name for each in tmp_path.iterdir()} == {"other", "p-link"}


def test_a_directory_is_locked_while_its_process_lives(tmp_path: Path) -> None:
    own = ProcessDirectory(tmp_path, prefix="p-")
    descriptor = os.open(own.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    own.remove()


def test_scratch_of_dead_workers_is_removed(tmp_path: Path) -> None:
    (tmp_path / "scratch-1" / "task").mkdir(parents=True)
    remover = ScratchRemover()
    remover.removed("")
    remover.removed(str(tmp_path / "scratch-2"))
    remover.removed(str(tmp_path / "scratch-1"))
    remover.close()
    assert not list(tmp_path.iterdir())


def test_names_in_memory_cannot_be_guessed(tmp_path: Path) -> None:
    directories = MemoryDirectories(tmp_path, b"key")
    found = {directories.of(each) for each in ("", ALICE, BOB)}
    assert len(found) == 3
    assert directories.of(ALICE) in found
    assert not any(ALICE in each or each.endswith("owner") for each in found)
    assert not found & {MemoryDirectories(tmp_path, b"another").of(each) for each in ("", ALICE, BOB)}
    assert all(Path(each).stat().st_mode & 0o777 == 0o700 for each in found)


def test_tasks_without_room_in_memory_get_no_directory_there(tmp_path: Path) -> None:
    assert MemoryDirectories(tmp_path / "missing", b"key").of(ALICE) == ""


# -- in a worker -------------------------------------------------------------------------------------------------------


def places(tmp_path: Path, submitter: str = "", *, memory: Path | str = "", worker_of: str = "") -> TaskPlaces:
    order = Order(ALICE, 2, "h", 0, submitter=submitter)
    made = WorkerSettings(temporary=str(tmp_path / "temporary"), memory=str(memory), submitter=worker_of)
    return TaskPlaces(order, root=str(tmp_path / "work"), worker_id="7", settings=made)


def test_directories_are_made_when_they_are_asked_for(tmp_path: Path) -> None:
    of_owner = places(tmp_path)
    assert not list(tmp_path.iterdir())
    scratch = of_owner.scratch()
    assert scratch == of_owner.scratch() == tmp_path / "temporary" / "scratch-7" / f"{ALICE}-2"
    assert of_owner.shared_dir() == tmp_path / "work" / SHARED
    assert of_owner.memory_dir() is None
    (scratch / "deep" / "er").mkdir(parents=True)
    of_owner.remove_scratch()
    assert not list((tmp_path / "temporary").iterdir())


def test_without_a_directory_of_the_manager_scratch_is_a_new_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = TaskPlaces(Order(ALICE, 1, "h", 0), root=str(tmp_path), worker_id="7", settings=WorkerSettings())
    assert made.scratch().parent == tmp_path
    made.remove_scratch()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_no_worker_of_the_owner_from_starting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    directories = WorkerDirectories(
        Workplace(working_dir=tmp_path, environment={}, slots=[], settings=WorkerSettings())
    )
    settings = directories.settings("")
    assert (settings.temporary, scratch_of(settings, 3)) == ("", "")
    with pytest.raises(FileNotFoundError):
        directories.settings(ALICE)


def test_submitters_have_directories_of_their_own(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    alice = places(tmp_path, ALICE, memory=memory, worker_of=ALICE)
    assert alice.shared_dir() == tmp_path / "work" / "submitters" / ALICE / SHARED
    assert alice.memory_dir() == memory


def test_a_worker_of_several_submitters_separates_their_memory(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    found = {each: places(tmp_path, each, memory=memory).memory_dir() for each in ("", ALICE, BOB)}
    assert found == {"": memory, ALICE: memory / ALICE, BOB: memory / BOB}


def test_a_memory_directory_that_cannot_be_made_is_none(tmp_path: Path) -> None:
    assert places(tmp_path, memory=tmp_path / "missing" / "too").memory_dir() is None


# -- what is deleted ---------------------------------------------------------------------------------------------------

NOW = 1e9


def stored(name: str, age_s: float, *, place: str = "a", size: int = 1) -> StoredFile:
    return StoredFile(place, ("objects", name), size, NOW - age_s)


def chosen(
    *files: StoredFile, budget: int = 10**9, most: int = 1000, payers: Mapping[str, str] = types.MappingProxyType({})
) -> list[str]:
    found = choose(
        files, now=NOW, budget_bytes=budget, retention_s=DAY_S, max_age_s=30 * DAY_S, payers=payers, most_files=most
    )
    return [each.path[-1] for each in found]


@pytest.mark.parametrize(
    ("suffix", "lifetime_s"),
    [
        *((".t", DAY_S), (".t-300", 300.0), (".x", 30 * DAY_S), (".c-3", DAY_S), (".c-3.1", DAY_S), (".g-mine", DAY_S)),
        *((".t-999999999", 30 * DAY_S), (".x.draft", DAY_S), ("", DAY_S)),
    ],
)
def test_an_object_is_kept_as_long_as_its_name_says(suffix: str, lifetime_s: float) -> None:
    name = KEY + suffix
    assert chosen(stored(name, lifetime_s - 1)) == []
    assert chosen(stored(name, lifetime_s)) == [name]


def test_what_is_young_stays_up_to_twice_the_budget() -> None:
    files = [stored(f"{KEY}.t-1", 59), stored("new", 0, size=10**6), stored("future", -100, size=10**6)]
    assert chosen(*files, budget=10**6 + 1, most=0) == []
    assert chosen(*files, budget=10**6) == [f"{KEY}.t-1"]
    assert chosen(*files, budget=10**6 - 1) == [f"{KEY}.t-1", "new"]
    assert chosen(stored(f"{KEY}.t-1", 60)) == [f"{KEY}.t-1"]


def test_what_is_touched_again_and_again_takes_nothing_from_others() -> None:
    touched = [stored(f"touched-{number}", 0, place="touching", size=10) for number in range(20)]
    small = [stored(f"small-{number}", 59 - number, place="small", size=10) for number in range(3)]
    assert chosen(*small, *touched, budget=60) == [f"touched-{number}" for number in reversed(range(9, 20))]


def test_over_budget_the_oldest_go_first() -> None:
    files = [stored("b", 200, size=10), stored("a", 300, size=10), stored("c", 100, size=10)]
    assert chosen(*files, budget=30) == []
    assert chosen(*files, budget=29) == ["a"]
    assert chosen(*files, budget=5) == ["a", "b", "c"]


def test_who_uses_most_loses_first() -> None:
    small = [stored("small", 10_000, place="small", size=10)]
    large = [stored(f"large-{number}", 100 + number, place="large", size=10) for number in range(5)]
    assert chosen(*small, *large, budget=40) == ["large-4", "large-3"]
    assert chosen(*small, *large, budget=20) == ["large-4", "large-3", "large-2", "large-1"]


def test_directories_of_service_accounts_count_for_their_payer() -> None:
    robots = [stored(f"robot-{number}", 200 - number, place=f"robot-{number}", size=10) for number in range(8)]
    small = [stored(f"small-{number}", 10_000 + number, place="small", size=10) for number in range(4)]
    payers = {f"robot-{number}": "mallory" for number in range(8)}
    assert chosen(*robots, *small, budget=80) == ["small-3", "small-2", "small-1", "robot-0"]
    assert chosen(*robots, *small, budget=80, payers=payers) == [f"robot-{number}" for number in range(4)]
    assert chosen(*robots, *small, most=5, payers=payers) == [f"robot-{number}" for number in range(3)]


def test_payers_are_known_after_a_restart(tmp_path: Path) -> None:
    first = Payers(tmp_path / "payers")
    first.add("robot", "ada")
    first.add("robot", "ada")
    first.add("ada", "")
    assert (tmp_path / "payers").read_text() == "robot ada\n"
    with (tmp_path / "payers").open("a") as file:
        file.write("cut")
    assert Payers(tmp_path / "payers").items() == [("robot", "ada")]
    assert Payers(tmp_path / "missing").items() == []


def test_who_uses_no_more_than_a_share_loses_nothing_to_files_that_cannot_be_deleted_yet() -> None:
    large = [stored(f"large-{number}", 0, place="large", size=15) for number in range(5)]
    small = [stored(f"small-{number}", 200 - number, place="small", size=10) for number in range(3)]
    assert chosen(*small, *large, budget=60) == []
    assert chosen(*small, *large, budget=53) == ["small-0"]


def test_too_many_files_are_too_much() -> None:
    files = [stored(f"f{age}", 100 + age) for age in range(5)]
    assert chosen(*files, most=3) == ["f4", "f3"]


@given(
    st.lists(
        st.builds(
            StoredFile,
            st.sampled_from("abc"),
            st.sampled_from([(f"{KEY}.x",), (f"{KEY}.t",), ("o", "f")]),
            st.integers(0, 100),
            st.floats(NOW - 3 * DAY_S, NOW + 100),
        ),
        unique=True,
        max_size=30,
    ),
    st.integers(0, 1000),
)
def test_what_is_left_is_young_or_within_the_budget(files: list[StoredFile], budget: int) -> None:
    gone = choose(files, now=NOW, budget_bytes=budget, retention_s=DAY_S, max_age_s=2 * DAY_S)
    assert len(set(gone)) == len(gone)
    left = set(files) - set(gone)
    if sum(each.size_bytes for each in files) <= 2 * budget:
        assert not any(NOW - each.used_at < sweeper.YOUNG_S for each in gone)
    old = [each for each in left if NOW - each.used_at >= sweeper.YOUNG_S]
    sizes = collections.Counter[str]()
    for each in left:
        sizes[each.place] += each.size_bytes
    for each in old:  # each of those that are there has an equal share
        assert sum(sizes.values()) <= budget or not each.size_bytes or sizes[each.place] * len(sizes) <= budget


def write(path: Path, age_s: float, size: int = 10_000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_sweep_deletes_old_files_of_all_submitters(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    shared = [tmp_path / SHARED, tmp_path / "submitters" / ALICE / SHARED, memory / "x"]
    old = [write(each / "objects" / f"{KEY}.t", 2 * DAY_S) for each in shared]
    new = [write(each / "mine" / "file", 100) for each in shared]
    not_ours = write(tmp_path / "result.txt", 100 * DAY_S)
    made = Sweeper(tmp_path, memory, SweepSettings())
    made.sweep()
    assert not any(each.exists() for each in old)
    assert all(each.exists() for each in [*new, not_ours])
    assert (tmp_path / SHARED / "objects").is_dir(), "a store may have just looked for it"
    assert made.shared_bytes >= 20_000
    assert made.memory_bytes >= 10_000


def test_a_sweep_keeps_the_budget(tmp_path: Path) -> None:
    files = [write(tmp_path / SHARED / f"{number}", 1000 - number, size=2**20) for number in range(4)]
    Sweeper(tmp_path, None, SweepSettings(shared_bytes=5 * 2**19)).sweep()
    assert [each.exists() for each in files] == [False, False, True, True]


def test_a_time_that_a_task_has_set_ahead_keeps_no_file(tmp_path: Path) -> None:
    file = write(tmp_path / SHARED / "file", -10 * DAY_S)
    settings = SweepSettings(shared_bytes=10_000)
    Sweeper(tmp_path, None, settings).sweep()
    assert file.exists()  # it was written just now
    Sweeper(tmp_path, None, settings, clock=lambda: time.time() + 2 * sweeper.YOUNG_S).sweep()
    assert not file.exists()


@pytest.mark.parametrize("jump_s", [25 * 3600.0, -25 * 3600.0])
def test_a_clock_that_jumps_makes_no_file_old(tmp_path: Path, jump_s: float) -> None:
    now = time.time()
    before = write(tmp_path / SHARED / "before", 0)
    wall = [now]
    swept = Sweeper(tmp_path, None, SweepSettings(), clock=lambda: wall[0], steady=lambda: 100.0)
    wall[0] += jump_s
    swept.sweep()
    assert before.exists()


def test_a_sweep_follows_no_link(tmp_path: Path) -> None:
    kept = write(tmp_path / "kept" / "file", 100 * DAY_S)
    (tmp_path / SHARED).mkdir()
    (tmp_path / SHARED / "link").symlink_to(kept.parent)
    (tmp_path / "submitters" / ALICE).mkdir(parents=True)
    (tmp_path / "submitters" / ALICE / SHARED).symlink_to(kept.parent)
    (tmp_path / "submitters" / BOB).symlink_to(kept.parent)
    os.utime(tmp_path / SHARED / "link", (0, 0), follow_symlinks=False)
    Sweeper(tmp_path, None, SweepSettings()).sweep()
    assert kept.exists()
    assert not (tmp_path / SHARED / "link").is_symlink()


def test_empty_and_very_deep_directories_go(tmp_path: Path) -> None:
    empty = tmp_path / SHARED / "a" / "b"
    empty.mkdir(parents=True)
    os.utime(empty, (0, 0))
    deep = tmp_path / SHARED / Path(*["d"] * (sweeper.MOST_DEPTH + 2))
    deep.mkdir(parents=True)
    Sweeper(tmp_path, None, SweepSettings()).sweep()
    assert not empty.exists()
    assert not deep.exists()


def test_directories_count_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "MOST_FILES", 50)
    shared = tmp_path / SHARED
    for number in range(9):
        shared.joinpath(f"c{number}", *["d"] * 9).mkdir(parents=True)
    later = time.time() + 2 * sweeper.YOUNG_S
    Sweeper(tmp_path, None, SweepSettings(), clock=lambda: later, steady=lambda: later).sweep()
    assert len(list(shared.rglob("d"))) <= 50


def test_more_directories_than_a_sweep_reads_hide_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "MOST_FILES", 50)
    memory = tmp_path / "memory"
    for number in range(300):
        write(memory / "x" / f"c{number % 20}" / "d" / f"{number}", 100, size=100_000)
    other = write(memory / "y" / "file", 100)
    made = Sweeper(tmp_path, memory, SweepSettings(memory_bytes=2**20))
    made.sweep()
    left = [each for each in memory.joinpath("x").rglob("*") if each.is_file()]
    assert len(left) <= 10
    assert made.memory_bytes <= 2**20
    assert other.exists(), "each submitter has its own bound"


def test_each_directory_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    depth = sweeper.MOST_DEPTH
    write(tmp_path.joinpath(SHARED, *["d"] * depth, "file"), 100)
    opened: list[str] = []
    real = sweeper._open

    def noted(name: str, below: int | None) -> int | None:
        opened.append(name)
        return real(name, below)

    monkeypatch.setattr(sweeper, "_open", noted)
    Sweeper(tmp_path, None, SweepSettings()).sweep()
    assert opened.count("d") == depth


def test_the_pause_between_sweeps_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instants = iter([0.0, 1000.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(instants))
    assert Sweeper(tmp_path, None, SweepSettings(), steady=lambda: 0.0).sweep() == 60.0


def test_a_sweep_of_nothing_makes_nothing(tmp_path: Path) -> None:
    assert Sweeper(tmp_path / "missing", tmp_path / "too", SweepSettings()).sweep() == SweepSettings().period_s
    assert not list(tmp_path.iterdir())


# -- Valkey ------------------------------------------------------------------------------------------------------------

ADDRESS = ValkeyAddress(1234, "secret")


def test_one_server_for_a_submitter_and_one_for_each() -> None:
    table = ValkeyTable(ValkeySettings())
    assert table.requested("m1", ALICE, now=0.0) == (True, [])
    assert table.requested("m2", ALICE, now=0.0) == (False, [])
    assert table.requested("m1", ALICE, now=0.0) == (False, [])
    assert table.requested("m1", BOB, now=0.0) == (True, [])
    assert table.started(ALICE, ADDRESS) == [(each, ValkeyAnswered(ALICE, ADDRESS)) for each in ("m1", "m2")]
    assert table.requested("m1", ALICE, now=0.0) == (False, [("m1", ValkeyAnswered(ALICE, ADDRESS))])
    assert table.has_started(ALICE)
    assert not table.has_started(BOB)


def test_accounts_of_one_person_have_one_server_at_a_time() -> None:
    table = ValkeyTable(ValkeySettings())
    assert table.requested("m", "robot-1", now=0.0, payer=ALICE) == (True, [])
    is_new, [(_, answer)] = table.requested("m", "robot-2", now=0.0, payer=ALICE)
    assert not is_new
    assert answer.error is not None
    assert not table.requested("m", ALICE, now=0.0, payer=ALICE)[0]
    assert table.requested("m", BOB, now=0.0, payer=BOB) == (True, [])
    table.ended("robot-1")
    assert table.requested("m", "robot-2", now=0.0, payer=ALICE) == (True, [])


def test_the_next_request_starts_another_server() -> None:
    table = ValkeyTable(ValkeySettings())
    table.requested("m", ALICE, now=0.0)
    table.started(ALICE, ADDRESS)
    table.ended(ALICE)
    assert table.requested("m", ALICE, now=0.0) == (True, [])


def test_no_more_servers_than_the_endpoint_wants() -> None:
    table = ValkeyTable(ValkeySettings(most=1))
    assert table.requested("m", ALICE, now=0.0)[0]
    is_new, [(manager, answer)] = table.requested("m", BOB, now=0.0)
    assert (is_new, manager) == (False, "m")
    record = ErrorRecord.from_json(answer.error or {})
    assert record.code == Unavailable.code
    assert "1 submitters have a Valkey" in record.message
    table.ended(ALICE)
    assert table.requested("m", BOB, now=0.0)[0]


def test_an_endpoint_may_offer_none() -> None:
    is_new, [(_, answer)] = ValkeyTable(ValkeySettings(most=0)).requested("m", ALICE, now=0.0)
    assert not is_new
    assert (answer.error or {})["code"] == ConfigurationError.code


def test_all_who_wait_hear_why_a_server_cannot_be_started() -> None:
    table = ValkeyTable(ValkeySettings())
    for manager_id in ("m1", "m2"):
        table.requested(manager_id, ALICE, now=0.0)
    record = Unavailable("no").record
    answer = ValkeyAnswered(ALICE, error=record.to_json())
    assert table.failed(ALICE, record) == [("m1", answer), ("m2", answer)]
    assert not len(table)


def test_a_server_ends_a_while_after_the_last_task() -> None:
    table = ValkeyTable(ValkeySettings(idle_s=10.0))
    table.requested("m", ALICE, now=0.0)
    assert table.idle((), now=100.0) == [], "it starts"
    table.started(ALICE, ADDRESS)
    assert table.idle({ALICE}, now=200.0) == []
    assert table.idle({BOB}, now=209.0) == []
    assert table.idle({BOB}, now=210.0) == [ALICE]


def test_a_manager_asks_once_and_answers_all() -> None:
    rig = Rig(slots=2)
    rig.jobs("a", "b")
    rig.start_all()
    rig.read(0)
    rig.read(1)
    rig.handle(PacketsReceived(0, [(ValkeyRequest("a", 5), b""), (ValkeyRequest("a", 6), b"")]))
    rig.handle(PacketsReceived(1, [(ValkeyRequest("b", 5), b""), (ValkeyRequest("another's", 6), b"")]))
    assert [each.message for each in rig.passed] == [ValkeyRequested("")]

    actions = rig.handle(ValkeyAnswered("", ADDRESS))
    url = "redis://:secret@127.0.0.1:1234/0"
    wanted = [(0, ValkeyAnswer(5, url)), (0, ValkeyAnswer(6, url)), (1, ValkeyAnswer(5, url))]
    assert [(each.worker_id, each.packet) for each in actions if isinstance(each, Answer)] == wanted
    assert rig.handle(ValkeyAnswered("", ADDRESS)) == []
    assert rig.killed == []


def test_the_address_is_that_of_the_agent() -> None:
    for host, written in (("login1", "login1"), ("fe80::1", "[fe80::1]")):
        rig = Rig(agent_host=host)
        rig.jobs("a")
        rig.start_all()
        rig.read()
        rig.handle(PacketsReceived(0, [(ValkeyRequest("a", 5), b"")]))
        [answer] = rig.handle(ValkeyAnswered("", ADDRESS))
        assert isinstance(answer, Answer)
        assert answer.packet == ValkeyAnswer(5, f"redis://:secret@{written}:1234/0")


def test_a_task_that_asks_without_end_is_ended() -> None:
    rig = Rig()
    rig.jobs("a")
    rig.start_all()
    rig.read()
    requests = [(ValkeyRequest("a", number), b"") for number in range(10_001)]
    rig.handle(PacketsReceived(0, requests[:-1]))
    assert rig.killed == []
    rig.handle(PacketsReceived(0, requests[-1:]))
    assert rig.killed == [0]


# -- configuration and SDK ---------------------------------------------------------------------------------------------


def test_the_settings_of_an_endpoint(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("data: {shared: 2, memory: 0, retention: 60, valkey_memory: 0.5, valkey_servers: 0}\n")
    data = read_config(file).data
    assert data.sweep_settings == SweepSettings(shared_bytes=2 * 2**30, memory_bytes=0, retention_s=60.0)
    assert data.valkey_settings == ValkeySettings(most=0, memory_bytes=2**29)
    file.write_text("data: {retention: 3000, max_age: 200}\n")
    with pytest.raises(ConfigurationError, match="max_age"):
        read_config(file)


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud() as made:
        yield made


def use_directories(name: str) -> tuple[str, str, bool]:
    task = current()
    (task.scratch / "file").write_text(name)
    (task.shared_dir / name).write_text(name)
    assert task.scratch == task.scratch
    return str(task.scratch), str(task.shared_dir), task.memory_dir is None


def ask_for_valkey() -> str:
    return current().valkey_url()


def test_a_fake_cloud_has_directories(cloud: FakeCloud) -> None:
    with cloud.client() as client, Executor(cloud.endpoint_id, client=client) as executor:
        first, second = executor.map(use_directories, ("a", "b"))
    assert first[0] != second[0]
    assert first[1:] == second[1:] == (str(cloud.shared_dir), True)
    assert {each.name for each in cloud.shared_dir.iterdir()} == {"a", "b"}
    wait_until(lambda: not Path(first[0]).exists() and not Path(second[0]).exists())
    shared = cloud.shared_dir
    cloud.close()
    assert not shared.exists()


def test_a_fake_cloud_has_the_valkey_that_a_test_gives_it(cloud: FakeCloud) -> None:
    with cloud.client() as client, Executor(cloud.endpoint_id, client=client) as executor:
        with pytest.raises(TaskFailed, match="FakeCloud has no Valkey"):
            executor.submit(ask_for_valkey).result()
        cloud.valkey_url = "redis://here"
        assert executor.submit(ask_for_valkey).result() == "redis://here"
