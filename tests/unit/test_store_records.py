"""What every Records must do. Here on the fake; test_store_records_postgres runs the same suite on PostgreSQL."""

from __future__ import annotations

import dataclasses
import datetime as dt
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from farcall_common.environments import Environment
from farcall_common.errors import (
    Conflict,
    EndpointUnknown,
    ErrorRecord,
    Fault,
    FunctionUnknown,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    Unavailable,
)
from farcall_common.graphs import StageState
from farcall_common.limits import MAX_TRANSITIONS
from farcall_common.progress import Progress
from farcall_common.qos_report import FunctionQos, Infeasible, InfeasibleTarget, QosReport, WindowNumbers
from farcall_common.store import (
    AuditEntry,
    BlobRef,
    Container,
    Endpoint,
    EndpointStatus,
    Function,
    FunctionAlias,
    Records,
    Task,
    TaskEvent,
    TaskGroup,
    TaskResult,
)
from farcall_common.store.codec import pack
from farcall_common.store.model import (
    FORBIDDEN,
    SIGNATURE,
    Action,
    ApiToken,
    EndpointKey,
    EnvironmentState,
    FunctionBody,
    GraphState,
    ObjectKind,
    Presence,
    QueuedTask,
    Quota,
    Quotable,
    Right,
    RunningLimit,
    RunningProgress,
    ServiceAccount,
    Share,
    SpoolMark,
    Team,
    TeamMember,
    Withdrawal,
)
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire.ids import is_uuid, new_task_id
from farcall_common.wire.states import Reporter, TaskState
from tests.support.stores import FakeDatabase
from tests.task_fields import with_options

T0 = dt.datetime(2026, 11, 20, 12, 0, tzinfo=dt.UTC)


def at(seconds: float) -> dt.datetime:
    return T0 + dt.timedelta(seconds=seconds)


def make_task(task_id: str = "t1", **changes: Any) -> Task:
    plain = Task(
        task_id=task_id,
        task_group_id="g1",
        owner_id="alice",
        endpoint_id="e1",
        function_id="f1",
        function_hash="hash",
        payload=b"\x00payload\xff",
        submitted_at=T0,
    )
    return msgspec.structs.replace(plain, **with_options(changes))


def make_function(function_id: str = "f1", **changes: Any) -> Function:
    plain = Function(
        function_id, "alice", "square", b"\x00body\xff", "hash", created_at=T0, metadata={"python": "3.11"}
    )
    return dataclasses.replace(plain, **changes)


def make_task_result(task_id: str = "t1", **changes: Any) -> TaskResult:
    plain = TaskResult(task_id, "e1", 1, TaskState.SUCCESS, Reporter.AGENT, result=b"\x00result\xff")
    return msgspec.structs.replace(plain, **changes)


def make_dead(task_id: str = "t1", *, reasons: tuple[str, ...] | None = None, **changes: Any) -> TaskResult:
    error = ErrorRecord("DEAD", "each attempt took its worker down", reasons=reasons)
    end = TaskResult(task_id, "e1", 1, TaskState.DEAD_LETTERED, Reporter.FORWARDER, error=error)
    return msgspec.structs.replace(end, **changes)


def make_entry(action: str, object_id: str, *, seconds: float = 0, **changes: Any) -> AuditEntry:
    entry = AuditEntry(at(seconds), "alice", action, object_id, "alice", {"note": "nul \x00 and ü"})
    return dataclasses.replace(entry, **changes)


def make_token(token_id: str = "tok1", **changes: Any) -> ApiToken:
    return dataclasses.replace(
        ApiToken(token_id, "alice", "alice", "ci", ["tasks:read"], created_at=T0, expires_at=at(1e9)), **changes
    )


def make_action(action_id: str, **changes: Any) -> Action:
    return dataclasses.replace(
        Action(action_id, "alice", "r1", "0" * 64, 1, T0, release_after_s=60.0, monitor_by=[], manage_by=[]), **changes
    )


def transition(task_id: str, state: TaskState, attempt: int = 0, **changes: Any) -> TaskEvent:
    reporter = Reporter.FORWARDER if state is TaskState.WAITING_FOR_NODES else Reporter.AGENT
    return msgspec.structs.replace(TaskEvent(task_id, state, reporter, at(1), attempt=attempt), **changes)


LONG_AGO = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
UV = Environment(type="uv", requirements=("polars",))


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def share_of(object_id: str, grantee: str, right: Right, **fields: Any) -> Share:
    """A share by Alice at T0, of an endpoint unless ``fields`` says otherwise."""
    values = {"share_id": str(uuid.uuid4()), "kind": ObjectKind.ENDPOINT, "granted_by": "alice", "granted_at": T0}
    return Share(object_id=object_id, grantee=grantee, right=right, **{**values, **fields})


