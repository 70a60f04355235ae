"""Files of other endpoints (``endpoint://``) as arguments, through the whole system."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import farcall
from farcall import File
from farcall_common.errors import TaskFailed
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from farcall_local.tier import LocalTier
from tests.waiting import WAIT_S, wait_until

SIZE = 30_000_000
#: No server listens here, and HTTP goes through it; but not to the API, by that name.
WALL = {"HTTP_PROXY": "http://127.0.0.1:1", "http_proxy": "http://127.0.0.1:1", "NO_PROXY": "localhost"}


def digest(source: File) -> tuple[int, str]:
    with source.open("rb") as file:
        data = file.read()
    return len(data), hashlib.sha256(data).hexdigest()


def write_shared(text: str) -> str:
    """A file in the directory that the submitter's tasks share."""
    import farcall

    path = farcall.current().shared_dir / "mine.txt"
    path.write_text(text)
    return str(path)


def of(data: bytes) -> tuple[int, str]:
    return len(data), hashlib.sha256(data).hexdigest()


def code_of(future: farcall.ComputeFuture[Any]) -> str:
    with pytest.raises(TaskFailed) as caught:
        future.result(WAIT_S)
    return caught.value.record.code


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, bytes]:
    path, data = tmp_path / "large data.bin", os.urandom(SIZE)
    path.write_bytes(data)
    return path, data


@pytest.mark.smoke
def test_a_task_reads_a_large_file_of_another_endpoint(
    executor: farcall.Executor, own_endpoint: Callable[..., LocalEndpoint], large: tuple[Path, bytes]
) -> None:
    source = own_endpoint("instrument")
    path, data = large
    quoted = path.as_uri().removeprefix("file://")
    assert executor.submit(digest, File(f"endpoint://instrument{quoted}")).result(WAIT_S) == of(data)
    future = executor.submit(digest, File(f"endpoint://{source.endpoint_id}{quoted}"))
    assert future.result(WAIT_S) == of(data)
    assert [each["cached"] for each in future.details["files"]] == [True]
    assert code_of(executor.submit(digest, File(f"endpoint://instrument{path}.missing"))) == "FILE_NOT_FOUND"
    assert code_of(executor.submit(digest, File(f"endpoint://instrument{path.parent}"))) == "FILE_UNSUPPORTED"


def test_an_endpoint_that_is_off_is_waited_for(
    client: farcall.Client,
    executor: farcall.Executor,
    own_endpoint: Callable[..., LocalEndpoint],
    large: tuple[Path, bytes],
) -> None:
    source = own_endpoint()
    path, data = large
    source.stop()
    future = executor.submit(digest, File(f"endpoint://{source.endpoint_id}{path}"))
    wait_until(lambda: "not connected" in str(future.why()), "why says that the endpoint is off")
    assert not future.done()
    source.start()
    assert future.result(WAIT_S) == of(data)


def test_another_user_reads_what_is_theirs_only(
    client: farcall.Client,
    other_client: farcall.Client,
    own_endpoint: Callable[..., LocalEndpoint],
    large: tuple[Path, bytes],
) -> None:
    source, reader = own_endpoint("lab"), own_endpoint("home", user="grace")
    path, _ = large
    url = f"endpoint://{source.endpoint_id}"
    grace = other_client.whoami()["identity_id"]
    with farcall.Executor(reader.endpoint_id, client=other_client) as executor:
        with pytest.raises(farcall.FarcallError) as caught:
            executor.submit(digest, File(f"{url}{path}")).result(WAIT_S)
        assert caught.value.record.code == "FORBIDDEN"
        client.share_endpoint(source.endpoint_id, grace, "use")
        with farcall.Executor(source.endpoint_id, client=other_client) as at_source:
            own = at_source.submit(write_shared, "grace's").result(WAIT_S)
        assert executor.submit(digest, File(f"{url}{own}")).result(WAIT_S) == of(b"grace's")
        assert code_of(executor.submit(digest, File(f"{url}{path}"))) == "FILE_DENIED"
        assert code_of(executor.submit(digest, File(f"{url}/etc/hostname"))) == "FILE_DENIED"
        # The right is withdrawn while the task waits for the endpoint.
        source.stop()
        waiting = executor.submit(digest, File(f"{url}{own}.2"))
        wait_until(lambda: "not connected" in str(waiting.why()), "why says that the endpoint is off")
        client.unshare_endpoint(source.endpoint_id, grace)
        source.start()
        assert code_of(waiting) == "FILE_DENIED"


def put(size: int) -> Any:
    """An array that stays in the endpoint's own store."""
    import numpy

    from farcall import store

    return store.put(numpy.arange(size))


def put_in_directory(size: int) -> Any:
    import numpy

    import farcall
    from farcall import store

    store.configure(f"file://{farcall.current().shared_dir}/mine")
    return store.put(numpy.arange(size))


def total(array: Any, more: Any) -> int:
    return int(array.sum()) + sum(int(each.get().sum()) for each in more)


def test_an_object_of_one_endpoint_is_an_argument_at_another(
    cloud: Deployment,
    client: farcall.Client,
    executor: farcall.Executor,
    own_endpoint: Callable[..., LocalEndpoint],
) -> None:
    source, reader = own_endpoint("lab"), own_endpoint("home", user="grace")
    size, expected = 100_000, 100_000 * 99_999 // 2
    # To read a reference is to unpickle it.
    grace = farcall.Client(cloud.api_url, cloud.tokens["grace"], trust={source.endpoint_id})
    client.share_endpoint(source.endpoint_id, grace.whoami()["identity_id"], "use")
    for user, at in ((client, executor.endpoint_id), (grace, reader.endpoint_id)):
        with farcall.Executor(source.endpoint_id, client=user) as there, farcall.Executor(at, client=user) as here:
            first, second = (there.submit(each, size).result(WAIT_S) for each in (put, put_in_directory))
            assert first.endpoint_id == second.endpoint_id == source.endpoint_id
            future = here.submit(total, first, [second])
            assert future.result(WAIT_S) == 2 * expected
            assert len(future.details["files"]) == 2
            # At its own endpoint nothing is copied.
            at_home = there.submit(total, first, [second])
            assert at_home.result(WAIT_S) == 2 * expected
            assert "files" not in at_home.details
    grace.close()


@pytest.fixture
def walled_in(cloud: Deployment, local_tier: LocalTier, tmp_path: Path) -> Iterator[Callable[[str], LocalEndpoint]]:
    """Makes endpoints that reach the API and the forwarder, and not the blob store."""
    with ExitStack() as stack:

        def make(name: str) -> LocalEndpoint:
            environment = cloud.environment("ada") | WALL
            environment["FARCALL_API_URL"] = cloud.api_url.replace("127.0.0.1", "localhost")
            return stack.enter_context(LocalEndpoint(name, home=tmp_path, environment=environment))

        yield make


def test_where_the_blob_store_is_blocked_files_go_through_the_forwarder(
    client: farcall.Client, walled_in: Callable[[str], LocalEndpoint], large: tuple[Path, bytes]
) -> None:
    source, reader = walled_in("from"), walled_in("to")
    path, data = large
    with farcall.Executor(reader.endpoint_id, client=client) as executor:
        assert executor.submit(digest, File(f"endpoint://{source.endpoint_id}{path}")).result(WAIT_S) == of(data)
