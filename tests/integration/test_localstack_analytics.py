"""The optional storage of analytics on LocalStack: a sort on an endpoint goes through its bucket, which is deleted with
the deployment."""

from __future__ import annotations

import json
from pathlib import Path

import boto3
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import farcall
import farcall_analytics as fa
from farcall_infra.cloud.cli import app
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from farcall_localstack import LocalStackTier
from farcall_localstack.server import LocalStackServer
from farcall_localstack.synth import ensure_assembly
from tests.support.analytics_data import big_data

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SETTINGS = {"analytics.enabled": "true", "analytics.express_zone": "use1-az4"}


def test_a_sort_goes_through_the_bucket_of_the_deployment(
    localstack: LocalStackServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembly = ensure_assembly(profile="lab", settings=SETTINGS)
    with LocalStackTier(localstack.directory, assembly=assembly, endpoint_url=localstack.url) as started:
        tier = started.tier
        for variable, value in (tier.variables() | {"AWS_ALLOW_HTTP": "true"}).items():
            monkeypatch.setenv(variable, value)
        shown = CliRunner().invoke(app, ["analytics", "--json"])
        assert shown.exit_code == 0, shown.output
        storage = json.loads(shown.output)
        assert (storage["has_cache"], storage["express"]) == (False, "")  # LocalStack has neither
        bucket = storage["bucket"].removeprefix("s3://")
        s3 = boto3.client("s3")
        monkeypatch.setenv("FARCALL_ANALYTICS_STORAGE", storage["bucket"])

        environment = Deployment(tier.api_url, {"dev": tier.token}, tier.directory).environment("dev")
        endpoint = LocalEndpoint("own", home=tmp_path / "home", environment=environment | tier.variables())
        with farcall.Client(tier.api_url, tier.token) as client, endpoint:
            written: list[int] = []
            with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
                visits = fa.read_parquet(
                    big_data(tmp_path / "big")["visits"], executor=executor, share_bytes=200_000, partitions=3
                )
                outcome = visits.sort("ad_revenue").write_parquet(
                    str(tmp_path / "out"),
                    progress=lambda *_: written.append(s3.list_objects_v2(Bucket=bucket)["KeyCount"]),
                )
        assert max(written) > 0
        found = [row for path in outcome.paths for row in pq.read_table(path)["ad_revenue"].to_pylist()]
        assert found == sorted(found)
        assert len(found) == 20_000
        assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0  # a job deletes its blocks

        healthy = CliRunner().invoke(app, ["status", "--json"])
        assert healthy.exit_code == 0, healthy.output
        assert "farcall-analytics" in json.loads(healthy.output)["releases"]
    with pytest.raises(s3.exceptions.ClientError):
        s3.head_bucket(Bucket=bucket)
