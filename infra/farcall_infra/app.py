"""The CDK app: five stacks, wired together, and an optional one.

Synth needs no account, no look-ups and no docker. It downloads the wheels of the bundles and the database's CA bundle,
unless the working directory has the latter.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import aws_cdk as cdk
import typer
from cdk_nag import AwsSolutionsChecks

from farcall_infra.ca_bundle import keep_ca_bundle
from farcall_infra.constructs.metrics import Monitored
from farcall_infra.deployment import DEPLOYMENT_TAG, Deployment, deployment_from_context, stack_name
from farcall_infra.release import RELEASE_OUTPUT, this_release
from farcall_infra.stacks import AnalyticsStack, ApiStack, DataStack, ForwarderStack, NetworkStack, ObservabilityStack

#: Behaviour of the CDK that its next major version makes the default, and rules for all stacks.
FEATURE_FLAGS: Final[Mapping[str, object]] = {
    "@aws-cdk/core:defaultCrossStackReferences": "strong",
    "@aws-cdk/aws-iam:minimizePolicies": True,
    "@aws-cdk/core:checkSecretUsage": True,
    "@aws-cdk/aws-ecs:disableExplicitDeploymentControllerForCircuitBreaker": True,
    "@aws-cdk/aws-apigateway:disableCloudWatchRole": True,
}


#: The context with the stacks whose bundles are built; empty for templates alone, also in `cdk ls` and `cdk destroy`.
_BUNDLING: Final = "aws:cdk:bundling-stacks"


def add_stacks(app: cdk.App, deployment: Deployment) -> None:
    """Add the stacks of ``deployment`` to ``app``."""
    named = functools.partial(stack_name, deployment.name)
    network = NetworkStack(app, named("network"), deployment=deployment).network
    stores = DataStack(app, named("data"), deployment=deployment, network=network).stores
    api = ApiStack(app, named("api"), deployment=deployment, network=network, stores=stores)
    forwarder = ForwarderStack(app, named("forwarder"), deployment=deployment, network=network, stores=stores)
    if deployment.target.observed:
        monitored = Monitored(
            api=api.web_api.api,
            api_function=api.function,
            authorizer=api.authorizer,
            reconciler=api.reconciler,
            canary=api.canary,
            forwarder=forwarder.service,
            forwarder_logs=forwarder.log_group,
            targets=forwarder.targets,
            database=stores.database.instance,
            queue_nodes=stores.queue.nodes,
        )
        ObservabilityStack(app, named("observability"), deployment=deployment, monitored=monitored)
    if deployment.profile.analytics.enabled:
        AnalyticsStack(app, named("analytics"), deployment=deployment, network=network)
    forwarder.add_stack_dependency(api, "the forwarder needs the schema that the API's migration creates")
    cdk.Tags.of(app).add(DEPLOYMENT_TAG, deployment.name)
    for stack in app.node.children:
        if isinstance(stack, cdk.Stack):
            cdk.CfnOutput(stack, RELEASE_OUTPUT, value=this_release())


def synthesize(*, outdir: Path | None = None, context: dict[str, object] | None = None) -> Path:
    """Synthesise the app with the context of the CDK CLI and ``context``; returns the cloud assembly's directory.

    The region is that of ``context``, or the one to which the CDK CLI deploys (``CDK_DEFAULT_REGION``).
    cdk-nag checks templates for AWS, unless ``CDK_VALIDATION=false``; its report is in the assembly.

    :raises ConfigurationError: if the context does not describe a deployment, or the CA bundle cannot be downloaded.
    :raises RuntimeError: if cdk-nag finds something that no construct suppresses.
    """
    app = cdk.App(outdir=str(outdir) if outdir else None, context={**FEATURE_FLAGS, **(context or {})})
    region = {"region": os.environ.get("CDK_DEFAULT_REGION", "")}
    deployment = deployment_from_context({**region, **app.node.get_all_context()})
    if deployment.lacks_ca_bundle and app.node.try_get_context(_BUNDLING) != []:
        url, now = deployment.profile.database.authorities, dt.datetime.now(dt.UTC)
        found = keep_ca_bundle(url, Path.cwd(), now=now, echo=functools.partial(typer.echo, err=True))
        deployment = dataclasses.replace(deployment, ca_bundle=found)
    add_stacks(app, deployment)
    if deployment.target.checked:
        cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app))
    return Path(app.synth().directory)
