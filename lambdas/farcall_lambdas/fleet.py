"""Forwarder fleet: wakes and stops idle forwarders by the size of their ECS service.

=============================  =========================================================================================
variable                       meaning
=============================  =========================================================================================
``FARCALL_FLEET_CLUSTER``      the ECS cluster of the forwarders; without it they never sleep
``FARCALL_FLEET_SERVICE``      their service in it
``FARCALL_FLEET_TASKS``        how many of them run while they are awake
``FARCALL_FLEET_IDLE_S``       seconds without a connection after which they sleep
``FARCALL_FLEET_SPOT``         ``true`` if they run on Spot capacity, else empty
=============================  =========================================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Protocol

from farcall_common.errors import ConfigurationError, Unavailable

_TIMEOUT_S: Final = 5.0  # API Gateway waits for 29 s at most
_ON_DEMAND: Final = "FARGATE"
_SPOT: Final = "FARGATE_SPOT"


class Fleet(Protocol):
    """``idle_s``: seconds without a connection after which the forwarders may sleep."""

    @property
    def idle_s(self) -> float: ...

    def wake(self, *, on_demand: bool = False) -> None:
        """Start the forwarders; harmless while they start or run. With ``on_demand`` not on Spot capacity, until they
        sleep: AWS does not replace missing Spot capacity by other capacity.

        :raises Unavailable: if the service cannot be scaled now.
        """

    def sleep(self) -> None:
        """Stop the forwarders; they drain first.

        :raises Unavailable: if the service cannot be scaled now.
        """


@dataclasses.dataclass(frozen=True)
class EcsFleet:
    """The tasks of one ECS service."""

    cluster: str
    service: str
    tasks: int
    idle_s: float
    spot: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> EcsFleet | None:
        """The fleet that the variables name; None where the forwarders always run.

        :raises ConfigurationError: if a variable is missing or no number.
        """
        if not (cluster := environ.get("FARCALL_FLEET_CLUSTER")):
            return None
        try:
            return cls(
                cluster,
                environ["FARCALL_FLEET_SERVICE"],
                tasks=int(environ["FARCALL_FLEET_TASKS"]),
                idle_s=float(environ["FARCALL_FLEET_IDLE_S"]),
                spot=environ.get("FARCALL_FLEET_SPOT") == "true",
            )
        except (KeyError, ValueError) as error:
            raise ConfigurationError(
                "FARCALL_FLEET_CLUSTER is set, and one of FARCALL_FLEET_SERVICE, FARCALL_FLEET_TASKS and "
                f"FARCALL_FLEET_IDLE_S is wrong: {error}"
            ) from error

    def wake(self, *, on_demand: bool = False) -> None:
        """See :class:`Fleet`."""
        self._scale(self.tasks, _ON_DEMAND if self.spot and on_demand else None)

    def sleep(self) -> None:
        """See :class:`Fleet`."""
        self._scale(0, _SPOT if self.spot else None)

    def _scale(self, tasks: int, provider: str | None) -> None:
        """Set the number of tasks, and where new ones run if a capacity provider is given."""
        import boto3  # imported by the few calls that need it: the import is slow
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        config = Config(connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S, retries={"max_attempts": 1})
        try:
            ecs = boto3.client("ecs", config=config)
            changes: dict[str, Any] = {"desiredCount": tasks}
            if provider:  # ECS takes another strategy only together with a new deployment
                changes["capacityProviderStrategy"] = [{"capacityProvider": provider, "weight": 1}]
                changes["forceNewDeployment"] = True
            ecs.update_service(cluster=self.cluster, service=self.service, **changes)
        except (BotoCoreError, ClientError) as error:
            raise Unavailable(f"The forwarders cannot be {'started' if tasks else 'stopped'}: {error}") from error
