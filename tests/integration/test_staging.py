"""The transfer process with real servers: objects, the web, the cache, faults of all of them."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from farcall_common.staged_files import FileUse
from farcall_endpoint.files import orders
from farcall_endpoint.files.cache import Cache
from farcall_endpoint.files.movers.objects import ObjectMover, open_stores
from farcall_endpoint.files.places import files_directory
from farcall_endpoint.files.settings import Storage
from tests.certificates import Authority
from tests.support.file_servers import Answer, LargeObject, Proxy, WebServer
from tests.support.transfers import TransferProcess, transfer_process
from tests.waiting import WAIT_S, wait_until

OTHER = "00000000-0000-4000-8000-000000000001"
"""A submitter who is not the owner."""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[dict[str, str], Any]]:
    """Variables for credentials of a store of objects, and a client of it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    client.create_bucket(Bucket="lab")
    variables = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }
    yield variables, client
    server.stop()


@pytest.fixture
def web() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.close()


@pytest.fixture
def transfers(tmp_path: Path, s3: tuple[dict[str, str], Any]) -> Iterator[TransferProcess]:
    with transfer_process(tmp_path, environment=s3[0]) as process:
        process.make("t")
        yield process


def of(web: WebServer, path: str, content: bytes, **expected: Any) -> FileUse:
    """A file of a web server; ``http://`` needs a checksum."""
    if path not in web.files:
        web.files[path] = content
    return FileUse(web.url + path, **{"sha256": sha256(content), **expected})


# -- objects -----------------------------------------------------------------------------------------------------------


def test_an_object_is_copied_once_and_linked_to_each_task(transfers: TransferProcess, s3: Any) -> None:
    s3[1].put_object(Bucket="lab", Key="raw/scan 7.h5", Body=b"scan")
    use = FileUse("s3://lab/raw/scan 7.h5")
    transfers.make("u")
    first = transfers.move(use, "t", "u")
    assert first == orders.Fetched(first.number, 4, sha256(b"scan"), cached=False)
    second = transfers.move(use, "t")
    assert second.cached
    paths = [transfers.place(use, task_id) for task_id in "tu"]
    assert [path.read_bytes() for path in paths] == [b"scan", b"scan"]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o444}
    [copy] = transfers.copies()
    assert copy.stat().st_nlink == 3
    assert transfers.place(use).name == "scan 7.h5"


def test_a_large_object_comes_by_several_requests_at_a_time(transfers: TransferProcess, s3: Any) -> None:
    content = os.urandom(2**20) * 70 + b"end"
    s3[1].put_object(Bucket="lab", Key="raw/large", Body=content)
    use = FileUse("s3://lab/raw/large")
    assert transfers.move(use).sha256 == sha256(content)
    assert transfers.place(use).read_bytes() == content


def test_a_large_object_that_changes_meanwhile(tmp_path: Path, web: WebServer) -> None:
    headers = {"ETag": '"1"', "Last-Modified": MODIFIED, "Content-Length": str(64 * 2**20)}
    web.files["/lab/large"] = lambda method: (200, headers, b"") if method == "HEAD" else (412, {}, b"")
    options = {"endpoint": web.url, "access_key_id": "a", "secret_access_key": "b", "region": "x"}
    with transfer_process(tmp_path, storages=(Storage(url="s3://lab", options=options),)) as transfers:
        transfers.make("t")
        assert transfers.code(FileUse("s3://lab/large")) == "FILE_CHANGED"
        assert transfers.drafts() == []


def progress(transfers: TransferProcess) -> Iterator[orders.Progress]:
    while True:
        yield from transfers.wait_for(orders.Progress)


def test_storage_that_stalls_holds_up_no_other_file(tmp_path: Path) -> None:
    size_bytes = 64 * 2**20
    content = os.urandom(2**20) * 64
    has_ended = threading.Event()

    def stalled(_first: int, _last: int) -> Iterator[bytes]:
        yield bytes(1000)
        has_ended.wait(WAIT_S)

    def slow(first: int, _last: int) -> Iterator[bytes]:
        for _ in range(0 if first else 28):  # the last piece comes after the shortest time between two reports
            yield bytes(2**18)
            has_ended.wait(0.05)
        has_ended.wait(WAIT_S)

    bodies = {"stalled": stalled, "slow": slow, "good": lambda first, last: iter([content[first:last]])}
    buckets = {name: LargeObject(size_bytes, body) for name, body in bodies.items()}
    storages = tuple(
        Storage(url=f"s3://{name}", submitters=(OTHER,), options=bucket.options) for name, bucket in buckets.items()
    )
    with transfer_process(tmp_path, storages=storages) as transfers:
        transfers.make("t")
        transfers.make("u", submitter=OTHER)
        for number in range(8):
            transfers.order(FileUse(f"s3://stalled/{number}"), "u", submitter=OTHER)
        transfers.wait_until(lambda: len(buckets["stalled"].ranges) >= 8, "all stalled files have begun")
        slow_file = transfers.order(FileUse("s3://slow/file"), "u", submitter=OTHER)
        transfers.order(FileUse("s3://good/file"), "t")
        [moved] = transfers.wait_for(orders.Fetched)
        assert moved.sha256 == sha256(content)
        of_slow_file = (size for each in progress(transfers) for number, size in each.transfers if number == slow_file)
        assert 0 < next(of_slow_file) < 8 * 2**20, "bytes are reported as they come"
        assert max(first for first, _ in buckets["stalled"].ranges) < 8 * 2**20, "what sends nothing has no helpers"
        has_ended.set()
    for bucket in buckets.values():
        bucket.close()


