"""Files in calls of the SDK, at a fake cloud: what travels, what is refused before, and what a test can look at."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from farcall import (
    Client,
    EndpointUnknown,
    Executor,
    File,
    Graph,
    InvalidRequest,
    PayloadTooLarge,
    TaskError,
    TaskFailed,
)
from farcall._client import info_of
from farcall._functions import pack_call
from farcall.testing import FakeCloud
from farcall_common.file_arguments import has_files, without_files
from farcall_common.limits import MAX_FILES
from farcall_common.payload import Serializer
from farcall_common.payload.data import FILE_KEY, JSONData, writers
from farcall_common.staged_files import unpack_files
from farcall_common.staging import Staging
from farcall_common.task_options import source_file
from tests.unit.sdk_cli_runner import Farcall
from tests.waiting import WAIT_S

SCAN = "s3://lab/raw/scan7.txt"
MASK = "s3://lab/out/mask.txt"


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud(files={SCAN: b"5 7"}) as started:
        yield started


@pytest.fixture
def executor(cloud: FakeCloud) -> Iterator[Executor]:
    with Executor(cloud.endpoint_id, client=cloud.client()) as started:
        yield started


def double(scan: Any, out: Any) -> Any:
    """Writes twice the numbers of a file."""
    with scan.open() as source, out.open() as target:
        target.write(" ".join(str(2 * int(word)) for word in source.read().split()))
    return out


def total(scan: Any) -> int:
    with scan.open() as source:
        return sum(map(int, source.read().split()))


def length(data: Any) -> int:
    return len(data)


def test_outputs_are_in_the_cloud_afterwards(cloud: FakeCloud, executor: Executor) -> None:
    mask = executor.submit(double, File(SCAN), out=File(MASK)).result(WAIT_S)
    assert (mask, cloud.files[MASK]) == (File(MASK), b"10 14")
    assert executor.submit(total, mask).result(WAIT_S) == 24


def test_future_of_a_file_is_an_argument(cloud: FakeCloud, executor: Executor) -> None:
    mask: Future[Any] = executor.submit(double, File(SCAN), out=File(MASK))
    assert executor.submit(total, mask).result(WAIT_S) == 24


def test_files_of_a_graph(cloud: FakeCloud, executor: Executor) -> None:
    graph = Graph()
    mask = graph.call(double, File(SCAN), out=File(MASK))
    assert executor.submit(graph, graph.call(total, mask)).result(WAIT_S) == 24
    assert cloud.files[MASK] == b"10 14"
    other = graph.call(total, File("s3://lab/typo"))
    with pytest.raises(TaskError, match="does not exist"):
        executor.submit(graph, [mask, other]).result(WAIT_S)


def test_local_files_are_those_of_this_machine(executor: Executor, tmp_path: Path) -> None:
    scan, mask = tmp_path / "my scan.txt", tmp_path / "new" / "mask.txt"
    scan.write_text("1")
    executor.submit(double, File(scan.as_uri()), out=File(mask.as_uri())).result(WAIT_S)
    assert mask.read_text() == "2"


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (File("s3://lab/typo"), "FILE_NOT_FOUND"),
        (File("file:///no/such/file"), "FILE_NOT_FOUND"),
        (File(SCAN, size_bytes=4), "FILE_CHANGED"),
        (File(SCAN, sha256="0" * 64), "FILE_CHECKSUM"),
    ],
)
def test_input_that_is_not_as_expected_fails_the_call(executor: Executor, file: File, code: str) -> None:
    future = executor.options(retries=2).submit(total, file)
    with pytest.raises(TaskError) as caught:
        future.result(WAIT_S)
    assert (caught.value.record.code, caught.value.record.retries_used) == (code, None)


def test_missing_file_of_a_fake_cloud_has_a_hint(executor: Executor) -> None:
    with pytest.raises(TaskError) as caught:
        executor.submit(total, File("s3://lab/typo")).result(WAIT_S)
    assert "FakeCloud(files=...)" in caught.value.record.hint
    assert "out=File(...)" in caught.value.record.hint


def test_input_as_expected(executor: Executor) -> None:
    file = File(SCAN, size_bytes=3, sha256=hashlib.sha256(b"5 7").hexdigest())
    assert executor.submit(total, file).result(WAIT_S) == 12


def test_output_that_was_not_written_fails_the_call(cloud: FakeCloud, executor: Executor) -> None:
    def nothing(out: Any) -> None:
        pass

    with pytest.raises(TaskError) as caught:
        executor.submit(nothing, out=File(MASK)).result(WAIT_S)
    assert caught.value.record.code == "FILE_NOT_WRITTEN"
    assert MASK not in cloud.files


def test_list_is_in_front_of_the_call() -> None:
    plain = pack_call((1, "a"), {}, function_name="f")
    assert not has_files(plain.payload)
    packed = pack_call((File(SCAN),), {"out": File(MASK)}, function_name="f")
    found, rest = unpack_files(packed.payload)
    assert [(use.url, use.mode) for use in found] == [(SCAN, "r"), (MASK, "w")]
    assert Serializer().unpack_call(rest) == ((File(SCAN),), {"out": File(MASK, "w")})
    assert packed.requirements is not None
    assert packed.requirements.files == found


def test_equal_calls_have_equal_payloads() -> None:
    """Memoization compares them."""
    first, second = (pack_call(([File(SCAN)],), {"out": File(MASK)}, function_name="f").payload for _ in range(2))
    assert first == second
    assert bytes(without_files(first)) == bytes(without_files(second))


def test_too_many_files_are_refused() -> None:
    files = [File(f"s3://lab/{number}") for number in range(MAX_FILES + 1)]
    with pytest.raises(InvalidRequest, match="at most"):
        pack_call((files,), {}, function_name="f")


def test_list_counts_for_the_limit_of_a_payload() -> None:
    import secrets

    files = [File(f"s3://lab/{secrets.token_hex(900)}") for _ in range(4_000)]
    with pytest.raises(PayloadTooLarge, match="of it the list of 4,000 files"):
        pack_call((files,), {}, function_name="f")


def test_batch_with_files(cloud: FakeCloud) -> None:
    client = cloud.client()
    batch = client.create_batch()
    function_id = client.register_function(total)
    task_id = batch.add(function_id, (File(SCAN),))
    client.batch_run(cloud.endpoint_id, batch)
    assert client.get_result(task_id, wait_s=WAIT_S) == 12


def test_task_shows_the_files_that_were_copied(cloud: FakeCloud, executor: Executor) -> None:
    future = executor.submit(double, File(SCAN), out=File(MASK))
    future.result(WAIT_S)
    with cloud.client() as client:
        info = client.get_batch_result([future.task_id])[future.task_id]
    assert [(each.url, each.mode, each.size_bytes) for each in info.files] == [(SCAN, "r", 3), (MASK, "w", 5)]
    assert info.staging is None
    assert ">2</td>" in info._repr_html_()
    lines = Farcall(cloud).lines("tasks", "show", future.task_id)
    assert [line[:3] for line in lines if line[0] in (SCAN, MASK)] == [[SCAN, "r", "3 bytes"], [MASK, "w", "5 bytes"]]


def test_files_that_move_are_shown_meanwhile() -> None:
    staging = Staging("staging-in", 10, 3, 1_200_000_000, 4_000_000_000, SCAN)
    words = f"3 of 10 files in, 1.2 of 4.0 GB: {SCAN}"
    with FakeCloud(workers=0) as cloud, cloud.client() as client:
        batch = client.create_batch()
        task_id = batch.add(client.register_function(length), ("abc",))
        client.batch_run(cloud.endpoint_id, batch)
        cloud.report_staging(task_id, staging)
        info = info_of(client, task_id)
        assert (info.staging, words in info._repr_html_()) == (staging, True)
        command = Farcall(cloud)
        assert ["staging", words] in command.lines("tasks", "show", task_id)
        command.pause = lambda _: cloud.run_waiting()
        watched = command("tasks", "watch", task_id).stdout.splitlines()
        assert [line.split("\t")[1:] for line in watched] == [["received", words], ["success", ""]]


def test_watch_in_json_has_files_that_move() -> None:
    with FakeCloud(workers=0) as cloud, cloud.client() as client:
        batch = client.create_batch()
        task_id = batch.add(client.register_function(length), ("abc",))
        client.batch_run(cloud.endpoint_id, batch)
        cloud.report_staging(task_id, Staging("staging-in", 1, url=SCAN))
        command = Farcall(cloud)
        command.pause = lambda _: cloud.run_waiting()
        first, last = map(json.loads, command("tasks", "watch", task_id, "--json").stdout.splitlines())
        assert (first["staging"]["url"], "staging" in last) == (SCAN, False)


def test_file_without_a_task_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"must be in an object store first .* or be read and passed as bytes"):
        File("data.csv")


# -- files of other endpoints ------------------------------------------------------------------------------------------

LAB = "00000000-0000-4000-8000-00000000000a"
HOME = "00000000-0000-4000-8000-00000000000b"


class Submitted(httpx.BaseTransport):
    """The transport of a cloud, which keeps the bodies of submits."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self._inner = inner
        self.sources: list[tuple[str, ...]] = []
        self.files: list[tuple[str, ...]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/submit"):
            body = json.loads(request.content)
            self.sources.append(tuple(body.get("sources", ())))
            self.files.append(tuple(body.get("source_files", ())))
        return self._inner.handle_request(request)


def test_names_of_endpoints_become_ids_in_arguments_and_list() -> None:
    ids = {"lab": LAB, "my lab": LAB}
    args = ([File("endpoint://lab/a"), File(f"endpoint://{HOME}/b")], {"c": File("endpoint://my%20lab/a%20b")})
    packed = pack_call(args, {}, function_name="f", endpoint_id=lambda name: ids.get(name, name))
    listed, rest = unpack_files(packed.payload)
    urls = [f"endpoint://{LAB}/a", f"endpoint://{HOME}/b", f"endpoint://{LAB}/a%20b"]
    assert [each.url for each in listed] == urls
    (first, second), named = Serializer().unpack_call(rest)[0]
    assert [first.url, second.url, named["c"].url] == urls
    assert packed.requirements is not None
    assert packed.requirements.sources == (LAB, HOME)
    assert packed.requirements.source_files == tuple(
        source_file(*each) for each in ((LAB, "/a"), (HOME, "/b"), (LAB, "/a b"))
    )
    assert args[0][0].url == "endpoint://lab/a"


def test_an_unknown_endpoint_is_refused_with_its_name() -> None:
    def find(name: str) -> str:
        raise EndpointUnknown(f"there is no endpoint named {name!r}")

    with pytest.raises(EndpointUnknown, match="'typo'"):
        pack_call((File("endpoint://typo/a"),), {}, function_name="f", endpoint_id=find)


def test_names_of_endpoints_are_those_of_files_in_a_fake_cloud() -> None:
    files = {"endpoint://instrument/data/f": b"1 2", "endpoint://my%20lab/a%20b": b"3", f"endpoint://{LAB}/a": b"4"}
    with FakeCloud(files=files) as cloud, cloud.client() as client:
        with Executor(client=client) as executor:  # the only endpoint of the user is still the own one
            results = list(executor.map(total, map(File, (*files, "endpoint://my%20lab/a b")), timeout=WAIT_S))
            assert results == [3, 3, 4, 3]
            cloud.files["endpoint://later/a"] = b"5"
            assert executor.submit(total, File("endpoint://later/a")).result(WAIT_S) == 5
            with pytest.raises(TaskFailed) as caught:
                executor.submit(total, File("endpoint://instrument/data/g")).result(WAIT_S)
            assert caught.value.record.code == "FILE_NOT_FOUND"
            with pytest.raises(EndpointUnknown, match="'instrumnt'") as unknown:
                executor.submit(total, File("endpoint://instrumnt/data/f")).result(WAIT_S)
            assert "instrument" in unknown.value.record.hint
        assert client.find_endpoint("instrument") != cloud.endpoint_id


def test_files_of_too_many_endpoints_are_refused() -> None:
    files = [File(f"endpoint://00000000-0000-4000-8000-0000000000{number:02}/a") for number in range(21)]
    with pytest.raises(InvalidRequest, match="21 endpoints"):
        pack_call((files,), {}, function_name="f")


def test_few_tasks_share_their_files_of_other_endpoints_in_a_request() -> None:
    files = {f"endpoint://{LAB}/{number}": b"1" for number in range(120)}
    with FakeCloud(files=files) as cloud:
        submitted = Submitted(cloud.transport)
        client = Client("https://farcall.test", cloud.token, transport=submitted)
        with Executor(cloud.endpoint_id, client=client) as executor:
            assert list(executor.map(total, map(File, files), timeout=WAIT_S)) == [1] * 120
        assert sum(map(len, submitted.files)) == 120
        assert max(map(len, submitted.files)) <= 50
        with pytest.raises(InvalidRequest, match="1,001 files of other endpoints"):
            pack_call(([File(f"endpoint://{LAB}/{number}") for number in range(1001)],), {}, function_name="f")


def test_a_request_has_the_sources_of_its_tasks_and_no_others() -> None:
    files = {f"endpoint://{each}/a": b"1 2" for each in (LAB, HOME)}
    with FakeCloud(files=files) as cloud:
        submitted = Submitted(cloud.transport)
        client = Client("https://farcall.test", cloud.token, transport=submitted)
        with Executor(cloud.endpoint_id, client=client) as executor:
            assert executor.submit(length, "abc").result(WAIT_S) == 3
            assert submitted.sources == [()]
            futures = [executor.submit(total, File(url)) for url in (*files, *files)]
            graph = Graph()
            futures.append(executor.submit(graph, graph.call(total, File(f"endpoint://{LAB}/a"))))
            assert [each.result(WAIT_S) for each in futures] == [3] * 5
        assert {each for some in submitted.sources[1:] for each in some} == {LAB, HOME}
        assert {each for some in submitted.files[1:] for each in some} == {
            source_file(each, "/a") for each in (LAB, HOME)
        }
        batch = client.create_batch()
        function_id = client.register_function(total)
        for url in files:
            batch.add(function_id, (File(url),))
        client.batch_run(cloud.endpoint_id, batch)
        assert submitted.sources[-1] == (LAB, HOME)
        assert batch.prepare()["sources"] == (LAB, HOME)


# -- results of endpoints that are not trusted -------------------------------------------------------------------------

KEY = "endpoint://11111111-2222-4333-8444-555555555555/home/me/.ssh/id_rsa"
READER = "99999999-2222-4333-8444-555555555555"


def returned(url: str) -> Any:
    """A file that an endpoint has returned as JSON."""
    writers.endpoint_ids = (READER,)
    try:
        return JSONData().load(json.dumps({FILE_KEY: [url, "r", None, None]}).encode())
    finally:
        writers.endpoint_ids = None


def test_an_endpoint_cannot_name_the_files_of_another_one_in_a_result() -> None:
    for file in (returned(KEY), pickle.loads(pickle.dumps(returned(KEY)))):
        with pytest.raises(InvalidRequest, match="another endpoint has named it"):
            pack_call((file,), {}, function_name="print", endpoint_id=str, target=READER)


def test_a_file_of_the_endpoint_that_returned_it_goes_to_the_next_call() -> None:
    for file in (returned(f"endpoint://{READER}/data/a"), returned("s3://lab/a"), File(returned(KEY).url)):
        packed = pack_call((file,), {}, function_name="print", endpoint_id=str, target=READER)
        assert packed.requirements is not None
