"""Result streams: groups, cursors, history, limits."""

from __future__ import annotations

import pytest

from farcall_common.errors import ErrorRecord, LimitExceeded
from farcall_common.store.model import BlobRef, TaskResult
from farcall_common.wire import Reporter, TaskState
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.streams import Push, StreamHub

NOW = Instant(0.0, 1_800_000_000.0)


def result(task_id: str, *, group: str = "group", owner: str = "owner", body: bytes = b"result") -> TaskResult:
    return TaskResult(
        task_id,
        "endpoint",
        1,
        TaskState.SUCCESS,
        Reporter.AGENT,
        result=body,
        timings={"leased_at": 1.0},
        task_group_id=group,
        owner_id=owner,
    )


def hub(**policy: int | float) -> StreamHub:
    return StreamHub(forwarder_id="forwarder", policy=Policy(**policy))  # type: ignore[arg-type]


def publish(streams: StreamHub, *results: TaskResult) -> list[Push]:
    return list(streams.publish(results, {}, recorded_at=NOW.epoch))


def ids(pushes: list[Push] | tuple[Push, ...]) -> list[str]:
    return [result.task_id for push in pushes for result in push.message.results]


def test_results_reach_the_owners_streams_of_their_group() -> None:
    streams = hub()
    streams.open(b"1", "owner", groups=["group"], cursor=None)
    streams.open(b"2", "owner", groups=["another"], cursor=None)
    streams.open(b"3", "other client", groups=["group"], cursor=None)
    [push] = publish(streams, result("a"), result("b"))
    assert push.routing_id == b"1"
    assert push.frames == (b"result", b"result")
    assert [result.result for result in push.message.results] == [0, 1]
    assert push.message.results[0].timings == {"leased_at": 1.0, "recorded_at": NOW.epoch}


def test_there_is_no_history_for_owners_without_streams() -> None:
    streams = hub()
    assert publish(streams, result("a")) == []
    _, resumed, missed = streams.open(b"1", "owner", groups=["group"], cursor="forwarder:0")
    assert (resumed, list(missed)) == (True, [])  # this owner has no results after 0


def test_a_cursor_resumes_after_the_last_result_seen() -> None:
    streams = hub()
    streams.open(b"1", "owner", groups=["group"], cursor=None)
    [push] = publish(streams, result("a"))
    streams.close(b"1", NOW)
    publish(streams, result("b"), result("c", group="another"))
    cursor, resumed, missed = streams.open(b"2", "owner", groups=["group"], cursor=push.message.cursor)
    assert (cursor, resumed, ids(tuple(missed))) == (push.message.cursor, True, ["b"])


def test_a_cursor_that_is_too_old_does_not_resume() -> None:
    streams = hub(ring_results=2)
    cursor, _, _ = streams.open(b"1", "owner", groups=["group"], cursor=None)
    streams.close(b"1", NOW)
    publish(streams, result("a"), result("b"), result("c"))
    _, resumed, missed = streams.open(b"2", "owner", groups=["group"], cursor=cursor)
    assert (resumed, list(missed)) == (False, [])


def test_the_history_is_bounded_by_bytes() -> None:
    streams = hub(ring_bytes=1000)
    cursor, _, _ = streams.open(b"1", "owner", groups=["group"], cursor=None)
    publish(streams, result("a", body=b"x" * 2000))
    _, resumed, _ = streams.open(b"2", "owner", groups=["group"], cursor=cursor)
    assert not resumed


@pytest.mark.parametrize("cursor", [None, "", "forwarder", "forwarder:-1", "forwarder:²", "other:0", "forwarder:9" * 9])
def test_an_invalid_cursor_does_not_resume(cursor: str | None) -> None:
    assert not hub().open(b"1", "owner", groups=[], cursor=cursor)[1]


def test_the_history_expires_after_the_last_stream() -> None:
    streams = hub(ring_idle_s=60.0)
    streams.open(b"1", "owner", groups=["group"], cursor=None)
    streams.open(b"2", "owner", groups=["group"], cursor=None)
    streams.close(b"1", NOW)
    streams.expire(Instant(1000.0, 0.0))
    assert streams.watchers == {"owner"}
    streams.close(b"2", NOW)
    streams.expire(Instant(59.0, 0.0))
    assert streams.watchers == {"owner"}
    streams.expire(Instant(60.0, 0.0))
    assert streams.watchers == frozenset()


def test_messages_are_split_by_count_and_by_bytes() -> None:
    streams = hub(max_push_results=3)
    streams.open(b"1", "owner", groups=["group"], cursor=None)
    assert [len(push.message.results) for push in publish(streams, *map(result, "abcdefg"))] == [3, 3, 1]
    streams = hub(max_push_bytes=5000)
    streams.open(b"1", "owner", groups=["group"], cursor=None)
    big = [result(name, body=b"x" * 2000) for name in "abcd"]
    assert [len(push.message.results) for push in publish(streams, *big)] == [2, 2]
    error = ErrorRecord("TASK_FAILED", "boom", traceback="x" * 4000)  # errors travel in the header; they count, too
    failed = [
        TaskResult(
            name, "endpoint", 1, TaskState.FAILED, Reporter.AGENT, error=error, task_group_id="group", owner_id="owner"
        )
        for name in "ab"
    ]
    assert [len(push.message.results) for push in publish(streams, *failed)] == [1, 1]


def test_a_late_subscription_pushes_results_since_the_stream_began() -> None:
    streams = hub()
    streams.open(b"1", "owner", groups=[], cursor=None)
    publish(streams, result("a"), result("b", group="another"))
    assert ids(tuple(streams.subscribe(b"1", ["group"]))) == ["a"]
    assert ids(tuple(streams.subscribe(b"1", ["group"]))) == []


def test_a_subscription_of_a_redirected_client_is_ignored() -> None:
    assert hub().subscribe(b"1", ["group"]) == []


def test_too_many_groups_are_refused() -> None:
    streams = hub(max_groups=2)
    streams.open(b"1", "owner", groups=["a"], cursor=None)
    with pytest.raises(LimitExceeded):
        streams.subscribe(b"1", ["b", "c"])
    with pytest.raises(LimitExceeded):
        streams.open(b"2", "owner", groups=["a", "b", "c"], cursor=None)


def test_a_blob_is_pushed_with_its_url() -> None:
    streams = hub()
    streams.open(b"1", "owner", groups=["group"], cursor=None)
    ref = BlobRef("owner/hash", 5_000_000, "hash")
    big = TaskResult(
        "a", "endpoint", 1, TaskState.SUCCESS, Reporter.AGENT, result_ref=ref, task_group_id="group", owner_id="owner"
    )
    [push] = streams.publish([big], {"owner/hash": "https://there"}, recorded_at=NOW.epoch)
    blob = push.message.results[0].result_blob
    assert blob is not None
    assert (blob.url, blob.size_bytes) == ("https://there", 5_000_000)