class RecordsSuite:
    # functions

    def test_registered_function_round_trips(self, records: Records) -> None:
        function = make_function(description="of a number", public=True)
        records.functions.add_function(function)
        assert records.functions.get_functions(["f1"]).get("f1") == function
        assert records.functions.get_functions(["f1", "f2"]) == {"f1": function}
        bare = dataclasses.replace(function, body=b"")
        assert records.functions.get_functions(["f1", "f2"], with_bodies=False) == {"f1": bare}
        assert records.functions.get_functions(["f2"]).get("f2") is None

    def test_the_newest_version_of_a_function_is_the_function(self, records: Records) -> None:
        records.functions.add_function(make_function())
        newer = make_function(version=2, body=b"better", name="quare", created_at=at(5))
        records.functions.add_function(newer)
        assert records.functions.get_functions(["f1"]).get("f1") == dataclasses.replace(newer, created_at=T0)

    def test_a_version_of_a_function_does_not_change(self, records: Records) -> None:
        records.functions.add_function(make_function())
        with pytest.raises(Conflict):
            records.functions.add_function(make_function(body=b"other"))
        found = records.functions.get_functions(["f1"]).get("f1")
        assert found is not None
        assert found.body == b"\x00body\xff"

    def test_only_the_owner_adds_a_version(self, records: Records) -> None:
        records.functions.add_function(make_function())
        with pytest.raises(Conflict):
            records.functions.add_function(make_function(owner_id="mallory", version=2))
        assert records.functions.list_functions("mallory") == []

    def test_functions_are_listed_newest_first_and_searched_in_name_and_description(self, records: Records) -> None:
        records.functions.add_function(make_function("f1", name="Fit a model"))
        records.functions.add_function(make_function("f2", name="100%_sure", created_at=at(1)))
        records.functions.add_function(make_function("f3", name="train", description="fit again", created_at=at(2)))
        records.functions.add_function(make_function("f4", owner_id="bob", name="fit"))
        assert [f.function_id for f in records.functions.list_functions("alice")] == ["f3", "f2", "f1"]
        assert [f.function_id for f in records.functions.list_functions("alice", search="FIT")] == ["f3", "f1"]
        assert [f.function_id for f in records.functions.list_functions("alice", search="%_")] == ["f2"]
        assert [f.function_id for f in records.functions.list_functions("alice", limit=1)] == ["f3"]

    def test_objects_of_an_owner_are_counted_up_to_a_limit(self, records: Records) -> None:
        for number in range(3):
            records.functions.add_function(make_function(f"f{number}"))
            records.endpoints.put_endpoint(Endpoint(f"e{number}", "alice", "laptop"))
        records.functions.add_function(make_function("f9", owner_id="bob"))
        records.endpoints.put_endpoint(Endpoint("e9", "bob", "laptop", public=True))
        assert (
            records.functions.count_functions("alice", limit=10),
            records.functions.count_functions("alice", limit=2),
        ) == (3, 2)
        assert (
            records.endpoints.count_endpoints("alice", limit=10),
            records.endpoints.count_endpoints("alice", limit=2),
        ) == (3, 2)
        assert records.functions.count_functions("unknown", limit=10) == 0
        records.functions.add_function(make_function("f0", version=2, body=b"12345", body_hash="h2"))
        assert (
            records.functions.count_functions("alice", limit=10),
            records.functions.count_functions("alice", limit=4),
        ) == (4, 4)
        for name in ("a", "b"):
            records.functions.put_alias(FunctionAlias("alice", name, "f0"))
        assert [alias.name for alias in records.functions.list_aliases("alice")] == ["a", "b"]
        assert [function.body for function in records.functions.list_functions("alice")] == [b""] * 3

    def test_deleted_function_is_not_found(self, records: Records) -> None:
        records.functions.add_function(make_function())
        assert records.functions.delete_function("f1")
        assert not records.functions.delete_function("f1")
        assert records.functions.get_functions(["f1"]).get("f1") is None

    def test_each_version_has_its_body_and_time(self, records: Records) -> None:
        records.functions.add_function(make_function())
        records.functions.add_function(
            make_function(version=2, body=b"better", body_hash="h2", name="quare", created_at=at(5))
        )
        assert records.functions.get_version("f1", 1) == make_function(name="quare")
        assert records.functions.get_version("f1", 3) is records.functions.get_version("f2", 1) is None
        versions = records.functions.list_versions("f1")
        assert [(each.version, each.body, each.created_at) for each in versions] == [(2, b"", at(5)), (1, b"", T0)]
        assert [each.version for each in records.functions.list_versions("f1", limit=1)] == [2]

    def test_bodies_are_found_by_function_and_hash(self, records: Records) -> None:
        records.functions.add_function(make_function())
        records.functions.add_function(make_function(version=2, body=b"better", body_hash="h2"))
        records.functions.add_function(make_function("f2", owner_id="bob", body=b"other", body_hash="h3"))
        records.functions.add_function(make_function("f3", owner_id="bob", name="copy"))
        wanted = [("f1", "hash"), ("f1", "h2"), ("f1", "h3"), ("f9", "hash"), ("f3", "hash")]
        body = b"\x00body\xff"
        assert records.functions.get_bodies(wanted) == {
            "f1": {"hash": FunctionBody("square", body), "h2": FunctionBody("square", b"better")},
            "f3": {"hash": FunctionBody("copy", body)},
        }

    def test_the_newest_version_with_a_body_has_its_signature(self, records: Records) -> None:
        for version, metadata in ((1, {}), (2, {SIGNATURE: "first"}), (3, {SIGNATURE: "second"})):
            records.functions.add_function(make_function(version=version, metadata=metadata))
        records.functions.add_function(make_function(version=4, body=b"better", body_hash="h2"))
        found = records.functions.get_bodies([("f1", "hash"), ("f1", "h2")])["f1"]
        assert (found["hash"].signature, found["h2"].signature) == ("second", "")

    def test_an_alias_names_a_function_until_it_names_another(self, records: Records) -> None:
        records.functions.add_function(make_function())
        records.functions.add_function(make_function("f2"))
        records.functions.put_alias(FunctionAlias("alice", "stable", "f1", 1))
        records.functions.put_alias(FunctionAlias("alice", "daily", "f1"))
        records.functions.put_alias(FunctionAlias("bob", "stable", "f2"))
        records.functions.put_alias(FunctionAlias("alice", "stable", "f2", 3))
        assert records.functions.get_alias("alice", "stable") == FunctionAlias("alice", "stable", "f2", 3)
        assert [each.name for each in records.functions.list_aliases("alice")] == ["daily", "stable"]
        assert records.functions.delete_alias("alice", "daily")
        assert not records.functions.delete_alias("alice", "daily")
        assert records.functions.get_alias("alice", "daily") is None
        with pytest.raises(FunctionUnknown):
            records.functions.put_alias(FunctionAlias("alice", "lost", "f9"))
        records.functions.delete_function("f2")
        assert records.functions.list_aliases("alice") == records.functions.list_aliases("bob") == []

    # containers

    def test_a_container_is_its_owners_by_id_and_by_name(self, records: Records) -> None:
        first = Container("c1", "alice", "xtal", "singularity", "/images/xtal.sif", "diffraction", T0)
        second = Container("c2", "alice", "plain", "uv", "", None, at(1), ("polars==1.*", 'quo"ted, {}'), ("polars",))
        for each in (first, second, dataclasses.replace(first, container_id="c3", owner_id="bob")):
            records.functions.add_container(each)
        with pytest.raises(Conflict):
            records.functions.add_container(dataclasses.replace(second, container_id="c4"))
        assert records.functions.get_container("c1") == records.functions.find_container("alice", "xtal") == first
        assert records.functions.get_container("c4") is records.functions.find_container("bob", "plain") is None
        assert records.functions.list_containers("alice") == [second, first]
        assert records.functions.list_containers("alice", limit=1) == [second]
        assert (
            records.functions.count_containers("alice", limit=5),
            records.functions.count_containers("alice", limit=1),
        ) == (2, 1)
        assert records.functions.delete_container("c1")
        assert not records.functions.delete_container("c1")
        assert records.functions.list_containers("alice") == [second]
        empty = dataclasses.replace(first, preload=())  # not the same as None
        records.functions.add_container(empty)
        assert records.functions.get_container("c1") == empty

    # lookups of a submit

    def test_submit_lookup_equals_the_single_lookups(self, records: Records) -> None:
        odd = {"runtime": {"python_version": "3.11"}, "note": "nul \x00 and \u00fc", "n": [1, 2.5, None, 2**60]}
        records.endpoints.put_endpoint(
            Endpoint("e1", "alice", "lab", allowed_functions=("f1",), metadata=odd, created_at=T0)
        )
        status = EndpointStatus(managers=2, problem="none \x00")
        records.endpoints.set_presence([Presence("e1", True, status)])
        for function in (make_function("f1", metadata=odd), make_function("f1", version=2), make_function("f2")):
            records.functions.add_function(function)
        records.tasks.add_tasks([make_task("t1"), make_task("t2", owner_id="bob")])

        endpoint, functions, tasks = records.tasks.read_for_submit("e1", ["f2", "f1", "f9"], ["t2", "t9", "t1"])

        assert endpoint == records.endpoints.get_endpoint("e1")
        assert functions == records.functions.get_functions(["f1", "f2"], with_bodies=False)
        assert tasks == records.tasks.get_tasks(["t1", "t2"])
        assert (functions["f1"].version, len(tasks)) == (2, 2)
        _, versions, _ = records.tasks.read_for_submit("e1", ["f1", "f1@1", "f1@9", "f2@1", "f9@1"], [])
        assert {name: each.version for name, each in versions.items()} == {"f1": 2, "f1@1": 1, "f2@1": 1}
        assert versions["f1@1"] == records.functions.get_version("f1", 1, with_body=False)
        assert (
            records.tasks.read_for_submit("e9", [], [])
            == records.tasks.read_for_submit("e9", ["f9"], ["t9"])
            == (None, {}, {})
        )

    def test_numbers_of_options_keep_their_types(self, records: Records) -> None:
        given = {"x": 1e20, "y": 2.0, "z": 2**53, "text": "\x00"}
        records.tasks.add_tasks([make_task(resource_specification=given)])
        task = records.tasks.get_tasks(["t1"])["t1"]
        assert task.options.resource_specification == given
        assert [type(value) for value in given.values()] == [
            type(value) for value in (task.options.resource_specification or {}).values()
        ]
        assert pack(QueuedTask.of(task))

    # groups

    def test_a_group_is_read_for_its_owners_and_up_to_a_limit(self, records: Records) -> None:
        records.tasks.add_tasks(
            [make_task("a", task_group_id="g1"), make_task("b", task_group_id="g1", submitted_at=at(1))]
        )
        records.tasks.add_tasks([make_task("c", owner_id="bob", task_group_id="g1", submitted_at=at(2))])
        assert [task.task_id for task in records.tasks.get_group("g1", owner_ids=["alice"])] == ["a", "b"]
        assert [task.task_id for task in records.tasks.get_group("g1", owner_ids=["alice", "bob"], limit=2)] == [
            "a",
            "b",
        ]
        assert records.tasks.get_group("g1", owner_ids=[]) == []

    def test_tasks_that_are_added_together_may_differ_in_anything(self, records: Records) -> None:
        alike = [make_task("a"), make_task("b", submitted_at=T0)]
        other = make_task("c", owner_id="bob", submitted_at=at(1), walltime_s=2.0, idempotent=False, max_attempts=1)
        odd = [make_task(id_, resource_specification={"n": value}) for id_, value in (("d", 1), ("e", True))]
        for tasks in ([alike[0]], [alike[1], other], odd):
            records.tasks.add_tasks(tasks)
        found = records.tasks.get_tasks(["a", "b", "c", "d", "e"])
        assert found == {task.task_id: task for task in (*alike, other, *odd)}
        assert [(found[id_].options.resource_specification or {})["n"] is True for id_ in "de"] == [False, True]

    def test_groups_are_paged_newest_first_with_counts_of_their_tasks(self, records: Records) -> None:
        for number, (group_id, task_id) in enumerate([("g1", "a"), ("g1", "b"), ("g2", "c"), ("g3", "d")]):
            records.tasks.add_tasks([make_task(task_id, task_group_id=group_id, submitted_at=at(number))])
        records.tasks.add_tasks([make_task("e", owner_id="bob", submitted_at=at(4))])
        records.tasks.record_results([make_task_result("a")], at=at(9))
        newest = [TaskGroup("g3", at(3), {TaskState.RECEIVED: 1}), TaskGroup("g2", at(2), {TaskState.RECEIVED: 1})]
        assert records.tasks.list_groups("alice", limit=2) == newest
        last = TaskGroup("g1", T0, {TaskState.RECEIVED: 1, TaskState.SUCCESS: 1})
        assert records.tasks.list_groups("alice", before="g2") == [last]
        assert records.tasks.list_groups("alice", before="g1") == records.tasks.list_groups("alice", before="g9") == []

    # retention

    def test_old_results_are_purged_with_their_rows(self, records: Records) -> None:
        records.tasks.add_tasks(
            [make_task("t1"), make_task("t2"), make_task("t3", task_group_id="g2"), make_task("open")]
        )
        for second, task_id in enumerate(["t2", "t3", "t1"]):
            records.tasks.record_results([make_task_result(task_id)], at=at(second))

        assert records.tasks.purge_tasks(ended_before=at(0), limit=10) == 0
        assert records.tasks.purge_tasks(ended_before=at(2), limit=1) == 1
        assert records.tasks.get_tasks(["t1", "t2", "t3", "open"]).keys() == {"t1", "t3", "open"}
        assert records.tasks.purge_tasks(ended_before=at(2), limit=10) == 1
        assert records.tasks.get_tasks(["t1", "t2", "t3", "open"]).keys() == {"t1", "open"}
        assert (records.tasks.list_events("t2"), records.tasks.list_events("t3"), records.tasks.get_group("g2")) == (
            [],
            [],
            [],
        )
        assert len(records.tasks.list_events("t1")) == 2
        assert {task.task_id for task in records.tasks.get_group("g1")} == {"t1", "open"}
        assert records.tasks.purge_tasks(ended_before=at(1000), limit=10) == 1
        assert records.tasks.get_tasks(["open"]).keys() == {"open"}

    def test_purged_group_can_be_used_again(self, records: Records) -> None:
        records.tasks.add_tasks([make_task("t1")])
        records.tasks.record_results([make_task_result("t1")], at=at(0))
        assert records.tasks.purge_tasks(ended_before=at(1), limit=10) == 1

        records.tasks.add_tasks([make_task("t2")])

        assert [task.task_id for task in records.tasks.get_group("g1")] == ["t2"]

    # dead letters

    def test_dead_letters_are_listed_until_they_are_discarded(self, records: Records) -> None:
        records.tasks.add_tasks([make_task(f"t{n}", submitted_at=at(n)) for n in range(4)])
        records.tasks.add_tasks([make_task("t9", owner_id="bob", endpoint_id="e2")])
        records.tasks.record_results([make_dead("t1"), make_dead("t2"), make_task_result("t3")], at=at(9))
        records.tasks.record_results([make_dead("t9", endpoint_id="e2")], at=at(9))

        letters = records.tasks.list_tasks("alice", state=TaskState.DEAD_LETTERED)
        assert [(task.task_id, task.error and task.error.code) for task in letters] == [("t2", "DEAD"), ("t1", "DEAD")]
        of_endpoint = records.tasks.list_tasks(endpoint_id="e2", state=TaskState.DEAD_LETTERED)
        assert [task.task_id for task in of_endpoint] == ["t9"]
        assert records.tasks.list_tasks("alice", endpoint_id="e2", state=TaskState.DEAD_LETTERED) == []

        assert records.tasks.discard_tasks(["t1", "t3", "unknown"]) == ["t1"]
        assert records.tasks.discard_tasks(["t1"]) == []
        assert [t.task_id for t in records.tasks.list_tasks("alice", state=TaskState.DEAD_LETTERED)] == ["t2"]
        found = records.tasks.get_tasks(["t1", "t2", "t3"])
        assert {id_: (task.state, task.payload) for id_, task in found.items()} == {
            "t1": (TaskState.DEAD_LETTERED, None),
            "t2": (TaskState.DEAD_LETTERED, b"\x00payload\xff"),
            "t3": (TaskState.SUCCESS, b"\x00payload\xff"),
        }

    def test_a_dead_letter_says_how_each_attempt_ended(self, records: Records) -> None:
        records.tasks.add_tasks([make_task()])
        records.tasks.record_results([make_dead("t1", reasons=("signal 9", "signal 11"))], at=at(1))
        error = records.tasks.get_tasks(["t1"])["t1"].error
        assert error is not None
        assert error.reasons == ("signal 9", "signal 11")
        assert records.tasks.list_events("t1")[-1].detail == {"code": "DEAD", "reasons": ["signal 9", "signal 11"]}

    def test_purged_dead_letter_is_not_listed(self, records: Records) -> None:
        records.tasks.add_tasks([make_task()])
        records.tasks.record_results([make_dead("t1")], at=at(0))
        assert records.tasks.purge_tasks(ended_before=at(1), limit=10) == 1
        assert records.tasks.list_tasks("alice", state=TaskState.DEAD_LETTERED) == []
        records.tasks.add_tasks([make_task()])
        records.tasks.record_results([make_dead("t1")], at=at(2))
        assert len(records.tasks.list_tasks("alice", state=TaskState.DEAD_LETTERED)) == 1

    def test_tasks_are_listed_page_by_page(self, records: Records) -> None:
        records.tasks.add_tasks([make_task(f"t{n}", submitted_at=at(n // 2)) for n in range(7)])
        found: list[str] = []
        before = None
        for _ in range(9):
            page = records.tasks.list_tasks("alice", before=before, limit=2)
            if not page:
                break
            found += [task.task_id for task in page]
            last = page[-1]
            assert last.submitted_at is not None
            before = (last.submitted_at, last.task_id)
        assert found == ["t6", "t5", "t4", "t3", "t2", "t1", "t0"]
        within = records.tasks.list_tasks("alice", since=at(1), until=at(2))
        assert [task.task_id for task in within] == ["t3", "t2"]

    def test_ids_are_found_by_their_beginning(self, records: Records) -> None:
        tasks = [make_task(task_id, task_group_id=f"g{task_id}") for task_id in ("0a1", "0a2", "0b1")]
        records.tasks.add_tasks([*tasks, make_task("0a3", owner_id="bob")])
        assert records.tasks.find_ids("task", "0a", owner_ids=["alice"]) == (["0a2", "0a1"], True)
        assert records.tasks.find_ids("task", "0a2", owner_ids=["alice", "bob"]) == (["0a2"], True)
        assert records.tasks.find_ids("task", "0a", owner_ids=["alice", "bob"], limit=1) == (["0a3"], True)
        assert records.tasks.find_ids("task", "0c", owner_ids=["alice"]) == ([], True)
        assert records.tasks.find_ids("group", "g0b", owner_ids=["alice"]) == (["g0b1"], True)

    def test_names_of_functions_and_endpoints(self, records: Records) -> None:
        records.functions.add_function(make_function("f1"))
        records.endpoints.put_endpoint(Endpoint("e1", "alice", "laptop"))
        names = records.tasks.names_of(["f1", "e1", "unknown"])
        assert names == {"f1": make_function("f1").name, "e1": "laptop"}

    # audit

    def test_change_and_audit_entry_are_atomic(self, records: Records) -> None:
        records.functions.audited(make_entry("function.register", "f1")).add_function(make_function())
        with pytest.raises(Conflict):
            records.functions.audited(make_entry("function.register", "f1", seconds=1)).add_function(make_function())
        [entry] = records.audit.list_entries(["alice"])
        assert dataclasses.replace(entry, audit_id=0) == make_entry("function.register", "f1")
        records.functions.add_function(make_function(version=2))
        assert len(records.audit.list_entries(["alice"])) == 1

    # quotas

    @pytest.mark.parametrize("kind", Quotable)
    def test_concurrent_requests_stay_within_the_quota(self, records: Records, kind: Quotable) -> None:
        records.functions.add_function(make_function("f0", owner_id="bob"))
        records.endpoints.put_endpoint(Endpoint("e-bob", "bob", "laptop"))
        records.shares.add_team(Team("alice", "bob", "a team with the id of an owner", T0))
        start = threading.Barrier(8)

        def add(number: int) -> bool:
            quota = Quota(kind, "alice", 3, but=f"a{number}")
            entry = make_entry("add", f"x{number}")
            functions = records.functions.audited(entry, quota=quota)
            endpoints = records.endpoints.audited(entry, quota=quota)
            shares = records.shares.audited(entry, quota=quota)
            tokens = records.tokens.audited(entry, quota=quota)
            start.wait()
            try:
                match kind:
                    case Quotable.ACCOUNT:
                        tokens.add_account(ServiceAccount(f"a{number}", "alice", f"a{number}", T0))
                    case Quotable.TOKEN:
                        tokens.add_token(make_token(f"t{number}"))
                    case Quotable.ALIAS:
                        functions.put_alias(FunctionAlias("alice", f"a{number}", "f0"))
                    case Quotable.CONTAINER:
                        functions.add_container(Container(f"c{number}", "alice", f"c{number}", "docker", "python"))
                    case Quotable.ENDPOINT:
                        endpoints.put_endpoint(Endpoint(f"e{number}", "alice", "laptop"))
                    case Quotable.FUNCTION:
                        functions.add_function(make_function(f"f{number + 1}"))
                    case Quotable.MEMBER:
                        shares.put_member(TeamMember("alice", f"name {number}", T0))
                    case Quotable.SHARE:
                        shares.put_share(share_of("alice", f"name {number}", Right.USE))
                    case Quotable.TEAM:
                        shares.add_team(Team(f"t{number}", "alice", "optics", T0))
            except QuotaExceeded:
                return False
            return True

        with ThreadPoolExecutor(8) as requests:
            assert sum(requests.map(add, range(8))) == 3
        assert len(records.audit.list_entries(["alice"])) == 3

    def test_objects_of_service_accounts_count_for_the_creator(self, records: Records) -> None:
        for number in range(2):
            records.tokens.add_account(ServiceAccount(f"robot-{number}", "alice", f"ci-{number}", T0))
        records.functions.add_function(make_function("f0", owner_id="robot-0"))
        records.endpoints.put_endpoint(Endpoint("e0", "robot-0", "laptop"))
        for owner_id in ("alice", "robot-0", "robot-1"):
            with pytest.raises(QuotaExceeded):
                records.functions.audited(quota=Quota(Quotable.FUNCTION, owner_id, 1)).delete_alias("x", "y")
            with pytest.raises(QuotaExceeded):
                records.endpoints.audited(quota=Quota(Quotable.ENDPOINT, owner_id, 1)).delete_endpoint("none")
            records.endpoints.audited(quota=Quota(Quotable.ENDPOINT, owner_id, 2)).delete_endpoint("none")
            assert records.functions.count_functions(owner_id, limit=9) == 1
            assert records.endpoints.count_endpoints(owner_id, limit=9) == 1
        assert records.functions.count_functions("bob", limit=9) == 0
        assert records.tokens.delete_account("robot-0")
        with pytest.raises(QuotaExceeded):  # its functions stay, and count
            records.functions.audited(quota=Quota(Quotable.FUNCTION, "alice", 1)).delete_alias("x", "y")
        assert sorted(records.tokens.quota_group("robot-1")) == ["alice", "robot-0", "robot-1"]
        assert records.tokens.quota_group("robot-1")[0] == records.tokens.quota_group("alice")[0] == "alice"
        assert list(records.tokens.quota_group("bob")) == ["bob"]
        records.tokens.add_account(ServiceAccount("robot-2", "alice", "ci-0", T0))  # the name is free again

    def test_replaced_alias_counts_once(self, records: Records) -> None:
        records.functions.add_function(make_function())
        quota = Quota(Quotable.ALIAS, "alice", 1, but="mine")
        for version in (1, None):
            records.functions.audited(quota=quota).put_alias(FunctionAlias("alice", "mine", "f1", version))
        with pytest.raises(QuotaExceeded):
            records.functions.audited(quota=dataclasses.replace(quota, but="other")).put_alias(
                FunctionAlias("alice", "other", "f1")
            )

    def test_a_quota_of_bytes_counts_all_versions(self, records: Records) -> None:
        records.functions.add_function(make_function(body=b"12345"))
        quota = Quota(Quotable.FUNCTION, "alice", 9, more_bytes=5, most_bytes=10)
        records.functions.audited(quota=quota).add_function(make_function(version=2, body=b"67890"))
        with pytest.raises(QuotaExceeded, match=r"10 bytes; 5 more exceed the limit of 10"):
            records.functions.audited(quota=quota).add_function(make_function("f2", body=b"12345"))

    def test_tokens_that_ended_do_not_count_against_the_quota(self, records: Records) -> None:
        records.tokens.add_token(make_token("expired", expires_at=at(-1e9)))
        records.tokens.add_token(make_token("revoked"))
        records.tokens.revoke_token("revoked", at=at(1))
        quota = Quota(Quotable.TOKEN, "alice", 1)
        records.tokens.audited(quota=quota).add_token(make_token("tok1"))
        with pytest.raises(QuotaExceeded):
            records.tokens.audited(quota=quota).add_token(make_token("tok2"))
        assert records.tokens.get_token("tok2") is None

    # actions of Globus Flows

    def test_an_owner_has_one_action_of_a_request_id(self, records: Records) -> None:
        action = make_action("a1", label="Beam 7", monitor_by=["urn:x"], manage_by=["urn:y", "urn:z"], deadline=at(9))
        assert records.actions.add_action(action) == action
        assert records.actions.add_action(make_action("a2", request_hash="other")) == action
        others = make_action("a3", owner_id="bob")
        assert records.actions.add_action(others) == others
        assert [records.actions.get_action(id_) for id_ in ("a1", "a2", "a3")] == [action, None, others]
        assert records.actions.audited(make_entry("action.release", "a1")).delete_action("a1")
        assert not records.actions.delete_action("a1")
        assert records.actions.add_action(make_action("a4")).action_id == "a4"
        assert [each.action for each in records.audit.list_entries(["alice"])] == ["action.release"]

    def test_requests_at_the_same_moment_add_one_action(self, records: Records) -> None:
        start = threading.Barrier(8)

        def add(number: int) -> str:
            start.wait()
            return records.actions.add_action(make_action(f"a{number}")).action_id

        with ThreadPoolExecutor(8) as requests:
            [added] = set(requests.map(add, range(8)))
        assert [each.action_id for each in records.actions.list_actions(["alice"])] == [added]

    def test_actions_are_listed_newest_first_and_purged_by_age(self, records: Records) -> None:
        for number in range(4):
            owner_id = "bob" if number == 3 else "alice"
            records.actions.add_action(
                make_action(f"a{number}", request_id=f"r{number}", owner_id=owner_id, created_at=at(number))
            )
        assert [each.action_id for each in records.actions.list_actions(["alice"], limit=2)] == ["a2", "a1"]
        assert [each.action_id for each in records.actions.list_actions(["alice", "bob"], limit=2)] == ["a3", "a2"]
        assert records.actions.list_actions(["carol"]) == []
        assert records.actions.purge_actions(created_before=at(3), limit=2) == 2
        assert records.actions.purge_actions(created_before=at(3), limit=2) == 1
        assert [each.action_id for each in records.actions.list_actions(["alice", "bob"])] == ["a3"]

    def test_overdue_actions_are_found_until_their_deadline_is_forgotten(self, records: Records) -> None:
        for number, deadline in enumerate([at(7), at(5), at(9), None]):
            records.actions.add_action(make_action(f"a{number}", request_id=f"r{number}", deadline=deadline))
        assert [each.action_id for each in records.actions.find_overdue(at=at(7))] == ["a1", "a0"]
        assert [each.action_id for each in records.actions.find_overdue(at=at(99), limit=2)] == ["a1", "a0"]
        records.actions.forget_deadline("a1")
        assert [each.action_id for each in records.actions.find_overdue(at=at(99))] == ["a0", "a2"]

    def test_the_tasks_of_an_action_have_ids_of_its_time(self) -> None:
        action = make_action(new_task_id(), tasks=1000)
        ids = action.task_ids()
        assert len(set(ids)) == 1000
        assert ids == dataclasses.replace(action, label="x").task_ids()
        assert {uuid.UUID(each).version for each in ids} == {7}
        assert {uuid.UUID(each).variant for each in ids} == {uuid.RFC_4122}
        assert all(is_uuid(each) and each[:19] == action.action_id[:19] for each in ids)
        assert not set(ids) & set(make_action(new_task_id(), tasks=1000).task_ids())

    # tokens and service accounts

    def test_token_round_trips_and_is_revoked_once(self, records: Records) -> None:
        token = make_token(endpoints=["e1"], functions=[])
        records.tokens.add_token(token)
        assert records.tokens.get_token("tok1") == token
        records.tokens.note_token_use("tok1", at=at(5))
        assert records.tokens.revoke_token("tok1", at=at(6))
        assert not records.tokens.revoke_token("tok1", at=at(7))
        assert records.tokens.get_token("tok1") == dataclasses.replace(token, last_used_at=at(5), revoked_at=at(6))
        assert records.tokens.get_token("tok2") is None
        assert not records.tokens.revoke_token("tok2", at=at(7))

    def test_tokens_are_listed_by_owner_newest_first_until_they_ended_a_month_ago(self, records: Records) -> None:
        month_s = 30 * 86_400
        records.tokens.add_token(make_token("t0", identity_id="robot"))
        records.tokens.add_token(make_token("t1", created_at=at(1), owner_id="bob"))
        records.tokens.add_token(make_token("t2", created_at=at(2), expires_at=at(9)))
        records.tokens.add_token(make_token("revoked", created_at=at(4)))
        records.tokens.revoke_token("revoked", at=at(5))
        assert [each.token_id for each in records.tokens.list_tokens(["alice"])] == ["revoked", "t2", "t0"]
        assert [each.token_id for each in records.tokens.list_tokens(["alice", "bob"], limit=2)] == ["revoked", "t2"]
        records.tokens.add_token(make_token("later", created_at=at(month_s + 7)))
        assert [each.token_id for each in records.tokens.list_tokens(["alice"])] == ["later", "t2", "t0"]

    def test_accounts_have_names_of_their_owner_and_are_deleted_with_their_tokens(self, records: Records) -> None:
        account = ServiceAccount("robot", "alice", "ci", T0)
        records.tokens.add_account(account)
        records.tokens.add_account(ServiceAccount("other", "bob", "ci", T0))
        with pytest.raises(Conflict):
            records.tokens.audited(make_entry("account.create", "x")).add_account(
                dataclasses.replace(account, account_id="robot-2")
            )
        assert not records.audit.list_entries(["alice"])
        records.tokens.add_token(make_token("robots", identity_id="robot"))
        records.tokens.add_token(make_token("alices"))
        assert records.tokens.get_account("robot") == account
        assert records.tokens.list_accounts(["alice"]) == [account]
        assert records.tokens.delete_account("robot")
        assert not records.tokens.delete_account("robot")
        assert records.tokens.get_account("robot") is None
        assert [each.token_id for each in records.tokens.list_tokens(["alice", "bob"])] == ["alices"]

    def test_batch_of_tasks_has_one_audit_entry(self, records: Records) -> None:
        entry = make_entry("tasks.submit", "e1", owner_id="bob", detail={"task_group_id": "g1"})
        tasks = [make_task(f"t{n}") for n in range(5)]
        records.tasks.add_tasks(tasks, audit=entry)
        records.tasks.add_tasks(tasks, audit=entry)
        records.tasks.add_tasks([*tasks, make_task("t9")], audit=entry)
        details = [each.detail for each in records.audit.list_entries(["alice"])]
        assert details == [{"task_group_id": "g1", "tasks": 5}, {"task_group_id": "g1", "tasks": 1}]

    def test_audit_shows_own_actions_and_actions_on_own_objects(self, records: Records) -> None:
        records.audit.add_entries(
            [
                make_entry("endpoint.update", "e1", identity_id="alice", owner_id="alice", seconds=0),
                make_entry("tasks.submit", "e1", identity_id="bob", owner_id="alice", seconds=1),
                make_entry("tasks.submit", "e2", identity_id="alice", owner_id="carol", seconds=2),
                make_entry("function.delete", "f7", identity_id="bob", owner_id="bob", seconds=3),
            ]
        )
        records.audit.add_entries([])

        def seen(*ids: str, **bounds: Any) -> list[int]:
            return [round((entry.at - T0).total_seconds()) for entry in records.audit.list_entries(ids, **bounds)]

        assert seen("alice") == [0, 1, 2]
        assert seen("bob") == [1, 3]
        assert seen("alice", "bob") == [0, 1, 2, 3]
        assert seen("carol") == [2]
        assert seen("alice", since=at(1), until=at(2)) == [1]
        assert seen("alice", limit=2) == [0, 1]
        first = records.audit.list_entries(["alice"], limit=1)[0]
        assert seen("alice", after=(first.at, first.audit_id)) == [1, 2]

    def test_a_refusal_is_shown_to_the_owner_of_the_object(self, records: Records) -> None:
        refusal = AuditEntry(T0, "bob", FORBIDDEN, "e1", "alice")
        records.audit.add_entries([refusal, AuditEntry(at(1), "bob", FORBIDDEN, "e2", "bob")])
        assert [entry.object_id for entry in records.audit.list_entries(["alice"])] == ["e1"]
        assert [entry.object_id for entry in records.audit.list_entries(["bob"])] == ["e2"]
        assert [entry.object_id for entry in records.audit.list_entries(["alice", "bob"])] == ["e1", "e2"]

    def test_old_audit_entries_are_purged(self, records: Records) -> None:
        records.audit.add_entries([make_entry("endpoint.update", "e1", seconds=n) for n in range(5)])
        assert records.audit.purge_entries(before=at(3), limit=2) == 2
        assert records.audit.purge_entries(before=at(3), limit=2) == 1
        assert [entry.at for entry in records.audit.list_entries(["alice"])] == [at(3), at(4)]

    # endpoints, keys, grants

    def test_registered_endpoint_round_trips(self, records: Records) -> None:
        endpoint = Endpoint(
            "e1", "alice", "laptop", "My laptop", "in the attic", True, True, ("f1",), {"os": "linux"}, created_at=T0
        )
        records.endpoints.put_endpoint(endpoint)
        found = records.endpoints.get_endpoint("e1")
        assert found is not None
        assert tuple(found.allowed_functions or ()) == ("f1",)
        assert dataclasses.replace(found, allowed_functions=("f1",)) == endpoint
        assert records.endpoints.get_endpoint("e2") is None

    def test_updating_an_endpoint_keeps_its_owner_its_age_and_its_presence(self, records: Records) -> None:
        records.endpoints.put_endpoint(Endpoint("e1", "alice", "laptop", created_at=T0))
        status = EndpointStatus(managers=1, total_workers=8, idle_workers=7, pending_tasks=2, outstanding_tasks=3)
        graph = GraphState("t1", (StageState(1, "resize \x00", "running", calls=40, ended=12, node="n1"),), 50, 12)
        environment = EnvironmentState("k", "sci", "uv", "n1", 1, 2, 3, True, "uv is installing", 1.5, "none \x00", 2.5)
        status = dataclasses.replace(
            status,
            blocks=2,
            pending_blocks=1,
            environments=(environment,),
            graphs=(graph,),
            reported_at=1234.5,
            progress=(
                RunningProgress("t2", Progress(3, 10.5, "fitting", 1234.0)),
                RunningProgress("t3", Progress(0.5)),
            ),
        )
        records.endpoints.set_presence([Presence("e1", True, status)])
        records.endpoints.put_endpoint(Endpoint("e1", "mallory", "renamed", public=True, created_at=at(10)))
        found = records.endpoints.get_endpoint("e1")
        assert found is not None
        assert found == Endpoint(
            "e1", "alice", "renamed", public=True, created_at=T0, seen_at=found.seen_at, online=True, status=status
        )
        assert found.status.reported_at == 1234.5
        assert found.seen_at is not None, "the store's clock at that call; how long ago that was, by the same clock"
        assert found.silent_s is not None
        again = records.endpoints.get_endpoint("e1")
        assert again is not None
        assert again.seen_at == found.seen_at
        assert 0.0 <= found.silent_s <= (again.silent_s or 0.0)

    def test_the_presence_of_many_endpoints_is_one_call(self, records: Records) -> None:
        for endpoint_id in ("e1", "e2", "e3"):
            records.endpoints.put_endpoint(Endpoint(endpoint_id, "alice", endpoint_id))
        busy, sick = EndpointStatus(managers=2), EndpointStatus(problem="disk is full")
        records.endpoints.set_presence(
            [
                Presence("e2", True, busy),
                Presence("gone", True, busy),
                Presence("e1", True, busy),
                Presence("e1", False, sick),
            ]
        )
        records.endpoints.set_presence([])
        assert records.endpoints.find_spools(["e2", "gone", "e1"]) == {"e1": SpoolMark("", 0), "e2": SpoolMark("", 0)}
        assert records.endpoints.find_spools([]) == {}
        records.endpoints.claim_spools({"e1": SpoolMark("s", 3), "gone": SpoolMark("s", 1)})
        records.endpoints.raise_spools({"e1": SpoolMark("s", 5), "e2": SpoolMark("another", 9)})
        assert records.endpoints.find_spools(["e1", "e2"]) == {"e1": SpoolMark("s", 5), "e2": SpoolMark("", 0)}
        records.endpoints.claim_spools({"e1": SpoolMark("s", 4)})
        records.endpoints.raise_spools({"e1": SpoolMark("s", 4)})
        assert records.endpoints.find_spools(["e1"]) == {"e1": SpoolMark("s", 5)}
        records.endpoints.claim_spools({"e1": SpoolMark("new", 0)})
        records.endpoints.raise_spools({})
        assert records.endpoints.find_spools(["e1"]) == {"e1": SpoolMark("new", 0)}
        found = [records.endpoints.get_endpoint(endpoint_id) for endpoint_id in ("e1", "e2", "e3")]
        assert [(e.online, e.status, e.seen_at is None, e.silent_s is None) for e in found if e] == [
            (False, sick, False, False),
            (True, busy, False, False),
            (False, EndpointStatus(), True, True),
        ]

    def test_a_report_of_latency_targets_stays_until_the_next_one(self, records: Records) -> None:
        for endpoint_id in ("e1", "e2"):
            records.endpoints.put_endpoint(Endpoint(endpoint_id, "alice", endpoint_id))
        function_id = str(uuid.uuid4())
        function = FunctionQos(
            function_id=function_id,
            target_ms=200.0,
            weights=((1.5, 100.0),),
            windows={"1m": WindowNumbers(tasks=3, p50_ms=2.5)},
            infeasible=Infeasible("it waits \N{SNOWMAN}", "add workers"),
        )
        reports = [QosReport(policy="pi", functions=(function,), reported_at=at) for at in (1.0, 2.0)]
        target = InfeasibleTarget(function_id=function_id, target_ms=200.0, reason="it waits")
        status = EndpointStatus(infeasible=(target,), refuses_infeasible=True)
        records.endpoints.set_presence(
            [Presence("gone", True, status, reports[0]), Presence("e1", True, status, reports[0])]
        )
        assert records.endpoints.get_qos_report("e1") == reports[0]
        found = records.endpoints.get_endpoint("e1")
        assert found is not None
        assert found.status == status
        records.endpoints.set_presence([Presence("e1", False, EndpointStatus()), Presence("e2", True, status)])
        assert records.endpoints.get_qos_report("e1") == reports[0]
        assert records.endpoints.get_qos_report("e2") is records.endpoints.get_qos_report("gone") is None
        records.endpoints.set_presence([Presence("e1", True, status, reports[1])])
        assert records.endpoints.get_qos_report("e1") == reports[1]
        records.endpoints.delete_endpoint("e1")
        assert records.endpoints.get_qos_report("e1") is None

    def test_endpoints_are_listed_by_role(self, records: Records) -> None:
        records.endpoints.put_endpoint(Endpoint("mine", "alice", "a", created_at=at(1)))
        records.endpoints.put_endpoint(Endpoint("public", "bob", "b", public=True, created_at=at(2)))
        records.endpoints.put_endpoint(Endpoint("granted", "bob", "c", created_at=at(3)))
        records.endpoints.put_endpoint(Endpoint("private", "bob", "d", created_at=at(4)))
        assert [e.endpoint_id for e in records.endpoints.list_endpoints("alice")] == ["mine"]
        assert [e.endpoint_id for e in records.endpoints.list_endpoints("alice", shared=["granted", "gone"])] == [
            "granted",
            "public",
            "mine",
        ]

    def test_the_greatest_open_share_of_a_person_counts(self, records: Records) -> None:
        for share in (
            share_of("e1", "identity bob", Right.SEE),
            share_of("e1", "group lab", Right.USE),
            share_of("e1", "name bob@x.org", Right.MANAGE, ends_at=LONG_AGO),
            share_of("e2", "name bob@x.org", Right.USE, ends_at=now() + dt.timedelta(hours=1)),
            share_of("e3", "identity carol", Right.MANAGE),
        ):
            records.shares.put_share(share)
        bob = ["identity bob", "group lab", "name bob@x.org"]
        assert records.shares.find_rights(["e1", "e2", "e3", "gone"], bob) == {"e1": Right.USE, "e2": Right.USE}
        assert records.shares.find_rights(["e1"], ["identity bob"]) == {"e1": Right.SEE}
        assert records.shares.find_rights(["e1"], []) == {}

    def test_a_person_has_the_principals_that_were_recorded_and_groups_only_for_a_time(self, records: Records) -> None:
        bob = ["identity bob", "group lab", "name bob@x.org"]
        shares = records.shares
        assert shares.get_principals("bob", groups_since=LONG_AGO) == {"identity bob"}
        assert shares.put_person("bob", bob) == frozenset()
        assert shares.get_principals("bob", groups_since=LONG_AGO) == set(bob)
        later = now() + dt.timedelta(hours=1)
        assert shares.get_principals("bob", groups_since=later) == {"identity bob", "name bob@x.org"}
        assert shares.put_person("bob", bob[:1]) == {"group lab", "name bob@x.org"}
        assert shares.get_principals("bob", groups_since=LONG_AGO) == {"identity bob"}

    def test_allowances_are_those_of_open_shares_that_let_a_person_use(self, records: Records) -> None:
        for share in (
            share_of("e1", "identity bob", Right.SEE, allowance={"max_running": 1}),
            share_of("e1", "group lab", Right.USE, allowance={"max_running": 2, "weight": 3}),
            share_of("e1", "name bob@x.org", Right.MANAGE),
            share_of("e1", "group former", Right.USE, ends_at=LONG_AGO, allowance={"max_running": 9}),
        ):
            assert records.shares.put_share(share).allowance == share.allowance
        found = records.shares.find_allowances("e1", ["identity bob", "group lab", "group former"])
        assert found == [{"max_running": 2, "weight": 3}]
        assert records.shares.find_allowances("e1", ["name bob@x.org"]) == [{}]
        assert records.shares.find_allowances("e2", ["name bob@x.org"]) == []

    def test_a_share_is_replaced_listed_and_ended(self, records: Records) -> None:
        first = records.shares.put_share(share_of("e1", "identity bob", Right.SEE, share_id="s1"))
        second = records.shares.put_share(
            share_of("e1", "identity bob", Right.USE, share_id="s2", ends_at=LONG_AGO, note="n", granted_by="carol")
        )
        assert (first.share_id, second.share_id, second.right, second.granted_by) == ("s1", "s1", Right.USE, "carol")
        assert records.shares.get_share("e1", "s1") == records.shares.find_share("e1", "identity bob") == second
        assert records.shares.get_share("e2", "s1") is None
        assert records.shares.find_share("e1", "identity carol") is None
        records.shares.put_share(share_of("e1", "identity carol", Right.USE, granted_at=at(5)))
        assert [each.grantee for each in records.shares.list_shares("e1")] == ["identity bob", "identity carol"]
        assert len(records.shares.list_shares("e1", limit=1)) == 1
        assert records.shares.list_ended_shares() == [second]
        assert not records.shares.delete_share("e2", "s1")
        assert records.shares.delete_share("e1", "s1")
        assert records.shares.list_ended_shares() == []

    def test_shares_are_deleted_with_their_objects(self, records: Records) -> None:
        records.endpoints.put_endpoint(Endpoint("e1", "alice", "lab"))
        records.functions.add_function(Function("f1", "alice", "f", b"b", "h"))
        records.shares.put_share(share_of("e1", "identity bob", Right.SEE, granted_at=at(1)))
        records.shares.put_share(share_of("f1", "identity bob", Right.USE, kind=ObjectKind.FUNCTION, granted_at=at(2)))
        records.shares.put_share(share_of("gone", "identity bob", Right.USE))
        found = records.shares.find_objects(["identity bob"])
        assert [(each.share.object_id, each.name, each.owner_id) for each in found] == [
            ("f1", "f", "alice"),
            ("e1", "lab", "alice"),
        ]
        assert len(records.shares.find_objects(["identity bob"], limit=1)) == 1
        records.endpoints.delete_endpoint("e1")
        records.functions.delete_function("f1")
        assert [each.object_id for each in records.shares.list_shares_with(["identity bob"])] == ["gone"]

    def test_a_team_has_members_and_what_is_shared_with_it(self, records: Records) -> None:
        records.shares.add_team(Team("t1", "alice", "optics", T0))
        records.shares.add_team(Team("t2", "bob", "acoustics", T0))
        for member in ("name bob@x.org", "identity carol", "identity carol"):
            records.shares.put_member(TeamMember("t1", member, T0))
        with pytest.raises(NotFound):
            records.shares.put_member(TeamMember("gone", "identity carol", T0))
        records.shares.put_share(share_of("e1", "team t1", Right.USE))
        assert records.shares.find_rights(["e1"], ["identity carol"]) == {"e1": Right.USE}
        assert [each.member for each in records.shares.list_members("t1")] == ["identity carol", "name bob@x.org"]
        assert [each.team_id for each in records.shares.list_teams("bob", ["name bob@x.org"])] == ["t2", "t1"]
        assert [each.grantee for each in records.shares.list_shares_with(["identity carol"])] == ["team t1"]
        assert records.shares.get_team("t1") == Team("t1", "alice", "optics", T0)
        assert records.shares.delete_member("t1", "identity carol")
        assert not records.shares.delete_member("t1", "identity carol")
        assert records.shares.find_rights(["e1"], ["identity carol"]) == {}
        assert records.shares.delete_team("t1")
        assert not records.shares.delete_team("t1")
        assert records.shares.get_team("t1") is None
        assert records.shares.list_shares("e1") == []
        assert records.shares.list_members("t1") == []

    @pytest.mark.parametrize("kind", [Quotable.SHARE, Quotable.MEMBER])
    def test_what_is_replaced_does_not_count(self, records: Records, kind: Quotable) -> None:
        records.shares.add_team(Team("t1", "alice", "optics", T0))

        def add(who: str) -> None:
            limited = records.shares.audited(quota=Quota(kind, "t1", 1, but=who))
            if kind is Quotable.SHARE:
                limited.put_share(share_of("t1", who, Right.USE))
            else:
                limited.put_member(TeamMember("t1", who, T0))

        add("identity bob")
        add("identity bob")
        with pytest.raises(QuotaExceeded):
            add("identity carol")

    def test_key_belongs_to_one_endpoint(self, records: Records) -> None:
        records.endpoints.put_endpoint(Endpoint("e1", "alice", "a"))
        records.endpoints.put_endpoint(Endpoint("e2", "mallory", "b"))
        records.endpoints.add_endpoint_key("e1", "key", at=T0)
        records.endpoints.add_endpoint_key("e1", "key", at=at(1))
        with pytest.raises(Conflict):
            records.endpoints.add_endpoint_key("e2", "key", at=at(2))
        with pytest.raises(EndpointUnknown):
            records.endpoints.add_endpoint_key("e3", "other", at=at(2))
        assert records.endpoints.find_endpoints_by_key(["key"]).get("key") == "e1"
        assert records.endpoints.find_endpoints_by_key(["other"]).get("other") is None
        records.endpoints.add_endpoint_key("e2", "another", at=T0)
        assert records.endpoints.find_endpoints_by_key(["key", "another", "other"]) == {"key": "e1", "another": "e2"}

    def test_an_endpoint_has_two_keys_at_most(self, records: Records) -> None:
        for endpoint_id in ("e1", "e2"):
            records.endpoints.put_endpoint(Endpoint(endpoint_id, "alice", "a"))
        assert records.endpoints.add_endpoint_key("e1", "k1", at=at(1)) == []
        assert records.endpoints.add_endpoint_key("e1", "k2", at=at(2)) == []
        assert records.endpoints.add_endpoint_key("e2", "k0", at=T0) == []
        assert records.endpoints.add_endpoint_key("e1", "k1", at=at(3)) == []
        assert records.endpoints.add_endpoint_key("e1", "k3", at=at(3)) == ["k1"]
        assert records.endpoints.add_endpoint_key("e1", "k4", at=T0) == ["k2"], "the new one stays"
        assert records.endpoints.list_endpoint_keys("e1") == [EndpointKey("k4", T0), EndpointKey("k3", at(3))]
        assert records.endpoints.list_endpoint_keys("e2") == [EndpointKey("k0", T0)]
        assert records.endpoints.find_endpoints_by_key(["k1", "k3"]) == {"k3": "e1"}
        assert records.endpoints.add_endpoint_key("e1", "k1", at=at(4)) == ["k4"], "a deleted one may come back"

    def test_a_revoked_key_cannot_be_added_again(self, records: Records) -> None:
        for endpoint_id in ("e1", "e2"):
            records.endpoints.put_endpoint(Endpoint(endpoint_id, "alice", "a"))
        records.endpoints.add_endpoint_key("e1", "k1", at=at(1))
        records.endpoints.add_endpoint_key("e1", "k2", at=at(2))
        assert not records.endpoints.revoke_endpoint_key("e2", "k1", at=at(3))
        assert records.endpoints.revoke_endpoint_key("e1", "k1", at=at(3))
        assert not records.endpoints.revoke_endpoint_key("e1", "k1", at=at(3))
        assert not records.endpoints.revoke_endpoint_key("e1", "unknown", at=at(3))
        assert records.endpoints.list_endpoint_keys("e1") == [EndpointKey("k2", at(2))]
        assert records.endpoints.find_endpoints_by_key(["k1", "k2"]) == {"k2": "e1"}
        for endpoint_id in ("e1", "e2"):
            with pytest.raises(Conflict):
                records.endpoints.add_endpoint_key(endpoint_id, "k1", at=at(4))
        assert records.endpoints.add_endpoint_key("e1", "k3", at=at(4)) == [], "a revoked key does not count"
        for number in range(100):
            records.endpoints.add_endpoint_key("e1", f"r{number}", at=at(5))
            assert records.endpoints.revoke_endpoint_key("e1", f"r{number}", at=at(6 + number))
        records.endpoints.add_endpoint_key("e1", "k1", at=at(200))  # 101 revoked keys are not remembered
        assert EndpointKey("k1", at(200)) in records.endpoints.list_endpoint_keys("e1")
        with pytest.raises(Conflict):
            records.endpoints.add_endpoint_key("e1", "r0", at=at(200))

    def test_endpoint_update_changes_named_fields_only(self, records: Records) -> None:
        records.endpoints.put_endpoint(
            Endpoint("e1", "alice", "a", public=True, metadata={"os": "linux"}, created_at=T0)
        )
        records.endpoints.change_endpoint("e1", {"public": False, "name": "b"})
        records.endpoints.change_endpoint("e1", {"metadata": {"os": "bsd"}})
        records.endpoints.change_endpoint("e1", {"credential_id": "c1"})
        records.endpoints.change_endpoint("e1", {})
        changed = Endpoint("e1", "alice", "b", metadata={"os": "bsd"}, created_at=T0, credential_id="c1")
        assert records.endpoints.get_endpoint("e1") == changed
        records.endpoints.put_endpoint(dataclasses.replace(changed, credential_id=""))
        assert records.endpoints.get_endpoint("e1") == changed, "not of those that an update of the whole changes"
        records.endpoints.change_endpoint("e2", {"name": "unknown"})
        assert records.endpoints.get_endpoint("e2") is None

    def test_endpoint_lists_are_bounded_and_brief(self, records: Records) -> None:
        for number in range(3):
            endpoint = Endpoint(f"e{number}", "alice", "a", "b", created_at=at(number), metadata={"long": "text"})
            records.endpoints.put_endpoint(endpoint)
        found = records.endpoints.list_endpoints("alice", limit=2)
        assert found == [Endpoint(f"e{number}", "alice", "a", "b", created_at=at(number)) for number in (2, 1)]

    def test_deleted_endpoint_loses_its_keys(self, records: Records) -> None:
        records.endpoints.put_endpoint(Endpoint("e1", "alice", "a"))
        records.endpoints.add_endpoint_key("e1", "key", at=T0)
        assert records.endpoints.list_endpoint_keys("e1") == [EndpointKey("key", T0)]
        assert records.endpoints.list_endpoint_keys("e2") == []
        assert records.endpoints.delete_endpoint("e1")
        assert not records.endpoints.delete_endpoint("e1")
        assert records.endpoints.find_endpoints_by_key(["key"]).get("key") is None

    # task rows

    def test_submitted_task_round_trips(self, records: Records) -> None:
        task = make_task(
            payload=None,
            payload_ref=BlobRef("alice/abc", 5, "abc"),
            container="c1",
            environment=Environment(type="uv", requirements=("polars==1.*",), preload=("polars",), name="frames"),
            idempotent=False,
            memory_bytes=2**40,
            memoize=False,
            keep_output=True,
            max_attempts=7,
            walltime_s=1.5,
            result_serializers=("a", "b"),
            resource_specification={"cores": 2},
            details={"note": "nul \x00 and ü"},
            timings={"submitted_at": 1.25},
        )
        assert records.tasks.add_tasks([task, make_task("t2")]) == {}
        assert records.tasks.get_tasks(["t1", "t2", "t3"]) == {"t1": task, "t2": make_task("t2")}
        assert [(e.state, e.reporter, e.at) for e in records.tasks.list_events("t1")] == [
            (TaskState.RECEIVED, Reporter.API, T0)
        ]

    def test_a_submit_can_be_repeated(self, records: Records) -> None:
        records.tasks.add_tasks([make_task("t1")])
        records.tasks.record_transitions([transition("t1", TaskState.RUNNING, 1)])
        known = records.tasks.add_tasks([make_task("t2"), make_task("t1", payload=b"other")])
        assert known == {"t1": make_task("t1", state=TaskState.RUNNING, attempt=1)}
        assert records.tasks.get_tasks(["t1"])["t1"].payload == b"\x00payload\xff"
        assert len(records.tasks.list_events("t1")) == 2
        assert records.tasks.get_tasks(["t2"])

    def test_no_task_is_added_for_a_deleted_endpoint(self, records: Records) -> None:
        records.endpoints.put_endpoint(Endpoint("e1", "alice", "a"))
        assert records.tasks.add_tasks([make_task("t1")], endpoint_id="e1") == {}
        records.endpoints.delete_endpoint("e1")
        before = len(records.audit.list_entries(["alice"]))
        done = make_entry("tasks.submit", "e1", detail={})

        with pytest.raises(EndpointUnknown):
            records.tasks.add_tasks([make_task("t1"), make_task("t2")], endpoint_id="e1", audit=done)

        assert records.tasks.add_tasks([make_task("t1")], endpoint_id="e1").keys() == {"t1"}
        assert records.tasks.get_tasks(["t1", "t2"]).keys() == {"t1"}
        assert len(records.audit.list_entries(["alice"])) == before

    def test_open_tasks_of_an_endpoint_are_listed_by_id(self, records: Records) -> None:
        records.tasks.add_tasks([make_task(f"t{number}") for number in (2, 0, 1, 3)])
        records.tasks.add_tasks([make_task("t4", endpoint_id="e2")])
        records.tasks.record_results([make_task_result("t1")], at=at(1))
        assert records.tasks.list_open_ids_of("e1", limit=2) == ["t0", "t2"]
        assert records.tasks.list_open_ids_of("e1", limit=9) == ["t0", "t2", "t3"]

    def test_invalid_task_refuses_the_whole_batch(self, records: Records) -> None:
        with pytest.raises(Conflict):
            records.tasks.add_tasks([make_task("t1"), make_task("t2", payload=None)])
        assert records.tasks.get_tasks(["t1", "t2"]) == {}
        assert records.tasks.add_tasks([]) == {}

    def test_new_task_has_no_result(self, records: Records) -> None:
        records.tasks.add_tasks([make_task(state=TaskState.SUCCESS, attempt=4, result=b"forged", finished_at=T0)])
        assert records.tasks.get_tasks(["t1"])["t1"] == make_task()

    def test_memoized_success_answers_a_call_at_once(self, records: Records) -> None:
        records.tasks.add_tasks([make_task("t1", memo_key="k1"), make_task("t2", memo_key="k2")])
        assert records.tasks.find_memoized("alice", ["k1", "k2"]) == {}
        records.tasks.record_results([make_task_result("t1", details={"python_version": "3.12"})], at=at(1))
        failed = ErrorRecord("TASK_FAILED", "no", fault=Fault.USER_CODE)
        records.tasks.record_results(
            [make_task_result("t2", state=TaskState.FAILED, result=None, error=failed)], at=at(1)
        )
        found = records.tasks.find_memoized("alice", ["k1", "k2", "k3"])
        assert found == {"k1": records.tasks.get_tasks(["t1"])["t1"]}
        assert found["k1"].result == b"\x00result\xff"
        assert records.tasks.find_memoized("bob", ["k1"]) == {}
        assert records.tasks.find_memoized("alice", []) == {}

        repeat = make_task("t3", memo_key="k1", submitted_at=at(2), timings={"submitted_at": 2.0})
        assert records.tasks.add_tasks([repeat, make_task("t4")], memoized={"t3": found["k1"]}) == {}
        ended = records.tasks.get_tasks(["t3"])["t3"]
        assert (ended.state, ended.result, ended.attempt, ended.finished_at) == (
            TaskState.SUCCESS,
            b"\x00result\xff",
            0,
            at(2),
        )
        assert ended.details == {"python_version": "3.12", "memoized_from": "t1", "memoized_endpoint_id": "e1"}
        assert ended.memo_key is None
        assert [(e.state, e.reporter) for e in records.tasks.list_events("t3")] == [
            (TaskState.RECEIVED, Reporter.API),
            (TaskState.SUCCESS, Reporter.API),
        ]
        assert [task.task_id for task in records.tasks.list_open_tasks("e1")] == ["t4"]
        assert records.tasks.find_memoized("alice", ["k1"])["k1"].task_id == "t1"

    def test_newest_success_is_memoized(self, records: Records) -> None:
        records.tasks.add_tasks([make_task(name, memo_key="k") for name in ("t1", "t2", "t3")])
        records.tasks.record_results([make_task_result("t2", result=b"old")], at=at(1))
        records.tasks.record_results(
            [make_task_result("t1", result=None, result_ref=BlobRef("alice/r", 9, "r"))], at=at(2)
        )
        assert records.tasks.find_memoized("alice", ["k"])["k"].result_ref == BlobRef("alice/r", 9, "r")
        assert not records.tasks.record_results([make_task_result("t1", result=b"later")], at=at(3))

    def test_tasks_are_listed_without_their_bytes(self, records: Records) -> None:
        records.tasks.add_tasks(
            [make_task("t1"), make_task("t3", submitted_at=at(2)), make_task("t2", submitted_at=at(1))]
        )
        records.tasks.add_tasks([make_task("t4", owner_id="bob", task_group_id="g2")])
        records.tasks.record_results([make_task_result("t1")], at=at(3))
        assert [task.task_id for task in records.tasks.list_tasks("alice")] == ["t3", "t2", "t1"]
        assert [task.task_id for task in records.tasks.list_tasks("alice", limit=1)] == ["t3"]
        assert [task.task_id for task in records.tasks.list_tasks("alice", state=TaskState.SUCCESS)] == ["t1"]
        assert [task.task_id for task in records.tasks.get_group("g1")] == ["t1", "t2", "t3"]
        assert all(task.payload is None and task.result is None for task in records.tasks.get_group("g1"))
        assert all(task.payload is None and task.result is None for task in records.tasks.list_tasks("alice"))
        assert records.tasks.get_group("g3") == []
        assert records.tasks.get_tasks(["t1", "t5"], with_bodies=False) == {"t1": records.tasks.get_group("g1")[0]}

    def test_open_tasks_are_paged_by_id(self, records: Records) -> None:
        records.tasks.add_tasks([make_task(f"t{n}") for n in range(5)] + [make_task("t9", endpoint_id="e2")])
        records.tasks.record_results([make_task_result("t1")], at=at(1))
        records.tasks.record_results([make_task_result("t9", endpoint_id="e2")], at=at(1))
        assert records.tasks.find_busy_endpoints(["e2", "e1", "unknown"]) == {"e1"}
        assert records.tasks.find_busy_endpoints([]) == frozenset()
        first = records.tasks.list_open_tasks("e1", limit=2)
        assert [task.task_id for task in first] == ["t0", "t2"]
        assert first[0].payload == b"\x00payload\xff"
        assert [task.task_id for task in records.tasks.list_open_tasks("e1", after="t2", limit=9)] == ["t3", "t4"]
        assert records.tasks.list_open_tasks("e1", after="t4") == []

    def test_open_tasks_are_found_by_endpoint_function_and_owner(self, records: Records) -> None:
        records.tasks.add_tasks(
            [
                make_task("t1", function_id="f1"),
                make_task("t2", function_id="f2", owner_id="bob"),
                make_task("t3", function_id="f2", endpoint_id="e2"),
                make_task("t4", function_id="f2"),
                make_task("t5", function_id="f1"),
            ]
        )
        records.tasks.record_results([make_task_result("t5")], at=at(1))

        def found(**wanted: Any) -> list[str]:
            return [task.task_id for task in records.tasks.find_open_tasks(**wanted)]

        assert found(endpoint_id="e1") == ["t1", "t2", "t4"]
        assert found(endpoint_id="e1", function_id="f2") == ["t2", "t4"]
        assert found(endpoint_id="e1", owner_id="bob") == ["t2"]
        assert found(function_id="f2", after="t2", limit=1) == ["t3"]
        assert all(task.payload is None for task in records.tasks.find_open_tasks(function_id="f1"))

    def test_tasks_in_answers_have_no_callees(self, records: Records) -> None:
        """Five hundred tasks with a thousand each would take more memory than there is."""
        mentions = TaskOptions(resource_specification={"callees": [["f2"]]}, max_attempts=2)
        calls = msgspec.structs.replace(mentions, callees=(Callee("f1", "h1", 2, UV), Callee("f2", "h2")))
        only = TaskOptions(callees=(Callee("f1", "h1"),))
        given = {"t1": calls, "t2": mentions, "t3": only, "t4": TaskOptions()}
        records.tasks.add_tasks([make_task(task_id, options=options) for task_id, options in given.items()])
        records.tasks.record_results([make_task_result("t1")], at=at(1))

        found = records.tasks.get_tasks([*given, "t9"], for_answers=True)

        options = {task_id: task.options for task_id, task in found.items()}
        assert options == {"t1": mentions, "t2": mentions, "t3": TaskOptions(), "t4": TaskOptions()}
        whole = records.tasks.get_tasks(["t1"])["t1"]
        assert found["t1"] == msgspec.structs.replace(whole, payload=None, options=mentions)
        assert whole.options == calls

    def test_open_tasks_that_may_call_a_function_are_found(self, records: Records) -> None:
        calls = TaskOptions(callees=(Callee("f1", "h1", 2), Callee("f2", "h2", environment=UV)))
        mentions = TaskOptions(resource_specification={"callees": [["f2"]], "f2": "f2"})
        records.tasks.add_tasks(
            [
                make_task("t1", function_id="f2", options=calls),
                make_task("t2", function_id="f3", options=calls),
                make_task("t3", function_id="f2"),
                make_task("t4", function_id="f3", options=mentions),
                make_task("t5", function_id="f3", options=calls),
                make_task("t6", function_id="f3", options=calls, endpoint_id="e2"),
            ]
        )
        records.tasks.record_results([make_task_result("t5")], at=at(1))

        def found(**wanted: Any) -> list[str]:
            return [task.task_id for task in records.tasks.find_open_tasks(**wanted)]

        assert found(function_id="f2") == ["t1", "t2", "t3", "t6"]
        assert found(function_id="f2", limit=2) == ["t1", "t2"]
        assert found(function_id="f2", after="t2") == ["t3", "t6"]
        assert found(function_id="f2", endpoint_id="e2") == ["t6"]
        assert found(function_id="f1") == ["t1", "t2", "t6"]
        assert found(function_id="f") == []
        [task] = records.tasks.find_open_tasks(function_id="f1", limit=1, with_options=True)
        assert task.options == calls
        lists = (
            records.tasks.find_open_tasks(function_id="f1"),
            records.tasks.list_tasks("alice"),
            records.tasks.get_group("g1"),
        )
        assert {each.options for found in lists for each in found} == {TaskOptions()}  # they may be long

    def test_endpoints_with_certain_functions_only_are_found(self, records: Records) -> None:
        for name, allowed in (("e1", None), ("e2", []), ("e3", ["f1"])):
            records.endpoints.put_endpoint(Endpoint(name, "alice", name, allowed_functions=allowed))
        assert records.endpoints.find_restricted(["e1", "e2", "e3", "e4"]) == {"e2", "e3"}

    def test_withdrawals_are_listed_until_they_are_carried_out(self, records: Records) -> None:
        later = Withdrawal("e1", "alice", ["alice", "al"], at(2), ends_sessions=True)
        earlier = Withdrawal("f1", "bob", ["bob"], at(1), cancels_tasks=False)
        for each in (later, earlier):
            records.endpoints.put_withdrawal(each)
        assert records.endpoints.list_withdrawals() == [earlier, later]
        assert records.endpoints.list_withdrawals(limit=1) == [earlier]

        # What the former one is to do is still to be done.
        newer = dataclasses.replace(later, at=at(3), cancels_tasks=False, ends_sessions=False)
        records.endpoints.put_withdrawal(newer)
        records.endpoints.delete_withdrawal(later)
        records.endpoints.note_ended_sessions(later)
        kept = dataclasses.replace(newer, cancels_tasks=True, ends_sessions=True)
        assert records.endpoints.list_withdrawals() == [earlier, kept]
        records.endpoints.note_ended_sessions(kept)
        assert records.endpoints.list_withdrawals() == [earlier, dataclasses.replace(kept, ends_sessions=False)]
        records.endpoints.delete_withdrawal(kept)
        assert records.endpoints.list_withdrawals() == [earlier]

    def test_withdrawals_of_one_identity_do_not_hide_those_of_another(self, records: Records) -> None:
        own = [Withdrawal(f"e{number}", "alice", ["alice"], at(number)) for number in range(4)]
        theirs = [Withdrawal(f"f{number}", "bob", ["bob"], at(10 + number)) for number in range(2)]
        for each in (*own, *theirs):
            records.endpoints.put_withdrawal(each)

        assert records.endpoints.list_withdrawals() == [own[0], theirs[0], own[1], theirs[1], *own[2:]]
        assert records.endpoints.list_withdrawals(limit=2) == [own[0], theirs[0]]

    def test_endpoints_with_open_tasks_are_listed(self, records: Records) -> None:
        assert records.tasks.list_endpoints_with_open_tasks() == []
        records.tasks.add_tasks(
            [
                make_task("t1", endpoint_id="e1"),
                make_task("t2", endpoint_id="e2"),
                make_task("t3", endpoint_id="e3"),
                make_task("t4", endpoint_id="e0"),
                make_task("t5", endpoint_id="e1"),
            ]
        )
        records.tasks.record_results([make_task_result("t3", endpoint_id="e3")], at=at(1))
        assert records.tasks.list_endpoints_with_open_tasks() == ["e0", "e1", "e2"]

    def test_open_tasks_are_listed_in_transaction_order(self, records: Records) -> None:
        began = records.tasks.first_unfinished_transaction()
        records.tasks.add_tasks([make_task("t9", submitted_at=at(9)), make_task("t7", endpoint_id="e2")])
        between = records.tasks.first_unfinished_transaction()
        records.tasks.add_tasks([make_task("t1", submitted_at=at(-9)), make_task("t2")])
        records.tasks.record_results([make_task_result("t2")], at=at(1))

        found = records.tasks.list_open_ids()

        assert [(task.task_id, task.endpoint_id) for task in found] == [("t7", "e2"), ("t9", "e1"), ("t1", "e1")]
        assert [task.submitted_at for task in found[1:]] == [at(9), at(-9)]
        assert began <= found[0].added_in == found[1].added_in < between <= found[2].added_in
        assert found[2].added_in < records.tasks.first_unfinished_transaction()
        assert [task.task_id for task in records.tasks.list_open_ids(after=(found[0].added_in, "t7"), limit=1)] == [
            "t9"
        ]
        assert records.tasks.list_open_ids(after=(found[2].added_in, "t1")) == []

    def test_lock_has_one_holder_until_released(self, records: Records) -> None:
        assert records.database.try_lock("clean", ttl_s=60)
        assert not records.database.try_lock("clean", ttl_s=60)
        assert records.database.try_lock("paint", ttl_s=0)
        assert records.database.try_lock("paint", ttl_s=0)
        records.database.unlock("clean")
        assert records.database.try_lock("clean", ttl_s=60)

    # transitions

    def test_each_task_transition_leaves_an_event(self, records: Records) -> None:
        records.tasks.add_tasks([make_task()])
        dispatched = transition("t1", TaskState.WAITING_FOR_NODES, 1, detail={"forwarder": "w1", "odd": "\x00"})
        assert records.tasks.record_transitions([dispatched, transition("t1", TaskState.RUNNING, 1)]) == ["t1"]
        task = records.tasks.get_tasks(["t1"])["t1"]
        assert (task.state, task.attempt) == (TaskState.RUNNING, 1)
        assert records.tasks.list_events("t1")[1:] == [dispatched, transition("t1", TaskState.RUNNING, 1)]

    def test_backward_and_stale_transitions_are_ignored(self, records: Records) -> None:
        records.tasks.add_tasks([make_task()])
        records.tasks.record_transitions(
            [transition("t1", TaskState.RUNNING, 1), transition("t1", TaskState.WAITING_FOR_NODES, 2)]
        )
        assert records.tasks.record_transitions([transition("t1", TaskState.RUNNING, 1)]) == []
        task = records.tasks.get_tasks(["t1"])["t1"]
        assert (task.state, task.attempt) == (TaskState.WAITING_FOR_NODES, 2)
        assert len(records.tasks.list_events("t1")) == 4

    def test_a_report_without_an_attempt_is_about_the_task(self, records: Records) -> None:
        records.tasks.add_tasks([make_task()])
        records.tasks.record_transitions([transition("t1", TaskState.WAITING_FOR_NODES, 1)])
        records.tasks.record_transitions([transition("t1", TaskState.WAITING_FOR_EP, reporter=Reporter.RECONCILER)])
        task = records.tasks.get_tasks(["t1"])["t1"]
        assert (task.state, task.attempt) == (TaskState.WAITING_FOR_EP, 1)

    def test_permit_of_an_attempt_is_given_once(self, records: Records) -> None:
        records.tasks.add_tasks([make_task("t1", idempotent=False), make_task("t2")])
        both = [transition("t1", TaskState.WAITING_FOR_NODES, 1), transition("t2", TaskState.WAITING_FOR_NODES, 1)]
        assert sorted(records.tasks.record_transitions(both)) == ["t1", "t2"]
        assert records.tasks.record_transitions(both) == []
        assert records.tasks.record_transitions([transition("t2", TaskState.WAITING_FOR_NODES, 2)]) == ["t2"]

    def test_ended_task_has_no_permit_and_no_transition(self, records: Records) -> None:
        records.tasks.add_tasks([make_task()])
        records.tasks.record_results([make_task_result()], at=at(1))
        assert records.tasks.record_transitions([transition("t1", TaskState.WAITING_FOR_NODES, 2)]) == []
        task = records.tasks.get_tasks(["t1"])["t1"]
        assert (task.state, task.attempt) == (TaskState.SUCCESS, 1)
        assert len(records.tasks.list_events("t1")) == 3

    def test_an_agent_cannot_fill_the_history(self, records: Records) -> None:
        records.tasks.add_tasks([make_task("t1"), make_task("t2")])
        states = [TaskState.RUNNING, TaskState.WAITING_FOR_LAUNCH] * (MAX_TRANSITIONS // 2 + 10)
        reports = [transition("t1", state, 1) for state in states]
        records.tasks.record_transitions([*reports, transition("t2", TaskState.RUNNING, 1)])
        for state in states[:5]:
            records.tasks.record_transitions([transition("t1", state, 1)])
        assert len(records.tasks.list_events("t1")) == 1 + MAX_TRANSITIONS
        assert len(records.tasks.list_events("t2")) == 2
        # Those of another attempt, and of other reporters, are recorded.
        later = [transition("t1", TaskState.WAITING_FOR_NODES, 2), transition("t1", TaskState.RUNNING, 2)]
        assert records.tasks.record_transitions(later) == ["t1"]
        assert records.tasks.list_events("t1")[-2:] == later
        assert records.tasks.get_tasks(["t1"])["t1"].state is TaskState.RUNNING

    def test_history_is_read_in_pages(self, records: Records) -> None:
        records.tasks.add_tasks([make_task()])
        records.tasks.record_transitions([transition("t1", TaskState.RUNNING, attempt) for attempt in range(1, 6)])
        whole = records.tasks.list_events("t1")
        assert [event.attempt for event in whole] == [0, 1, 2, 3, 4, 5]
        assert records.tasks.list_events("t1", limit=2) == whole[:2]
        assert records.tasks.list_events("t1", after=2, limit=3) == whole[2:5]
        assert records.tasks.list_events("t1", after=6) == []

    def test_events_of_unknown_tasks_are_dropped(self, records: Records) -> None:
        assert records.tasks.record_transitions([transition("unknown", TaskState.RUNNING, 1)]) == []
        assert records.tasks.list_events("unknown") == []
        assert records.tasks.record_transitions([]) == []

    def test_transition_must_be_allowed_for_its_reporter(self, records: Records) -> None:
        records.tasks.add_tasks([make_task()])
        with pytest.raises(InvalidRequest):
            records.tasks.record_transitions([transition("t1", TaskState.RUNNING, 1, reporter=Reporter.API)])
        with pytest.raises(InvalidRequest):
            records.tasks.record_transitions([transition("t1", TaskState.SUCCESS, 1)])
        assert len(records.tasks.list_events("t1")) == 1

    # results

    def test_a_success_is_kept_with_its_result(self, records: Records) -> None:
        records.tasks.add_tasks([make_task(timings={"submitted_at": 1.0})])
        end = make_task_result(details={"os": "linux"}, timings={"started_at": 2.0})
        first = records.tasks.record_results([end], at=at(7))
        assert first == {"t1": msgspec.structs.replace(end, task_group_id="g1", owner_id="alice")}
        assert records.tasks.get_tasks(["t1"])["t1"] == make_task(
            state=TaskState.SUCCESS,
            attempt=1,
            result=b"\x00result\xff",
            details={"os": "linux"},
            finished_at=at(7),
            timings={"submitted_at": 1.0, "started_at": 2.0, "recorded_at": at(7).timestamp()},
        )
        last = records.tasks.list_events("t1")[-1]
        assert (last.state, last.reporter, last.at, last.attempt) == (TaskState.SUCCESS, Reporter.AGENT, at(7), 1)

    def test_a_failure_is_kept_with_its_error(self, records: Records) -> None:
        records.tasks.add_tasks([make_task(details={"kept": 1})])
        error = ErrorRecord(
            "TASK_FAILED", "boom", fault=Fault.USER_CODE, traceback="line\x00\n", stderr_tail="ü", attempt=2
        )
        records.tasks.record_results(
            [make_task_result(state=TaskState.FAILED, result=None, error=error, attempt=2)], at=at(1)
        )
        task = records.tasks.get_tasks(["t1"])["t1"]
        assert (task.state, task.error, task.attempt, task.details) == (TaskState.FAILED, error, 2, {"kept": 1})
        assert records.tasks.list_events("t1")[-1].detail == {"code": "TASK_FAILED"}

    def test_large_result_is_stored_as_a_reference(self, records: Records) -> None:
        records.tasks.add_tasks([make_task()])
        ref = BlobRef("alice/def", 99, "def")
        records.tasks.record_results([make_task_result(result=None, result_ref=ref)], at=at(1))
        assert records.tasks.get_tasks(["t1"])["t1"].result_ref == ref

    def test_first_result_wins(self, records: Records) -> None:
        records.tasks.add_tasks([make_task("t1"), make_task("t2")])
        lost = make_task_result(
            state=TaskState.LOST, reporter=Reporter.FORWARDER, result=None, error=ErrorRecord("X", "gone")
        )
        assert set(records.tasks.record_results([make_task_result("t1"), lost], at=at(1))) == {"t1"}
        assert set(records.tasks.record_results([lost, make_task_result("t1"), make_task_result("t2")], at=at(2))) == {
            "t2"
        }
        task = records.tasks.get_tasks(["t1"])["t1"]
        assert (task.state, task.finished_at, task.error) == (TaskState.SUCCESS, at(1), None)
        assert len(records.tasks.list_events("t1")) == 2

    def test_task_is_ended_by_its_endpoint_only(self, records: Records) -> None:
        records.tasks.add_tasks([make_task()])
        assert (
            records.tasks.record_results([make_task_result(endpoint_id="e2"), make_task_result("unknown")], at=at(1))
            == {}
        )
        assert not records.tasks.get_tasks(["t1"])["t1"].state.is_terminal

    def test_first_result_of_the_endpoint_counts_in_a_batch(self, records: Records) -> None:
        records.tasks.add_tasks([make_task()])
        words = [
            make_task_result(endpoint_id="e9", result=b"another's"),
            make_task_result(result=b"first"),
            make_task_result(result=b"second"),
            make_task_result("unknown"),
        ]
        assert set(records.tasks.record_results(words, at=at(1))) == {"t1"}
        assert records.tasks.get_tasks(["t1"])["t1"].result == b"first"
        assert records.tasks.record_results([], at=at(2)) == {}
        assert len(records.tasks.list_events("t1")) == 2

    def test_result_must_be_terminal_and_allowed_for_its_reporter(self, records: Records) -> None:
        records.tasks.add_tasks([make_task()])
        with pytest.raises(InvalidRequest):
            records.tasks.record_results([make_task_result(state=TaskState.RUNNING)], at=at(1))
        with pytest.raises(InvalidRequest):
            records.tasks.record_results([make_task_result(state=TaskState.LOST, reporter=Reporter.API)], at=at(1))
        assert records.tasks.record_results([], at=at(1)) == {}
        assert records.tasks.get_tasks(["t1"])["t1"].state is TaskState.RECEIVED

    def test_a_closed_store_is_unavailable(self, records: Records) -> None:
        records.database.ping()
        records.close()
        with pytest.raises(Unavailable):
            records.database.ping()

    def test_limits_of_submitters_last_as_long_as_their_endpoint(self, records: Records) -> None:
        endpoints = records.endpoints
        endpoints.put_running_limit("e1", "bob", RunningLimit(1))  # no such endpoint
        endpoints.put_endpoint(Endpoint("e1", "alice", "one"))
        assert endpoints.find_running_limits(["e1", "e2"]) == {"e1": {}, "e2": {}}
        endpoints.put_running_limit("e1", "bob", RunningLimit(max_running=1))
        endpoints.put_running_limit("e1", "bob", RunningLimit(max_running=2, weight=3))
        endpoints.put_running_limit("e1", "carol", RunningLimit(weight=2))
        assert endpoints.find_running_limits(["e1"]) == {
            "e1": {"bob": RunningLimit(2, 3), "carol": RunningLimit(None, 2)}
        }
        endpoints.put_running_limit("e1", "bob", RunningLimit())
        assert endpoints.find_running_limits(["e1"]) == {"e1": {"carol": RunningLimit(None, 2)}}
        endpoints.delete_endpoint("e1")
        endpoints.put_endpoint(Endpoint("e1", "alice", "one"))
        assert endpoints.find_running_limits(["e1"]) == {"e1": {}}


class TestFakeDatabase(RecordsSuite):
    @pytest.fixture
    def records(self) -> Records:
        return FakeDatabase().records

    def test_database_can_be_unavailable(self) -> None:
        database = FakeDatabase()
        database.reachable = False
        with pytest.raises(Unavailable):
            database.get_tasks(["t1"])
        database.reachable = True
        assert database.get_tasks(["t1"]) == {}
