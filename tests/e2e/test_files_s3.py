"""Files in storage through the whole cloud: what a user writes, and what the endpoint copies."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import boto3
import imageio.v3 as iio
import pytest
import yaml
from moto.server import ThreadedMotoServer

import farcall
from examples import tomography
from farcall import File
from farcall_common.errors import TaskFailed
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[str, Any]]:
    """The address of a store of objects, and a client of it; it has the bucket ``lab``."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    s3 = boto3.client("s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    s3.create_bucket(Bucket="lab")
    yield url, s3
    server.stop()


@pytest.fixture(scope="module")
def executor(
    client: farcall.Client,
    cloud: Deployment,
    bucket: tuple[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[farcall.Executor]:
    """Of an endpoint that has the credentials of the bucket."""
    home = tmp_path_factory.mktemp("files")
    endpoint = LocalEndpoint("files", home=home, environment=cloud.environment("ada"))
    endpoint.configure()
    file = endpoint.directory / "config.yaml"
    config = yaml.safe_load(file.read_text())
    options = {"endpoint": bucket[0], "access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    config["files"] = {"storages": [{"url": "s3://lab", "options": options}]}
    file.write_text(yaml.safe_dump(config))
    with endpoint, farcall.Executor(endpoint.endpoint_id, client=client) as running:
        yield running


def count(words: File, out: File) -> int:
    with words.open() as file, out.open() as counted:
        number = len(file.read().split())
        counted.write(f"{number}\n")
    return number


def read(source: File) -> str:
    text: str = source.open().read()
    return text


def test_a_function_reads_and_writes_objects(executor: farcall.Executor, bucket: tuple[str, Any]) -> None:
    s3 = bucket[1]
    s3.put_object(Bucket="lab", Key="raw/words.txt", Body=b"one two three")
    future = executor.submit(count, File("s3://lab/raw/words.txt"), out=File("s3://lab/out/count.txt"))
    assert future.result(WAIT_S) == 3
    assert s3.get_object(Bucket="lab", Key="out/count.txt")["Body"].read() == b"3\n"
    assert executor.submit(read, File("s3://lab/out/count.txt")).result(WAIT_S) == "3\n"


def test_an_object_that_does_not_exist(executor: farcall.Executor) -> None:
    with pytest.raises(TaskFailed, match="s3://lab/none does not exist"):
        executor.submit(read, File("s3://lab/none")).result(WAIT_S)


def test_tomography_stages_its_files(executor: farcall.Executor, bucket: tuple[str, Any]) -> None:
    assert tomography.run_with_files(executor, "s3://lab/scan7") == "s3://lab/scan7/slice.png"
    keys = {each["Key"] for each in bucket[1].list_objects_v2(Bucket="lab", Prefix="scan7/")["Contents"]}
    assert keys == {"scan7/slice.png", *(f"scan7/sinogram-{number}.npy" for number in range(6))}
    picture = iio.imread(bucket[1].get_object(Bucket="lab", Key="scan7/slice.png")["Body"].read())
    assert picture.shape == (tomography.SLICE_PIXELS, tomography.SLICE_PIXELS)
