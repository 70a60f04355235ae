"""One deployment through its life on LocalStack: made as ``hobby``, grown to ``lab`` and ``facility`` with its data
kept, and deleted with everything that it had started."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

import farcall
from farcall_infra.profiles import load_profile, profile_names
from farcall_localstack import LocalStackTier, Tier
from farcall_localstack.deploy import Deployer
from farcall_localstack.server import group_members
from farcall_localstack.synth import ensure_assembly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _double(number: int) -> int:
    return 2 * number


def _programs(tier: Tier) -> set[str]:
    """The engines that run behind the tier."""
    names = {psutil.Process(pid).name() for pid in group_members(tier.localstack_pid or 0)}
    return {engine for engine in ("postgres", "valkey") for name in names if engine in name}


def test_a_deployment_grows_through_the_profiles_keeps_its_data_and_goes(tmp_path: Path) -> None:
    first, *later = profile_names()
    with LocalStackTier(tmp_path, assembly=ensure_assembly(profile=first)) as started:
        tier = started.tier
        deployer = Deployer(tier.endpoint_url)
        with farcall.Client(tier.api_url, tier.token) as client:
            function_id = client.register_function(_double)
            database = tier.environment()["FARCALL_DATABASE_PORT"]
            for profile in later:
                assembly = ensure_assembly(profile=profile)
                before = tier.forwarder_pids()
                deployer.deploy(assembly, parameters=tier.parameters())
                tier.require_healthy()
                running = tier.forwarder_pids()
                assert len(running) == load_profile(profile).forwarder.tasks
                assert set(running).isdisjoint(before)  # another size is another task
                assert tier.environment()["FARCALL_DATABASE_PORT"] == database
                assert client.get_function(function_id)["function_uuid"] == function_id
        assert _programs(tier) == {"postgres", "valkey"}
        deployer.delete(assembly)
        assert tier.forwarder_pids() == []
        assert _programs(tier) == set()
