"""The forwarders' ECS service, told by the API and the reconciler."""

from __future__ import annotations

import boto3
import pytest
from botocore.stub import Stubber

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_lambdas.fleet import EcsFleet

VARIABLES = {
    "FARCALL_FLEET_CLUSTER": "farcall",
    "FARCALL_FLEET_SERVICE": "forwarder",
    "FARCALL_FLEET_TASKS": "1",
    "FARCALL_FLEET_IDLE_S": "900",
}


@pytest.fixture
def ecs(monkeypatch: pytest.MonkeyPatch) -> Stubber:
    client = boto3.client("ecs", region_name="eu-central-1", aws_access_key_id="x", aws_secret_access_key="x")
    monkeypatch.setattr(boto3, "client", lambda *_arguments, **_options: client)
    return Stubber(client)


def test_the_service_is_scaled_up_and_down(ecs: Stubber) -> None:
    fleet = EcsFleet.from_environment(VARIABLES)
    assert fleet == EcsFleet("farcall", "forwarder", tasks=1, idle_s=900.0)
    for tasks in (1, 0):
        ecs.add_response("update_service", {}, {"cluster": "farcall", "service": "forwarder", "desiredCount": tasks})
    with ecs:
        fleet.wake(on_demand=True)  # they always are
        fleet.sleep()
    ecs.assert_no_pending_responses()


def test_capacity_other_than_spot_is_used_until_the_forwarders_sleep(ecs: Stubber) -> None:
    fleet = EcsFleet.from_environment(VARIABLES | {"FARCALL_FLEET_SPOT": "true"})
    assert fleet is not None
    service = {"cluster": "farcall", "service": "forwarder"}
    ecs.add_response("update_service", {}, {**service, "desiredCount": 1})
    for tasks, provider in ((1, "FARGATE"), (0, "FARGATE_SPOT")):
        strategy = [{"capacityProvider": provider, "weight": 1}]
        expected = {"desiredCount": tasks, "capacityProviderStrategy": strategy, "forceNewDeployment": True}
        ecs.add_response("update_service", {}, {**service, **expected})
    with ecs:
        fleet.wake()
        fleet.wake(on_demand=True)
        fleet.sleep()
    ecs.assert_no_pending_responses()


def test_refused_scaling_can_be_retried(ecs: Stubber) -> None:
    ecs.add_client_error("update_service", "ServiceNotActiveException")
    with ecs, pytest.raises(Unavailable, match="ServiceNotActiveException"):
        EcsFleet("farcall", "forwarder", tasks=1, idle_s=1.0).wake()


def test_deployment_without_a_service_has_no_fleet() -> None:
    assert EcsFleet.from_environment({}) is None


@pytest.mark.parametrize("change", [{"FARCALL_FLEET_TASKS": "many"}, {"FARCALL_FLEET_IDLE_S": ""}])
def test_invalid_variable_is_named(change: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="FARCALL_FLEET"):
        EcsFleet.from_environment(VARIABLES | change)