@pytest.mark.parametrize("size_bytes", [0, 5, 20_000_000])
def test_what_a_task_has_written_is_stored(transfers: TransferProcess, s3: Any, size_bytes: int) -> None:
    use = FileUse(f"s3://lab/out/{size_bytes}?part=1", "w")
    transfers.make("t", writes=(use.url,))
    content = os.urandom(size_bytes)
    transfers.place(use).write_bytes(content)
    report = transfers.move(use)
    assert report == orders.Stored(report.number, size_bytes, sha256(content))
    assert s3[1].get_object(Bucket="lab", Key=f"out/{size_bytes}?part=1")["Body"].read() == content


@pytest.mark.parametrize("size_bytes", [1, 2**24])
def test_a_file_that_grows_while_it_is_stored_ends_where_it_ended(
    tmp_path: Path, s3: tuple[dict[str, str], Any], size_bytes: int
) -> None:
    environment, client = s3
    options = {"allow_http": "true", **{name.lower(): value for name, value in environment.items()}}
    source = tmp_path / "source"
    source.write_bytes(b"a" * size_bytes)
    times = 0

    def append(_: int) -> None:
        nonlocal times
        times += 1
        assert times <= 2
        with source.open("ab") as file:
            file.write(b"b" * 2**23)

    found = ObjectMover(open_stores(options), "").store(source, "s3://lab/out", append, lambda: False)
    assert found.size_bytes == size_bytes
    assert client.get_object(Bucket="lab", Key="out")["Body"].read() == b"a" * size_bytes


def test_two_tasks_that_write_one_object_leave_one_of_both_files(transfers: TransferProcess, s3: Any) -> None:
    use = FileUse("s3://lab/out/both", "w")
    contents = [bytes([number]) * 9_000_000 for number in range(2)]
    for task_id, content in zip("tu", contents, strict=True):
        transfers.make(task_id, writes=(use.url,))
        transfers.place(use, task_id).write_bytes(content)
        transfers.order(use, task_id)
    transfers.wait_for(orders.Stored, count=2)
    assert s3[1].get_object(Bucket="lab", Key="out/both")["Body"].read() in contents


def test_an_object_without_etag_is_not_used_again_while_it_may_change(tmp_path: Path, web: WebServer) -> None:
    contents = {"1": b"first", "2": b"other"}
    modified = {"old": MODIFIED, "new": "Thu, 01 Jan 2099 00:00:00 GMT"}
    options = {"endpoint": web.url, "access_key_id": "a", "secret_access_key": "b", "region": "x"}
    with transfer_process(tmp_path, storages=(Storage(url="s3://lab", options=options),)) as transfers:
        transfers.make("t")
        found = []
        for age, number in itertools.product(modified, contents):
            headers = {"Last-Modified": modified[age]}
            web.files[f"/lab/{age}"] = lambda _, h=headers, n=number: (200, h, contents[n])  # type: ignore[misc]
            found.append(transfers.move(FileUse(f"s3://lab/{age}")).sha256)
        assert found == [sha256(b"first"), sha256(b"first"), sha256(b"first"), sha256(b"other")]


def test_an_object_that_has_changed_is_copied_again(transfers: TransferProcess, s3: Any) -> None:
    use = FileUse("s3://lab/raw/changes")
    for content in (b"one", b"two!"):
        s3[1].put_object(Bucket="lab", Key="raw/changes", Body=content)
        assert transfers.move(use).sha256 == sha256(content)
        assert transfers.place(use).read_bytes() == content


@pytest.mark.parametrize("url", ["s3://lab/none", "s3://nowhere/none"])
def test_an_object_that_is_missing(transfers: TransferProcess, url: str) -> None:
    assert transfers.code(FileUse(url)) == "FILE_NOT_FOUND"


def test_an_object_with_a_key_that_no_store_has(transfers: TransferProcess) -> None:
    assert transfers.code(FileUse("s3://lab/a/../b")) == "FILE_UNSUPPORTED"


def test_a_store_that_refuses_the_credentials(tmp_path: Path, web: WebServer) -> None:
    web.files["/lab/a"] = lambda _: (403, {}, b"<Error><Code>AccessDenied</Code></Error>")
    options = {"endpoint": web.url, "access_key_id": "a", "secret_access_key": "$LAB_SECRET", "region": "x"}
    with transfer_process(
        tmp_path, environment={"LAB_SECRET": "b"}, storages=(Storage(url="s3://lab", options=options),)
    ) as transfers:
        transfers.make("t", writes=("s3://lab/a",))
        assert transfers.code(FileUse("s3://lab/a")) == "FILE_DENIED"
        transfers.place(FileUse("s3://lab/a", "w")).write_bytes(b"x")
        assert transfers.code(FileUse("s3://lab/a", "w")) == "FILE_DENIED"


def test_a_store_that_is_not_there_is_a_failure_that_may_pass(tmp_path: Path) -> None:
    options = {"endpoint": "http://127.0.0.1:9", "access_key_id": "a", "secret_access_key": "b", "region": "x"}
    with transfer_process(tmp_path, storages=(Storage(url="s3://lab", options=options),)) as transfers:
        transfers.make("t")
        report = transfers.move(FileUse("s3://lab/a"))
        assert (report.error["code"], report.error["retryable"]) == ("FILE_UNREACHABLE", True)
        assert "(Connection refused)" in report.error["message"]


