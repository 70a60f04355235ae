"""Which files of tasks move when, as values: no process, no clock, no disk."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from farcall_common.errors import ErrorRecord
from farcall_common.file_arguments import place_of
from farcall_common.staged_files import FileUse, pack_files
from farcall_common.staging import MAX_FILES_SHOWN
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.files import orders
from farcall_endpoint.files.plan import MOST_ROWS, FileList, FilesMoved, Staging, read_files

IN, OUT = FileUse("s3://lab/raw/a"), FileUse("s3://lab/out/a", "w")
AWAY = outcomes.file_unreachable("s3://lab/raw/a", "it is away").to_json()
MISSING = outcomes.file_not_found("s3://lab/raw/a").to_json()
FULL = outcomes.files_no_room("the disk is full").to_json()


def files_of(*uses: FileUse) -> FileList:
    found = read_files(pack_files(uses, b"call"))
    assert not isinstance(found, ErrorRecord)
    return found[0]


class Driver:
    """A plan, and a transfer process that the test plays."""

    def __init__(self, **options: Any) -> None:
        self.plan = Staging(**options)
        self.now = 0.0

    def stage_in(
        self, task_id: str, *uses: FileUse, submitter: str = "", payer: str = "", is_sealed: bool = False
    ) -> None:
        self.plan.stage_in(task_id, submitter, files_of(*uses), is_sealed=is_sealed, now=self.now, payer=payer)

    def stage_out(self, task_id: str, *uses: FileUse) -> None:
        self.plan.stage_out(task_id, "", files_of(*uses), is_sealed=False, now=self.now)

    def given(self) -> list[orders.Order]:
        """The orders of one turn."""
        self.plan.tick(self.now)
        given, self.plan.orders = self.plan.orders, []
        return given

    def fetches(self) -> list[orders.Fetch]:
        """Let all directories be made; the transfers that are ordered then."""
        found: list[orders.Fetch] = []
        while given := self.given():
            for each in given:
                if isinstance(each, orders.Make):
                    self.hear(orders.Made(each.task_id))
                elif isinstance(each, orders.Fetch):
                    found.append(each)
        return found

    def hear(self, *reports: orders.Report) -> None:
        for report in reports:
            self.plan.handle(report, self.now)

    def fetched(self, fetch: orders.Fetch, size_bytes: int = 3) -> None:
        self.hear(orders.Fetched(fetch.number, size_bytes, "ab" * 32, cached=False))

    def outcomes(self) -> list[FilesMoved]:
        found, self.plan.outcomes = self.plan.outcomes, []
        return found

    def ready(self) -> list[str]:
        """Tasks whose files have moved; none has failed."""
        found = self.outcomes()
        assert [each.error for each in found] == [None] * len(found)
        return [each.task_id for each in found]

    def errors(self) -> dict[str, str]:
        return {each.task_id: each.error.code for each in self.outcomes() if each.error is not None}


# -- one task ----------------------------------------------------------------------------------------------------------


def test_a_task_gets_a_directory_then_its_files_and_is_ready_when_all_are_there() -> None:
    driver = Driver()
    driver.stage_in("t", IN, FileUse("s3://lab/raw/b"), OUT, submitter="alice")
    assert driver.given() == [orders.Make("t", "alice", (OUT.url,))]
    assert driver.given() == []
    driver.hear(orders.Made("t"))
    first, second = driver.fetches()
    assert (first.use, first.task_ids, first.submitter) == (IN, ("t",), "alice")
    driver.fetched(first)
    assert driver.outcomes() == []
    driver.fetched(second)
    assert driver.ready() == ["t"]
    assert len(driver.plan) == 0


def test_where_nodes_keep_copies_a_task_has_the_contents_of_all_that_it_reads() -> None:
    driver = Driver(for_nodes=True)
    uses = [FileUse(f"s3://lab/raw/{number}") for number in range(MAX_FILES_SHOWN + 50)]
    driver.stage_in("t", *uses, OUT)
    while fetches := driver.fetches():
        for each in fetches:
            driver.fetched(each)
    [moved] = driver.outcomes()
    assert [(each.sha256, each.size_bytes) for each in moved.contents] == [("ab" * 32, 3)] * len(uses)
    places = {f"files/r/{each.place}" for each in moved.contents}
    assert places == {place_of("files", each.url, "r") for each in uses}


def test_a_task_that_only_writes_is_ready_with_its_directory() -> None:
    driver = Driver()
    driver.stage_in("t", OUT)
    assert driver.fetches() == []
    assert driver.ready() == ["t"]


def test_what_a_task_has_written_is_stored_and_its_directory_removed() -> None:
    driver = Driver()
    driver.stage_in("t", OUT)
    driver.fetches()
    assert driver.ready() == ["t"]
    driver.stage_out("t", IN, OUT)
    [store] = driver.given()
    assert store == orders.Store(1, "", OUT, "t")
    driver.hear(orders.Stored(1, 7, "cd" * 32))
    [outcome] = driver.outcomes()
    assert outcome.rows == ({"url": OUT.url, "mode": "w", "size_bytes": 7, "sha256": "cd" * 32},)
    driver.plan.end("t")
    assert driver.given() == [orders.Remove("t", "")]


def test_two_tasks_that_write_one_url_both_store_it() -> None:
    driver = Driver()
    for task_id in ("t", "u"):
        driver.stage_out(task_id, OUT)
    assert [each.task_id for each in driver.given() if isinstance(each, orders.Store)] == ["t", "u"]


def test_a_directory_that_cannot_be_made_fails_its_task() -> None:
    driver = Driver()
    driver.stage_in("t", IN)
    driver.given()
    driver.hear(orders.Made("t", outcomes.files_no_room("the disk is full").to_json()))
    assert driver.errors() == {"t": "FILES_NO_ROOM"}


def test_a_task_that_may_not_write_its_file_fails_before_it_runs() -> None:
    driver = Driver()
    driver.stage_in("t", IN, OUT, submitter="alice")
    driver.given()
    driver.hear(orders.Made("t", outcomes.file_denied(OUT.url, "its storage is not open").to_json()))
    assert driver.errors() == {"t": "FILE_DENIED"}
    assert driver.fetches() == []


def test_ten_thousand_files_move_a_few_at_a_time_and_the_details_have_a_hundred() -> None:
    driver = Driver(max_transfers=8)
    driver.stage_in("t", *[FileUse(f"s3://lab/raw/{number}") for number in range(10_000)])
    waiting, seen = driver.fetches(), 0
    while waiting:
        assert len(waiting) <= 8
        for each in waiting:
            seen += 1
            driver.fetched(each)
        waiting = driver.fetches()
    [outcome] = driver.outcomes()
    assert (seen, outcome.task_id, outcome.error, len(outcome.rows)) == (10_000, "t", None, MAX_FILES_SHOWN)


def test_lists_of_many_tasks_stay_packed_until_their_turn() -> None:
    driver = Driver()
    many = [FileUse(f"s3://lab/raw/{number}") for number in range(9_000)]
    for task_id in ("a", "b", "c"):
        driver.stage_in(task_id, *many)
    made = [each.task_id for each in driver.given() if isinstance(each, orders.Make)]
    assert made == ["a", "b"]
    driver.plan.end("a")
    assert [each for each in driver.given() if isinstance(each, orders.Make)] == [orders.Make("c", "", ())]


# -- many tasks --------------------------------------------------------------------------------------------------------


def test_many_tasks_that_wait_for_one_file_share_one_transfer() -> None:
    driver = Driver()
    for number in range(100):
        driver.stage_in(f"t{number}", IN)
    [fetch] = driver.fetches()
    assert len(fetch.task_ids) == 100
    driver.fetched(fetch)
    assert len(driver.ready()) == 100


def test_a_task_that_comes_after_a_look_up_began_waits_for_the_next_one() -> None:
    driver = Driver()
    driver.stage_in("early", IN)
    [first] = driver.fetches()
    driver.stage_in("late", IN)
    assert driver.fetches() == []
    driver.fetched(first)
    assert driver.ready() == ["early"]
    [second] = driver.fetches()
    assert second.task_ids == ("late",)
    assert second.number != first.number
    driver.fetched(second)
    assert driver.ready() == ["late"]


def test_submitters_share_no_transfer_and_take_turns() -> None:
    driver = Driver(max_transfers=2)
    for number in range(5):
        driver.stage_in(f"a{number}", FileUse(f"s3://lab/raw/{number}"), submitter="alice")
    driver.stage_in("b0", FileUse("s3://lab/raw/0"), submitter="bob")
    assert [each.submitter for each in driver.fetches()] == ["alice", "bob"]


def test_slow_transfers_of_one_submitter_do_not_hold_up_another_one() -> None:
    driver = Driver(max_transfers=2)
    driver.stage_in("a", *[FileUse(f"s3://lab/raw/{number}") for number in range(5)], submitter="alice")
    assert len(driver.fetches()) == 2
    driver.stage_in("b", FileUse("s3://lab/raw/0"), FileUse("s3://lab/raw/1"), submitter="bob")
    [fetch] = driver.fetches()
    assert fetch.submitter == "bob"
    assert driver.fetches() == []
    driver.fetched(fetch)
    [fetch] = driver.fetches()
    assert fetch.submitter == "bob"
    driver.fetched(fetch)
    assert driver.ready() == ["b"]
    assert driver.fetches() == []


def test_service_accounts_of_one_payer_share_no_file_but_their_turns() -> None:
    driver = Driver(max_transfers=2)
    for number in range(5):
        driver.stage_in(f"a{number}", IN, submitter=f"robot-{number}", payer="alice")
    first, second = driver.fetches()
    assert (first.submitter, second.submitter) == ("robot-0", "robot-1"), "each has a copy of its own"
    assert first.share_of == second.share_of == "alice"
    driver.stage_in("b", IN, submitter="bob")
    [fetch] = driver.fetches()
    assert fetch.submitter == "bob", "the other accounts are no new submitters"
    driver.hear(orders.Failed(first.number, MISSING))
    driver.hear(orders.Failed(second.number, MISSING))
    assert [each.submitter for each in driver.fetches()] == ["robot-2"]


@pytest.mark.parametrize("payer", ["", "alice"])
def test_many_files_of_one_submitter_do_not_hold_up_another_one(payer: str) -> None:
    driver = Driver()
    for task_id in ("a1", "a2", "a3"):
        many = [FileUse(f"s3://lab/{task_id}/{number}") for number in range(9_000)]
        driver.stage_in(task_id, *many, submitter=f"robot-{task_id}" if payer else "alice", payer=payer)
    driver.stage_in("b", IN, submitter="bob")
    made = [each.task_id for each in driver.given() if isinstance(each, orders.Make)]
    assert made == ["a1", "a2", "b"]
    driver.plan.end("a1")
    assert [each.task_id for each in driver.given() if isinstance(each, orders.Make)] == ["a3"]


def test_a_service_that_takes_many_files_at_once_gets_all_of_them() -> None:
    driver = Driver(max_transfers=1, batch_schemes=frozenset({"globus"}))
    found = read_files(
        pack_files([FileUse(f"globus://c/{number}") for number in range(50)], b""), schemes=frozenset({"globus"})
    )
    assert not isinstance(found, ErrorRecord)
    driver.plan.stage_in("t", "", found[0], is_sealed=False, now=0.0)
    assert len(driver.fetches()) == 50
    driver.now = 1e6  # a file may be silent while others of its batch move
    assert driver.given() == []
    assert driver.plan.next_deadline() is None


def test_a_file_of_a_batch_has_a_limit_in_all() -> None:
    driver = Driver(limit_s=100.0, batch_schemes=frozenset({"globus"}))
    found = read_files(pack_files([FileUse("globus://c/a")], b""), schemes=frozenset({"globus"}))
    assert not isinstance(found, ErrorRecord)
    driver.plan.stage_in("t", "", found[0], is_sealed=False, now=0.0)
    [fetch] = driver.fetches()
    assert driver.plan.next_deadline() == 100.0
    driver.now = 100.0
    assert orders.Cancel(fetch.number) in driver.given()
    [outcome] = driver.plan.outcomes
    assert outcome.error is not None
    assert (outcome.error.code, "limit of 100 s" in outcome.error.message) == ("FILE_TIMEOUT", True)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_reached_is_tried_again_for_two_minutes() -> None:
    driver = Driver(jitter=lambda: 0.0)
    driver.stage_in("t", IN)
    waits = []
    while not (errors := driver.errors()):
        [fetch] = driver.fetches()
        driver.hear(orders.Failed(fetch.number, AWAY))
        if (at := driver.plan.next_deadline()) is not None:
            assert driver.fetches() == []
            waits.append(at - driver.now)
            driver.now = at
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert errors == {"t": "FILE_UNREACHABLE"}
    assert len(driver.plan.failures) == 10
    assert driver.plan.next_deadline() is None


def test_a_slow_failure_is_tried_again_five_times_in_all() -> None:
    driver = Driver(jitter=lambda: 0.0)
    driver.stage_in("t", IN)
    tries = 0
    while not (errors := driver.errors()):
        [fetch] = driver.fetches()
        driver.now += 300
        driver.hear(orders.Failed(fetch.number, AWAY))
        tries += 1
        driver.now = driver.plan.next_deadline() or driver.now
    assert (tries, errors) == (5, {"t": "FILE_UNREACHABLE"})


def test_a_file_that_came_after_failures_has_all_of_its_time_again() -> None:
    driver = Driver(jitter=lambda: 0.0)
    driver.stage_in("t", IN)
    [fetch] = driver.fetches()
    driver.hear(orders.Failed(fetch.number, AWAY))
    driver.now += 1
    [fetch] = driver.fetches()
    driver.stage_in("late", IN)
    assert driver.fetches() == []
    driver.now += 100
    driver.fetched(fetch)
    assert driver.ready() == ["t"]
    for _ in range(6):
        [fetch] = driver.fetches()
        driver.now += 10
        driver.hear(orders.Failed(fetch.number, AWAY))
        driver.now = driver.plan.next_deadline() or driver.now
    assert driver.errors() == {}


def test_what_a_task_has_written_is_tried_again_for_a_quarter_of_an_hour() -> None:
    driver = Driver(jitter=lambda: 0.0)
    driver.stage_out("t", OUT)
    tries = 0
    while not (errors := driver.errors()):
        [store] = [each for each in driver.given() if isinstance(each, orders.Store)]
        driver.hear(orders.Failed(store.number, AWAY))
        tries += 1
        driver.now = driver.plan.next_deadline() or driver.now
    assert errors == {"t": "FILE_UNREACHABLE"}
    assert 900 <= driver.now <= 930
    assert tries == 36
    driver.stage_out("u", OUT)
    [store] = [each for each in driver.given() if isinstance(each, orders.Store)]
    driver.hear(orders.Failed(store.number, MISSING))
    assert driver.errors() == {"u": "FILE_NOT_FOUND"}, "what stays is not tried again"


def test_a_failure_that_stays_fails_the_tasks_that_wait_and_not_those_that_came_later() -> None:
    driver = Driver()
    driver.stage_in("early", IN, FileUse("s3://lab/raw/b"))
    first, other = driver.fetches()
    driver.stage_in("late", IN)
    driver.fetches()
    driver.hear(orders.Failed(first.number, MISSING))
    assert driver.errors() == {"early": "FILE_NOT_FOUND"}
    given = driver.given()
    assert orders.Cancel(other.number) in given
    assert [each.task_ids for each in given if isinstance(each, orders.Fetch)] == [("late",)]


def test_a_transfer_without_progress_is_stopped_and_one_with_progress_is_not() -> None:
    driver = Driver(silence_s=10.0)
    driver.stage_in("t", IN)
    [fetch] = driver.fetches()
    driver.now = 9.0
    driver.hear(orders.Progress(((fetch.number, 100),)))
    driver.now = 18.0
    driver.hear(orders.Progress(((fetch.number, 100),)))  # nothing more has come
    assert driver.given() == []
    driver.now = 19.0
    assert driver.given() == [orders.Cancel(fetch.number)]
    assert driver.errors() == {"t": "FILE_TIMEOUT"}


def test_a_transfer_that_never_ends_is_stopped_at_the_limit_in_all() -> None:
    driver = Driver(silence_s=10.0, limit_s=25.0)
    driver.stage_in("t", IN)
    [fetch] = driver.fetches()
    for driver.now in (5.0, 10.0, 15.0, 20.0):
        driver.hear(orders.Progress(((fetch.number, int(driver.now)),)))
        assert driver.given() == []
    driver.now = 25.0
    assert driver.given() == [orders.Cancel(fetch.number)]
    [outcome] = driver.outcomes()
    assert outcome.error is not None
    assert "25 s" in outcome.error.message


def test_a_task_that_is_not_needed_stops_its_transfers_and_keeps_those_of_others() -> None:
    driver = Driver()
    driver.stage_in("t", IN, FileUse("s3://lab/raw/b"))
    driver.stage_in("u", IN)
    shared, own = driver.fetches()
    assert shared.task_ids == ("t", "u")
    driver.plan.end("t")
    assert driver.given() == [orders.Cancel(own.number), orders.Remove("t", "")]
    driver.fetched(shared)
    assert driver.ready() == ["u"]
    driver.fetched(own)  # it won the race
    assert driver.outcomes() == []


def test_a_lost_process_gets_its_orders_again() -> None:
    driver = Driver()
    driver.plan.restore(["old"])
    driver.stage_in("t", IN)
    [fetch] = driver.fetches()
    driver.plan.end("gone")  # it has no directory
    driver.stage_in("making", FileUse("s3://lab/raw/b"))
    driver.stage_in("removed", OUT)
    assert [type(each) for each in driver.given()] == [orders.Make, orders.Make]
    driver.hear(orders.Made("removed"))
    driver.plan.end("removed")
    driver.given()
    driver.plan.process_lost("it was killed", driver.now)
    again = driver.given()
    assert orders.Tidy(("old",)) in again
    assert orders.Make("making", "", ()) in again
    assert orders.Remove("removed", "") in again
    driver.now = 1.0
    [second] = [each for each in driver.given() if isinstance(each, orders.Fetch)]
    assert second.number > fetch.number
    driver.fetched(fetch)  # of the process that is gone
    driver.fetched(second)
    assert driver.ready() == ["removed", "t"]


def test_without_a_process_that_can_work_tasks_fail() -> None:
    driver = Driver()
    driver.stage_in("t", IN)
    driver.given()
    for _ in range(5):
        driver.hear(orders.Unusable("read only"))
        driver.plan.process_lost("read only", driver.now)
        driver.given()
    assert driver.errors() == {"t": "FILES_NO_ROOM"}


# -- room --------------------------------------------------------------------------------------------------------------


def test_while_others_have_files_the_youngest_gives_its_place_up_and_comes_back_when_one_has_ended() -> None:
    driver = Driver()
    driver.stage_in("runs", FileUse("s3://lab/raw/r"))
    [fetch] = driver.fetches()
    driver.fetched(fetch)
    assert driver.ready() == ["runs"]
    driver.stage_in("old", IN)
    driver.stage_in("young", FileUse("s3://lab/raw/y"))
    old, young = driver.fetches()
    driver.hear(orders.Failed(old.number, FULL, drafts=((young.number, 3),)))
    given = driver.given()
    assert orders.Cancel(young.number) in given
    assert orders.Remove("young", "") in given
    driver.hear(orders.Removed("young"))
    driver.now = 1.0
    [again] = driver.fetches()
    assert again.task_ids == ("old",)
    driver.fetched(again)
    assert driver.ready() == ["old"]
    [young] = driver.fetches()
    driver.hear(orders.Failed(young.number, FULL))
    driver.given()
    driver.hear(orders.Removed("young"))
    assert driver.fetches() == [], "there is no room until a task ends"
    driver.plan.end("runs")
    driver.given()
    driver.hear(orders.Removed("runs"))
    [last] = driver.fetches()
    assert last.task_ids == ("young",)
    assert driver.errors() == {}


def test_a_task_for_which_alone_there_is_no_room_fails() -> None:
    driver = Driver()
    driver.stage_in("t", IN)
    for _ in range(5):
        [fetch] = driver.fetches()
        driver.hear(orders.Failed(fetch.number, FULL))
        driver.now = driver.plan.next_deadline() or driver.now
    assert driver.errors() == {"t": "FILES_NO_ROOM"}


def test_without_room_for_what_is_stored_it_is_tried_again() -> None:
    driver = Driver()
    for task_id in ("a", "b"):
        driver.stage_out(task_id, FileUse(f"s3://lab/out/{task_id}", "w"))
    stores = [each for each in driver.given() if isinstance(each, orders.Store)]
    driver.hear(orders.Failed(stores[0].number, FULL))
    driver.now = driver.plan.next_deadline() or driver.now
    [again] = [each for each in driver.given() if isinstance(each, orders.Store)]
    assert again.task_id == "a"


def test_without_room_it_is_tried_again_after_a_while_although_nothing_has_ended() -> None:
    driver = Driver()
    driver.stage_in("runs", OUT)
    driver.fetches()
    driver.stage_in("t", IN)
    [fetch] = driver.fetches()
    driver.hear(orders.Failed(fetch.number, FULL))
    driver.given()
    driver.hear(orders.Removed("t"))
    assert driver.fetches() == []
    at = driver.plan.next_deadline()
    assert at is not None
    driver.now = at
    [again] = driver.fetches()
    driver.fetched(again)
    assert driver.ready() == ["runs", "t"]


# -- reports -----------------------------------------------------------------------------------------------------------


def test_the_report_says_how_far_each_task_is() -> None:
    driver = Driver(max_transfers=1)
    url = "https://me:secret@host/data.h5?X-Amz-Signature=secret"
    driver.stage_in("t", FileUse(url, size_bytes=100), FileUse("s3://lab/raw/b", size_bytes=50))
    first, _ = driver.fetches(), None
    driver.hear(orders.Progress(((first[0].number, 40),)))
    assert driver.plan.report() == [
        {
            "task_id": "t",
            "state": "staging-in",
            "bytes": 40,
            "total": 150,
            "files": 2,
            "files_done": 0,
            "since": 0.0,
            "url": "https://host/data.h5",
        }
    ]
    driver.hear(orders.Failed(first[0].number, AWAY))
    assert "it is away" in driver.plan.report()[0]["problem"]


def test_the_report_of_a_sealed_call_has_no_url() -> None:
    driver = Driver()
    driver.stage_in("t", IN, is_sealed=True)
    [fetch] = driver.fetches()
    driver.hear(orders.Failed(fetch.number, AWAY))
    [row] = driver.plan.report()
    assert not row.keys() & {"url", "problem"}


def test_the_report_has_a_hundred_tasks_at_most() -> None:
    driver = Driver()
    for number in range(MOST_ROWS + 1):
        driver.stage_in(f"t{number}", IN)
    driver.fetches()
    assert [row["task_id"] for row in driver.plan.report()] == [f"t{number}" for number in range(MOST_ROWS)]


# -- lists -------------------------------------------------------------------------------------------------------------


def test_files_of_the_endpoint_itself_are_not_staged() -> None:
    uses = [FileUse("file:///data/a"), IN, FileUse("file:///data/b", "w")]
    found = read_files(pack_files(uses, b"call"))
    assert not isinstance(found, ErrorRecord)
    files, rest = found
    assert bytes(rest) == b"call"
    assert (files.reads, files.writes, [use for _, use in files.uses()]) == (1, 0, [IN])


@pytest.mark.parametrize(
    ("uses", "options", "code"),
    [
        ([FileUse("ftp://host/a")], {}, "FILE_UNSUPPORTED"),
        ([FileUse("http://host/a")], {}, "FILE_UNSUPPORTED"),
        ([FileUse("https://host/a", "w")], {}, "FILE_UNSUPPORTED"),
        ([IN], {"refusal": "its owner has switched files off"}, "FILE_UNSUPPORTED"),
        ([FileUse("s3://lab/a", size_bytes=11)], {"most_bytes": 10}, "FILES_TOO_LARGE"),
    ],
)
def test_a_list_that_cannot_be_staged_is_refused(uses: Sequence[FileUse], options: dict[str, Any], code: str) -> None:
    found = read_files(pack_files(uses, b""), **options)
    assert isinstance(found, ErrorRecord)
    assert found.code == code


ENTRY = b"\x95\xa6s3://a\xa1r\xc0\xa0"  # the beginning of an array of five
DEEP = b"fl\n" + base64.b64encode(zlib.compress(b"\x91" + ENTRY + b"\x91" * 100_000 + b"\xc0")) + b"\n"
HUGE = pack_files([FileUse("s3://lab/a", size_bytes=2**64 - 1)], b"")
"""Of several such, a report could not have the sum."""


@pytest.mark.parametrize("payload", [b"fl\nx\n", b"fl\n", b"fl\n!!!\n", pack_files([IN], b"")[:-9], HUGE, DEEP])
def test_a_list_that_is_none_is_refused(payload: bytes) -> None:
    found = read_files(payload)
    assert isinstance(found, ErrorRecord)
    assert found.code == "FILES_INVALID"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("globus://a/b", "it has no Globus collection (files.globus)"),
        ("endpoint://a/b", "an Engine has no deployment; files of other endpoints need one"),
        ("ftp://a/b", "it does not know the scheme"),
    ],
)
def test_a_refusal_says_what_the_endpoint_lacks(url: str, reason: str) -> None:
    found = read_files(pack_files([FileUse(url)], b""))
    assert isinstance(found, ErrorRecord)
    assert found.message == f"This endpoint cannot copy the file {url}: {reason}."


def test_http_is_staged_with_a_checksum() -> None:
    use = FileUse("http://host/a", sha256=hashlib.sha256(b"").hexdigest())
    assert not isinstance(read_files(pack_files([use], b"")), ErrorRecord)


# -- files of other endpoints ------------------------------------------------------------------------------------------

ELSEWHERE = FileUse("endpoint://00000000-0000-4000-8000-00000000000f/data/a")
OFFLINE = outcomes.file_endpoint_offline(ELSEWHERE.url).to_json()


def test_files_of_other_endpoints_are_staged_where_they_can_be_requested() -> None:
    payload = pack_files([ELSEWHERE], b"call")
    assert not isinstance(Staging(reads_endpoints=True).read(payload), ErrorRecord)
    refused = Staging().read(payload)
    assert isinstance(refused, ErrorRecord)
    assert refused.code == "FILE_UNSUPPORTED"
    written = Staging(reads_endpoints=True).read(pack_files([FileUse(ELSEWHERE.url, "w")], b"call"))
    assert isinstance(written, ErrorRecord)
    assert "cannot be written" in written.message


def test_an_endpoint_that_is_off_is_waited_for_as_long_as_transfers_may_be_silent() -> None:
    driver = Driver(reads_endpoints=True, silence_s=300.0)
    found = read_files(pack_files([ELSEWHERE], b"call"), schemes=frozenset({"endpoint"}))
    assert not isinstance(found, ErrorRecord)
    driver.plan.stage_in("t1", "", found[0], is_sealed=False, now=0.0)
    tries = 0
    while not (ended := driver.outcomes()):
        for fetch in driver.fetches():
            tries += 1
            driver.hear(orders.Failed(fetch.number, OFFLINE))
            if driver.plan.report():
                assert "not connected" in driver.plan.report()[0]["problem"]
        driver.now += 5.0
    assert 300.0 <= driver.now < 360.0
    assert tries > 5
    [failed] = ended
    assert failed.error is not None
    assert failed.error.code == "FILE_ENDPOINT_OFFLINE"
