"""Section ``qos``: how the endpoint holds latency targets."""

from __future__ import annotations

from typing import Annotated

import msgspec

from farcall_endpoint.config.section import FieldProblem, Section
from farcall_endpoint.config.settings import DEFAULT_WEIGHT, ActuatorName, Admission, PolicyName, QosSettings

_Weight = Annotated[float, msgspec.Meta(ge=1, le=10_000)]


class QosConfig(Section, frozen=True, kw_only=True):
    """Latency targets of functions. Calls with a target run on workers of their own, and get a share of the processors
    that follows their latency; others are batch work."""

    policy: Annotated[
        PolicyName,
        msgspec.Meta(
            description="Choice of the shares: pi holds the percentile of the last seconds below the target, threshold "
            "moves them by a step at each call, static are those of weights, none leaves all alike; short-first "
            "starts the shortest call first, as many as there are processors."
        ),
    ] = "pi"
    actuator: Annotated[
        ActuatorName,
        msgspec.Meta(
            description="Means to set the shares: cgroup2, cgroup1, autogroup (for ordinary users), none; auto is the "
            "best that works on a node."
        ),
    ] = "auto"
    admission: Annotated[
        Admission,
        msgspec.Meta(
            description="Calls whose target cannot be held as things are: warn accepts them with a warning, refuse "
            "refuses them for a while."
        ),
    ] = "warn"
    latency_workers: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=10_000)] | None,
        msgspec.Meta(
            description="Most calls with a target that run at a time on a node, beyond its workers; default: as many "
            "as those, and 0 where workers have cores, memory or accelerators of their own: then such calls come first."
        ),
    ] = None
    min_weight: Annotated[
        _Weight, msgspec.Meta(description="Least weight of a function with a target; all batch work together has 100.")
    ] = DEFAULT_WEIGHT
    max_weight: Annotated[_Weight, msgspec.Meta(description="Largest weight of a function with a target.")] = 2000.0
    max_weights: Annotated[
        dict[Annotated[str, msgspec.Meta(min_length=1)], _Weight],
        msgspec.Meta(
            max_length=1000,
            description="Largest weight of all targets of another submitter together, by identity; a service account "
            "counts as its creator. Calls of submitters that are not named run as batch work, whatever their target.",
        ),
    ] = msgspec.field(default_factory=dict)
    batch_share: Annotated[
        float,
        msgspec.Meta(
            ge=0.01, le=1, description="Part of the processors that batch work keeps, as far as min_weight permits it."
        ),
    ] = 0.05
    interval: Annotated[
        float, msgspec.Meta(ge=0.05, le=60, description="Seconds between two decisions about the shares.")
    ] = 0.25
    weights: Annotated[
        dict[Annotated[str, msgspec.Meta(min_length=1)], _Weight],
        msgspec.Meta(
            max_length=1000, description="Weights by the name of a function that the owner calls, for policy: static."
        ),
    ] = msgspec.field(default_factory=dict)
    threshold_ratio: Annotated[
        float,
        msgspec.Meta(gt=1, le=1000, description="With policy: threshold, the multiple of its baseline of a slow call."),
    ] = 2.0
    threshold_step: Annotated[
        int, msgspec.Meta(ge=1, le=100_000, description="With policy: threshold, the step, in shares of 512.")
    ] = 20
    threshold_steps: Annotated[
        dict[Annotated[str, msgspec.Meta(min_length=1)], Annotated[int, msgspec.Meta(ge=1, le=100_000)]],
        msgspec.Meta(max_length=1000, description="The same by the name of a function that the owner calls."),
    ] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.min_weight > self.max_weight:
            raise FieldProblem("min_weight", "min_weight is above max_weight", fix="swap them")
        if self.weights and self.policy != "static":
            raise FieldProblem("weights", f"policy {self.policy} sets the weights itself", fix="set policy: static")

    @property
    def settings(self) -> QosSettings:
        """The same for agent and managers."""
        return QosSettings(
            policy=self.policy,
            actuator=self.actuator,
            interval_s=self.interval,
            min_weight=self.min_weight,
            max_weight=self.max_weight,
            max_weights=self.max_weights,
            batch_share=self.batch_share,
            latency_workers=self.latency_workers,
            weights=self.weights,
            ratio=self.threshold_ratio,
            delta=self.threshold_step,
            deltas=self.threshold_steps,
            admission=self.admission,
        )