def test_a_bucket_for_an_output_that_does_not_exist(transfers: TransferProcess) -> None:
    use = FileUse("s3://nowhere/out", "w")
    transfers.make("t", writes=(use.url,))
    transfers.place(use).write_bytes(b"x")
    report = transfers.move(use)
    assert report.error["code"] == "FILE_NOT_FOUND"
    assert "there is no such bucket" in report.error["message"]


def test_a_store_for_which_there_are_no_credentials_is_named_at_once(tmp_path: Path, web: WebServer) -> None:
    options = {"endpoint": web.url, "region": "x", "metadata_endpoint": web.url}
    with transfer_process(tmp_path, storages=(Storage(url="s3://lab", options=options),)) as transfers:
        transfers.make("t")
        for url in ("s3://lab/a", "az://lab/a"):
            report = transfers.move(FileUse(url))
            assert (report.error["code"], report.error["retryable"]) == ("FILE_DENIED", False)
            assert f"no valid credentials for the storage of {url}" in report.error["message"]
            assert "files.storages" in report.error["hint"]


def test_a_bucket_in_another_region_is_no_failure_that_may_pass(tmp_path: Path, web: WebServer) -> None:
    web.files["/lab/a"] = lambda _: (301, {"x-amz-bucket-region": "eu-west-1"}, b"")
    options = {"endpoint": web.url, "access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    with transfer_process(tmp_path, storages=(Storage(url="s3://lab", options=options),)) as transfers:
        transfers.make("t")
        report = transfers.move(FileUse("s3://lab/a"))
        assert (report.error["code"], report.error["retryable"]) == ("FILE_DENIED", False)
        assert "in another region" in report.error["message"]


# -- the web -----------------------------------------------------------------------------------------------------------


def test_many_tasks_that_wait_for_one_file_are_one_request(transfers: TransferProcess, web: WebServer) -> None:
    use = of(web, "/data", b"data")
    tasks = [f"t{number}" for number in range(50)]
    transfers.make(*tasks)
    transfers.move(use, *tasks)
    assert transfers.move(use, "t").cached
    assert web.requests == {("HEAD", "/data"): 1, ("GET", "/data"): 1}
    assert all(transfers.place(use, task_id).read_bytes() == b"data" for task_id in tasks)


def test_a_server_may_know_no_head_and_say_no_size(transfers: TransferProcess, web: WebServer) -> None:
    web.files["/signed"] = lambda method: (403, {}, b"") if method == "HEAD" else (200, {}, iter([b"da", b"ta"]))
    assert transfers.move(of(web, "/signed", b"data")).size_bytes == 4


def test_redirects_are_followed(transfers: TransferProcess, web: WebServer) -> None:
    web.files |= {"/data": b"data", "/there": lambda _: (302, {"Location": "/data"}, b"")}
    assert transfers.move(of(web, "/there", b"data")).size_bytes == 4
    web.files["/round"] = lambda _: (302, {"Location": "/round"}, b"")
    report = transfers.move(of(web, "/round", b"other"))
    assert (report.error["code"], report.error["retryable"]) == ("FILE_DENIED", False), "it is the same next time"
    assert "redirects more than 10 times" in report.error["message"]


@pytest.mark.parametrize(
    ("status", "code"),
    [(404, "FILE_NOT_FOUND"), (410, "FILE_NOT_FOUND"), (401, "FILE_DENIED"), (500, "FILE_UNREACHABLE")],
)
def test_what_a_server_answers(transfers: TransferProcess, web: WebServer, status: int, code: str) -> None:
    web.files["/data"] = lambda _: (status, {}, b"")
    assert transfers.code(of(web, "/data", b"data")) == code


def changing(contents: Iterator[bytes]) -> Any:
    """A file that has the next content at each request."""

    def answer(_: str) -> Answer:
        content = next(contents)
        return 200, {"ETag": f'"{content.decode()}"'}, content

    return answer


def test_a_file_that_changes_meanwhile_is_copied_from_the_start_again(
    transfers: TransferProcess, web: WebServer
) -> None:
    web.files["/data"] = changing(itertools.chain([b"one"], itertools.repeat(b"two")))
    report = transfers.move(of(web, "/data", b"two"))
    assert (report.size_bytes, web.requests["GET", "/data"]) == (3, 2)


def test_a_file_that_changes_all_the_time(transfers: TransferProcess, web: WebServer) -> None:
    web.files["/data"] = changing(b"%d" % number for number in itertools.count())
    assert transfers.code(of(web, "/data", b"0")) == "FILE_CHANGED"
    assert transfers.drafts() == []


def test_a_file_that_is_not_what_its_submitter_expects(transfers: TransferProcess, web: WebServer) -> None:
    assert transfers.code(of(web, "/data", b"data", sha256=sha256(b"other"))) == "FILE_CHECKSUM"
    assert transfers.code(of(web, "/data", b"data", size_bytes=5)) == "FILE_CHANGED"
    assert transfers.copies() == []


def test_a_file_that_ends_too_early_is_a_failure_that_may_pass(transfers: TransferProcess, web: WebServer) -> None:
    web.files["/data"] = lambda _: (200, {"Content-Length": "10"}, iter([b"da"]))
    report = transfers.move(of(web, "/data", b"data"))
    assert (report.error["code"], report.error["retryable"]) == ("FILE_UNREACHABLE", True)


def test_messages_have_no_signature_and_no_password(transfers: TransferProcess, web: WebServer) -> None:
    url = web.url.replace("http://", "http://me:secret@") + "/none?X-Amz-Signature=secret"
    report = transfers.move(FileUse(url, sha256=sha256(b"")))
    assert report.error["code"] == "FILE_NOT_FOUND"
    assert "secret" not in repr(report)


def test_a_proxy_of_the_environment_is_used(tmp_path: Path, web: WebServer) -> None:
    web.files |= {
        "/data": b"data",
        "/lab/object": lambda _: (200, {"ETag": '"1"', "Last-Modified": MODIFIED}, b"object"),
    }
    proxy = Proxy(web)
    options = {"endpoint": "http://s3.invalid", "access_key_id": "a", "secret_access_key": "b", "region": "x"}
    variables = {"http_proxy": proxy.url, "https_proxy": proxy.url, "no_proxy": "127.0.0.1"}
    storage = Storage(url="s3://lab", options=options)
    with transfer_process(tmp_path, environment=variables, storages=(storage,)) as transfers:
        transfers.make("t")
        assert transfers.move(FileUse("http://files.invalid/data", sha256=sha256(b"data"))).size_bytes == 4
        assert transfers.move(FileUse("s3://lab/object")).size_bytes == 6
        passed = set(proxy.requested)
        assert passed == {"http://files.invalid/data", "http://s3.invalid/lab/object"}
        web.files["/near"] = b"near"
        assert transfers.move(of(web, "/near", b"near")).size_bytes == 4  # 127.0.0.1 has no proxy
        assert set(proxy.requested) == passed
    proxy.close()


MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"


def test_without_a_way_out_a_name_that_is_not_found_is_a_failure_that_may_pass(transfers: TransferProcess) -> None:
    report = transfers.move(FileUse("https://nowhere.invalid/data"))
    assert (report.error["code"], report.error["retryable"]) == ("FILE_UNREACHABLE", True)


def test_other_submitters_connect_to_the_address_that_was_checked(tmp_path: Path) -> None:
    authority = Authority()
    web = WebServer(certificate=authority.certify("8.8.8.8", tmp_path / "server.pem"))
    web.files |= {
        "/data": b"data",
        "/lab/object": lambda _: (200, {"ETag": '"1"', "Last-Modified": MODIFIED}, b"object"),
    }
    proxy = Proxy(web)
    variables = {"https_proxy": proxy.url, "SSL_CERT_FILE": str(authority.write(tmp_path / "authority.pem"))}
    options = {"endpoint": "https://8.8.8.8", "access_key_id": "a", "secret_access_key": "b", "region": "x"}
    storages = (Storage(url="s3://lab", options=options),)
    with transfer_process(tmp_path, environment=variables, storages=storages) as transfers:
        transfers.make("t", submitter=OTHER)
        assert transfers.move(FileUse("https://8.8.8.8/data"), submitter=OTHER).size_bytes == 4
        assert set(proxy.requested) == {"8.8.8.8:443"}
        assert transfers.code(FileUse("https://9.9.9.9/data"), submitter=OTHER) == "FILE_UNREACHABLE"  # no certificate
        transfers.make("t")
        assert transfers.move(FileUse("s3://lab/object")).size_bytes == 6  # the same authorities
    proxy.close()
    web.close()


# -- rights ------------------------------------------------------------------------------------------------------------


def test_others_reach_the_storages_that_are_open_to_them_and_nothing_else(
    tmp_path: Path, web: WebServer, s3: Any
) -> None:
    s3[1].put_object(Bucket="lab", Key="shared/a", Body=b"a")
    s3[1].put_object(Bucket="lab", Key="private/a", Body=b"a")
    storages = (
        Storage(url="s3://lab/shared", submitters=(OTHER,)),
        Storage(url=f"{web.url}/open", submitters="*"),
    )
    with transfer_process(tmp_path, environment=s3[0], storages=storages) as transfers:
        transfers.make("t", submitter=OTHER)
        transfers.make("t", writes=("s3://lab/shared/out",))
        assert transfers.move(FileUse("s3://lab/shared/a"), submitter=OTHER).size_bytes == 1
        assert transfers.move(of(web, "/open/a", b"a"), submitter=OTHER).size_bytes == 1
        for url in ("s3://lab/private/a", "s3://lab/sharedx/a", "s3://lab/shared/../private/a"):
            assert transfers.code(FileUse(url), submitter=OTHER) == "FILE_DENIED"
        for path in ("/secret", "/open/../secret", "/open/%2e%2e/secret", "/open/%252e%252e/secret"):
            assert transfers.code(of(web, path, b"secret"), submitter=OTHER) == "FILE_DENIED"
        out = FileUse("s3://lab/shared/out", "w")
        place = transfers.place(out, submitter=OTHER)
        place.parent.mkdir(parents=True)
        place.write_bytes(b"x")
        assert transfers.code(out, submitter=OTHER) == "FILE_DENIED"  # for reading only
        transfers.client.order([orders.Make("u", OTHER, (out.url,))])
        [made] = transfers.wait_for(orders.Made)
        assert made.error["code"] == "FILE_DENIED", "and that is known before the task runs"
        transfers.place(out).write_bytes(b"x")
        assert transfers.move(out).size_bytes == 1  # by the owner
        assert transfers.move(FileUse("s3://lab/private/a")).size_bytes == 1


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/data",
        "https://[::1]/data",
        "https://[::ffff:127.0.0.1]/data",
        "https://[::127.0.0.1]/data",
        "https://[::ffff:0:10.0.0.1]/data",
        "https://[64:ff9b::169.254.169.254]/data",
        "https://[64:ff9b:1::10.0.0.1]/data",
        "https://[2002:a00:1::1]/data",
        "https://[fec0::1]/data",
        "https://169.254.169.254/latest/meta-data",
        "https://192.0.0.192/latest/meta-data",
        "https://[::ffff:168.63.129.16]/data",
        "https://168.63.129.16/data",
        "https://10.0.0.1/data",
        "https://localhost/data",
        "https://0x7f000001/data",
        "https://2130706433/data",
    ],
)
def test_others_do_not_reach_addresses_that_are_not_public(transfers: TransferProcess, url: str) -> None:
    transfers.make("t", submitter=OTHER)
    assert transfers.code(FileUse(url), submitter=OTHER) in ("FILE_DENIED", "FILE_UNREACHABLE")


