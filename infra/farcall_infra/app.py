"""The CDK app: four stacks, wired together. Synth is pure: no account, no network look-ups, no docker."""

from __future__ import annotations

from pathlib import Path

import aws_cdk as cdk

from farcall_infra.deployment import Deployment, deployment_from_context
from farcall_infra.stacks.api import ApiStack
from farcall_infra.stacks.data import DataStack
from farcall_infra.stacks.forwarder import ForwarderStack
from farcall_infra.stacks.network import NetworkStack

__all__ = ["add_stacks", "synthesize"]


def add_stacks(app: cdk.App, deployment: Deployment) -> None:
    """Add the stacks of ``deployment`` to ``app``."""
    name = deployment.name
    network = NetworkStack(app, f"{name}-network", deployment=deployment).network
    stores = DataStack(app, f"{name}-data", deployment=deployment, network=network).stores
    api = ApiStack(app, f"{name}-api", deployment=deployment, network=network, stores=stores)
    forwarder = ForwarderStack(app, f"{name}-forwarder", deployment=deployment, network=network, stores=stores)
    forwarder.add_stack_dependency(api, "the forwarder needs the schema that the API's migration makes")
    cdk.Tags.of(app).add("farcall:deployment", name)


def synthesize(*, outdir: Path | None = None, context: dict[str, object] | None = None) -> Path:
    """Synthesise the app with the context of the CDK CLI and ``context``; returns the cloud assembly's directory.

    :raises ConfigurationError: if the context does not describe a deployment.
    """
    app = cdk.App(outdir=str(outdir) if outdir else None, context=context)
    add_stacks(app, deployment_from_context(app.node.try_get_context))
    return Path(app.synth().directory)