def test_a_redirect_leads_others_to_public_addresses_only(tmp_path: Path, web: WebServer) -> None:
    web.files |= {
        "/open/a": lambda _: (302, {"Location": f"{web.url}/secret"}, b""),
        "/open/b": lambda _: (302, {"Location": "https://127.0.0.1/secret"}, b""),
        "/secret": b"secret",
    }
    with transfer_process(tmp_path, storages=(Storage(url=f"{web.url}/open", submitters="*"),)) as transfers:
        transfers.make("t", submitter=OTHER)
        for path in ("/open/a", "/open/b"):
            assert transfers.code(of(web, path, b"secret"), submitter=OTHER) == "FILE_DENIED"
        assert ("GET", "/secret") not in web.requests


def test_an_endpoint_with_certain_functions_gives_its_owner_no_more_rights(tmp_path: Path, s3: Any) -> None:
    storages = (Storage(url="s3://lab/shared"),)
    s3[1].put_object(Bucket="lab", Key="shared/a", Body=b"a")
    with transfer_process(tmp_path, environment=s3[0], storages=storages, is_restricted=True) as transfers:
        transfers.make("t")
        assert transfers.move(FileUse("s3://lab/shared/a")).size_bytes == 1
        assert transfers.code(FileUse("s3://lab/private/a")) == "FILE_DENIED"


def test_the_owner_is_the_owner_under_the_id_too(tmp_path: Path, s3: Any) -> None:
    s3[1].put_object(Bucket="lab", Key="private/a", Body=b"a")
    with transfer_process(
        tmp_path, environment=s3[0], owner_or=lambda each: "" if each == OTHER else each
    ) as transfers:
        transfers.make("t", submitter=OTHER)
        assert transfers.move(FileUse("s3://lab/private/a"), submitter=OTHER).size_bytes == 1
        assert transfers.place(FileUse("s3://lab/private/a")).read_bytes() == b"a"


def test_a_task_cannot_have_a_file_of_the_owner_stored_by_a_link(transfers: TransferProcess, tmp_path: Path) -> None:
    secret = tmp_path / "credentials"
    secret.write_text("secret")
    use = FileUse("s3://lab/out/stolen", "w")
    transfers.make("t", writes=(use.url,))
    place = transfers.place(use)
    place.symlink_to(secret)
    assert transfers.code(use) == "FILE_NOT_WRITTEN"
    place.unlink()
    directory = place.parent
    directory.rmdir()
    (tmp_path / place.name).write_text("secret")
    directory.symlink_to(tmp_path)
    assert transfers.code(use) == "FILE_NOT_WRITTEN"
    directory.unlink()
    directory.mkdir()
    os.mkfifo(place)
    assert transfers.code(use) == "FILE_NOT_WRITTEN"


def test_a_task_cannot_have_a_file_written_elsewhere_by_a_link(
    transfers: TransferProcess, web: WebServer, tmp_path: Path
) -> None:
    use, target = of(web, "/authorized_keys", b"mine"), tmp_path / "ssh"
    target.mkdir()
    place = transfers.place(use, "next")
    place.parent.parent.mkdir(parents=True)
    place.parent.symlink_to(target)
    transfers.make("next")
    error = transfers.error(use, "next")
    assert (error["code"], error.get("retryable", False)) == ("FILE_DENIED", False)
    assert str(place) in error["message"]
    assert "Links there are not followed" in error["message"]
    assert list(target.iterdir()) == []
    place.parent.unlink()
    place.mkdir(parents=True)
    assert transfers.code(use, "next") == "FILE_DENIED", "a directory in the place of the file"
    place.rmdir()
    place.symlink_to(target / "authorized_keys")
    transfers.move(use, "next")
    assert list(target.iterdir()) == []
    assert place.read_bytes() == b"mine"


def test_link_in_place_of_the_directory_of_a_task_is_refused(transfers: TransferProcess, tmp_path: Path) -> None:
    files_directory(transfers.working_dir, "next", "").symlink_to(tmp_path)
    transfers.client.order([orders.Make("next", "", ())])
    [made] = transfers.wait_for(orders.Made)
    assert isinstance(made, orders.Made)
    assert made.error is not None
    assert made.error["code"] == "FILE_DENIED"
    assert not (tmp_path / "r").exists()


def test_a_link_in_place_of_a_directory_is_not_emptied(transfers: TransferProcess, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("x")
    staged = transfers.working_dir / "staged"
    (staged / "old").symlink_to(precious)
    transfers.remove("old")
    transfers.client.order([orders.Tidy(())])
    transfers.wait_for(orders.Tidied)
    assert (precious / "data").exists()


def test_files_that_a_task_has_read_go_while_those_that_it_has_written_are_stored(
    transfers: TransferProcess, web: WebServer, s3: Any
) -> None:
    use = of(web, "/data", b"data")
    transfers.make("u", writes=("s3://lab/out/a",))
    transfers.move(use, "u")
    written = transfers.place(FileUse("s3://lab/out/a", "w"), "u")
    written.write_bytes(b"result")
    transfers.client.order([orders.Release("u", "")])
    transfers.wait_for(orders.Released)
    assert not transfers.place(use, "u").exists()
    assert written.read_bytes() == b"result"


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_copies_of_one_submitter_are_not_for_others(transfers: TransferProcess, web: WebServer, s3: Any) -> None:
    s3[1].put_object(Bucket="lab", Key="raw/mine", Body=b"mine")
    assert transfers.move(FileUse("s3://lab/raw/mine")).size_bytes == 4
    transfers.make("t", submitter=OTHER)
    assert transfers.code(FileUse("s3://lab/raw/mine", sha256=sha256(b"mine")), submitter=OTHER) == "FILE_DENIED"


def test_a_copy_that_a_task_has_spoiled_is_not_used_again(transfers: TransferProcess, web: WebServer) -> None:
    use = of(web, "/data", b"data")
    transfers.make("u")
    transfers.move(use, "t")
    path = transfers.place(use, "t")
    before = path.stat()
    path.chmod(0o644)
    path.write_bytes(b"DATA")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not transfers.move(use, "u").cached
    assert transfers.place(use, "u").read_bytes() == b"data"
    transfers.remove("t")
    transfers.remove("u")
    transfers.make("v")
    assert transfers.move(use, "v").cached
    assert web.requests["GET", "/data"] == 2


def test_a_copy_is_used_again_after_its_task_and_after_a_restart(tmp_path: Path, web: WebServer) -> None:
    use = of(web, "/data", b"data")
    for _ in range(2):
        with transfer_process(tmp_path) as transfers:
            for task_id in ("t", "u"):
                transfers.make(task_id)
                transfers.move(use, task_id)
                assert transfers.place(use, task_id).read_bytes() == b"data"
                transfers.remove(task_id)
                assert not transfers.place(use, task_id).exists()
    assert web.requests["GET", "/data"] == 1


def test_the_copy_that_was_not_used_for_longest_goes_and_none_that_a_task_has(tmp_path: Path, web: WebServer) -> None:
    files = [of(web, f"/{number}", bytes([number]) * 400_000) for number in range(3)]
    with transfer_process(tmp_path, cache_bytes=1_000_000) as transfers:
        transfers.make("t", "u")
        transfers.move(files[0], "t")
        transfers.move(files[1], "u")
        report = transfers.move(files[2], "t")
        assert (report.error["code"], report.error["retryable"]) == ("FILES_NO_ROOM", True)
        assert transfers.place(files[0], "t").exists()
        transfers.remove("u")
        transfers.move(files[2], "t")
        assert [copy.name for copy in transfers.copies()] == sorted([files[0].sha256, files[2].sha256])
        assert transfers.code(of(web, "/large", bytes(1_000_001)), "t") == "FILES_TOO_LARGE"


def test_a_task_whose_files_alone_exceed_the_cache_fails_for_good(tmp_path: Path, web: WebServer) -> None:
    files = [of(web, f"/{number}", bytes([number]) * 400_000) for number in range(4)]
    with transfer_process(tmp_path, cache_bytes=1_000_000) as transfers:
        transfers.make("t", "u")
        for use in files[:2]:
            transfers.move(use, "t")
        report = transfers.move(files[2], "u")
        assert report.error["code"] == "FILES_NO_ROOM", "there is room for the task alone"
        report = transfers.move(files[2], "t")
        assert (report.error["code"], report.error["retryable"]) == ("FILES_TOO_LARGE", False)
        assert "need 1,200,000 bytes, and the endpoint has room for 1,000,000" in report.error["message"]
        assert transfers.move(files[3], "t", "u").error["code"] == "FILES_NO_ROOM", "the other task may have it"


def test_the_index_does_not_grow_with_the_urls_of_one_content(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "files")
    urls = [f"https://host/{number}" for number in range(1000)]
    for url in urls:
        cache.remember("", url, "1", sha256(b""))
    assert cache.known("", urls[-1], "1") == sha256(b"")
    assert len([url for url in urls if cache.known("", url, "1")]) <= 100
    cache.close()


def test_a_file_of_unknown_size_stays_within_the_room(tmp_path: Path, web: WebServer) -> None:
    web.files["/endless"] = lambda method: (200, {}, itertools.repeat(bytes(100_000)))
    with transfer_process(tmp_path, cache_bytes=3_000_000) as transfers:
        transfers.make("t")
        assert transfers.code(of(web, "/endless", b"")) == "FILES_TOO_LARGE"
        assert transfers.drafts() == []


def test_where_links_are_impossible_tasks_get_copies(tmp_path: Path, web: WebServer) -> None:
    elsewhere = Path(tempfile.mkdtemp(dir="/dev/shm"))
    if elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    (tmp_path / "files").symlink_to(elsewhere)
    use = of(web, "/data", b"data")
    with transfer_process(tmp_path) as transfers:
        transfers.make("t")
        transfers.move(use)
        place = transfers.place(use)
        assert (place.read_bytes(), place.stat().st_mode & 0o777, place.stat().st_nlink) == (b"data", 0o444, 1)
        assert transfers.move(use).cached
    shutil.rmtree(elsewhere)


def test_what_an_earlier_agent_has_left_is_removed_although_its_task_comes_again(
    tmp_path: Path, web: WebServer
) -> None:
    use = of(web, "/data", b"data")
    with transfer_process(tmp_path) as transfers:
        for task_id in "tuv":
            transfers.make(task_id)
            transfers.move(use, task_id)
        transfers.client.order([orders.Tidy(("t",))])
        transfers.make("u")
        transfers.wait_for(orders.Tidied)
        assert transfers.place(use, "t").read_bytes() == b"data"
        assert transfers.place(use, "u").parent.parent.is_dir()
        assert not transfers.place(use, "u").exists()
        assert len(list((transfers.working_dir / "staged").iterdir())) == 2


def test_a_damaged_index_and_drafts_of_a_killed_process_are_removed(tmp_path: Path, web: WebServer) -> None:
    use = of(web, "/data", b"data")
    with transfer_process(tmp_path) as transfers:
        transfers.make("t")
        transfers.move(use)
    (tmp_path / "files" / "index.sqlite").write_bytes(b"no database at all" * 1000)
    (tmp_path / "files" / "index.sqlite-wal").unlink(missing_ok=True)
    drafts = tmp_path / "files" / "owner" / "drafts"
    drafts.mkdir(exist_ok=True)
    (drafts / "7").write_bytes(b"half")
    with transfer_process(tmp_path) as transfers:
        transfers.make("t")
        assert transfers.drafts() == []
        assert not transfers.move(use).cached
        assert transfers.place(use).read_bytes() == b"data"


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_file_system_that_is_full_is_a_failure_that_may_pass(transfers: TransferProcess, web: WebServer) -> None:
    use = of(web, "/data", bytes(3_000_000))
    pid = transfers.process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    report = transfers.move(use)
    assert (report.error["code"], report.error["retryable"]) == ("FILES_NO_ROOM", True)
    assert transfers.drafts() == []
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert transfers.move(use).size_bytes == 3_000_000


def test_a_transfer_that_never_ends_is_stopped(transfers: TransferProcess, web: WebServer) -> None:
    web.files["/endless"] = lambda _: (200, {}, itertools.repeat(bytes(1000)))
    number = transfers.order(of(web, "/endless", b""), "t")
    assert transfers.wait_for(orders.Progress)
    transfers.client.order([orders.Cancel(number)])
    wait_until(lambda: transfers.drafts() == [], "the draft is removed")
    assert transfers.move(of(web, "/data", b"data")).size_bytes == 4
    assert not [each for each in transfers.reports if isinstance(each, orders.Failed)]


def test_a_slow_transfer_makes_progress_and_can_be_stopped(transfers: TransferProcess, web: WebServer) -> None:
    has_ended = threading.Event()

    def slowly() -> Iterator[bytes]:
        while not has_ended.wait(0.1):
            yield bytes(10)

    web.files["/slow"] = lambda _: (200, {}, slowly())
    number = transfers.order(of(web, "/slow", b""), "t")
    assert transfers.wait_for(orders.Progress)
    transfers.client.order([orders.Cancel(number)])
    wait_until(lambda: transfers.drafts() == [], "the draft is removed")
    has_ended.set()


def test_a_killed_process_is_replaced(transfers: TransferProcess, web: WebServer) -> None:
    web.files["/endless"] = lambda _: (200, {}, itertools.repeat(bytes(1000)))
    transfers.order(of(web, "/endless", b""), "t")
    transfers.wait_for(orders.Progress)
    former = transfers.process
    former.kill()
    transfers.wait_until(lambda: transfers.losses, "the loss is noticed")
    assert "exit code -9" in transfers.losses[0]
    assert transfers.move(of(web, "/data", b"data")).size_bytes == 4
    assert transfers.process.pid != former.pid


def test_transfers_of_one_submitter_that_hang_do_not_end_the_process_for_others(tmp_path: Path) -> None:
    program = (
        "import itertools, queue, sys, threading\n"
        "from farcall_common.staged_files import FileUse\n"
        "from farcall_endpoint.contracts import outcomes\n"
        "from farcall_endpoint.files import orders, process\n"
        "from farcall_endpoint.files.movers import MoveError\n"
        "from farcall_endpoint.files.settings import TransferSettings\n"
        "class Hanging:\n"
        "    def stat(self, url):\n"
        "        threading.Event().wait()\n"
        "def mover(self, submitter, url, *, write):\n"
        "    if submitter == 'alice':\n"
        "        return Hanging()\n"
        "    raise MoveError(outcomes.file_not_found(url))\n"
        "process.Access.mover = mover\n"
        "reports = queue.Queue()\n"
        "settings = TransferSettings(directory=sys.argv[1] + '/files', working_dir=sys.argv[1])\n"
        "transfers = process.Transfers(settings, reports.put)\n"
        "for number in range(500):\n"
        "    transfers.perform(orders.Fetch(number, 'alice', FileUse(f'https://h/{number}'), ('t',)))\n"
        "transfers.perform(orders.Fetch(500, 'bob', FileUse('https://h/b'), ('t',)))\n"
        "failed = (each for each in iter(reports.get, None) if isinstance(each, orders.Failed))\n"
        "for report in itertools.islice(failed, 381):\n"
        "    print(report.number, report.error['code'], flush=True)\n"
        "process.os._exit(0)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    expected = [f"{number} FILE_UNREACHABLE" for number in range(120, 500)]
    assert done.stdout.splitlines() == [*expected, "500 FILE_NOT_FOUND"], done.stderr


def test_a_defect_of_a_batch_is_the_end_of_its_files_only(tmp_path: Path) -> None:
    program = (
        "import queue, sys\n"
        "from farcall_common.staged_files import FileUse\n"
        "from farcall_endpoint.files import orders, process\n"
        "from farcall_endpoint.files.settings import TransferSettings\n"
        "class Broken:\n"
        "    def stat_many(self, urls):\n"
        "        raise KeyError('version')\n"
        "process.Access.batch_mover = lambda *_, **__: Broken()\n"
        "reports = queue.Queue()\n"
        "settings = TransferSettings(directory=sys.argv[1] + '/files', working_dir=sys.argv[1])\n"
        "transfers = process.Transfers(settings, reports.put)\n"
        "process.threading.excepthook = process._end_process\n"
        "for number in (1, 2):\n"
        "    transfers.perform(orders.Fetch(number, '', FileUse(f'globus://c/{number}'), ('t',)))\n"
        "transfers.begin_batch()\n"
        "failed = (each for each in iter(reports.get, None) if isinstance(each, orders.Failed))\n"
        "for _, report in zip(range(2), failed):\n"
        "    print(report.number, report.error['code'], report.error['message'], flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["1", "FILE_UNREACHABLE"],
        ["2", "FILE_UNREACHABLE"],
    ], done.stderr
    assert "KeyError: 'version'" in done.stdout


def test_a_process_that_cannot_start_is_started_later(
    tmp_path: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with too many processes of the user: the agent continues."""
    now = 0.0
    with transfer_process(tmp_path, clock=lambda: now) as transfers:
        with monkeypatch.context() as patch:
            patch.setattr("sys.executable", str(tmp_path / "none"))
            transfers.client.order([orders.Make("t", "", ())])
            assert transfers.client.next_deadline() == now  # it is reported at once
            transfers.listen()
        assert transfers.losses == ["the transfer process cannot be started: No such file or directory"]
        assert transfers.client.pid is None
        transfers.client.order([orders.Make("t", "", ())])  # as the plan does
        transfers.listen()
        assert transfers.client.pid is None  # not yet
        now += 2.0
        transfers.wait_for(orders.Made)
        assert transfers.move(of(web, "/data", b"data")).size_bytes == 4


def test_a_process_that_is_silent_is_replaced(tmp_path: Path, web: WebServer) -> None:
    now = 0.0
    with transfer_process(tmp_path, clock=lambda: now) as transfers:
        transfers.make("t")
        former = transfers.process
        former.send_signal(signal.SIGSTOP)
        transfers.order(of(web, "/data", b"data"), "t")
        now += 16.0
        transfers.listen()  # it is asked for a sign of life
        assert transfers.losses == []
        now += 16.0
        transfers.listen()
        assert transfers.losses == ["the transfer process did not answer"]
        assert not former.is_running()
        now += 2.0
        assert transfers.move(of(web, "/data", b"data")).size_bytes == 4


def test_a_process_that_is_slow_and_answers_stays(tmp_path: Path, web: WebServer) -> None:
    now = 0.0
    with transfer_process(tmp_path, clock=lambda: now) as transfers:
        transfers.make("t")
        opened = threading.Event()
        web.files["/slow"] = lambda _: (opened.wait(WAIT_S), (200, {}, b"slow"))[1]
        transfers.order(of(web, "/slow", b"slow"), "t")
        transfers.reports.clear()
        for _ in range(3):
            now += 16.0
            transfers.listen()
            transfers.wait_for(orders.Alive)
        opened.set()
        assert transfers.wait_for(orders.Fetched)
        assert transfers.losses == []


def test_a_cache_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("no directory")
    with transfer_process(tmp_path) as transfers:
        transfers.client.order([orders.Make("t", "", ())])
        transfers.wait_until(lambda: transfers.losses, "the process ends")
        assert f"{tmp_path}/files cannot be used" in transfers.losses[0]


def test_a_process_waits_for_the_end_of_one_that_has_the_cache(tmp_path: Path, web: WebServer) -> None:
    use = of(web, "/data", b"data")
    with transfer_process(tmp_path) as other:
        with transfer_process(tmp_path) as first:
            first.make("t")
            first.move(use)
            other.client.order([orders.Make("u", "", ())])
            other.wait_until(lambda: other.losses, "it finds the cache in use")
        other.losses.clear()
        other.make("u")
        assert other.move(use, "u").cached


def test_a_process_ends_without_work_and_starts_with_the_next_order(tmp_path: Path) -> None:
    with transfer_process(tmp_path, idle_s=0.1) as transfers:
        assert transfers.client.pid is None
        transfers.make("t")
        former = transfers.process
        transfers.wait_until(lambda: transfers.client.pid is None, "it ends")
        assert not former.is_running()
        assert (transfers.losses, transfers.client.next_deadline()) == ([], None)
        transfers.make("u")
