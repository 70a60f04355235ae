"""Start and shutdown hooks of LocalStack."""

from __future__ import annotations

import functools
import json
import os
import shutil
import threading
from typing import Any, Final

from localstack.runtime import hooks

from farcall_localstack_plugin import children
from farcall_localstack_plugin.settings import settings

#: Time limit of the cleanup in seconds; after it LocalStack ends anyway.
_CLEANUP_S: Final = 60.0


@hooks.on_infra_start()
def farcall_start() -> None:
    """Patch parts of the core that have no entry point, and monitor the driver."""
    _complete_api_gateway()
    _attach_secrets()
    _publish_versions()
    _separate_objects()
    _poll_often()
    _serve_own_paths()
    if (lifeline := settings().lifeline_fd) is not None:
        threading.Thread(target=_stop_with_driver, args=(lifeline,), name="lifeline", daemon=True).start()


@hooks.on_infra_shutdown()
def farcall_stop() -> None:
    """Stop all our processes and remove their data, because the driver may have ended."""
    children.stop_all()
    shutil.rmtree(settings().database_directory, ignore_errors=True)


def _complete_api_gateway() -> None:
    from localstack.services.apigateway.next_gen.execute_api import handlers

    from farcall_localstack_plugin import gateway_limits
    from farcall_localstack_plugin.authorizer import TokenAuthorizer

    gateway_limits.patch()
    handlers.preprocess_request.append(gateway_limits.check_request)
    handlers.preprocess_request.append(TokenAuthorizer())
    _use_response_templates()


def _use_response_templates() -> None:
    """Make API Gateway's own responses, without the integration, follow the JSON templates of their API: LocalStack's
    core stores these but responds in its own format."""
    from localstack.services.apigateway.next_gen.execute_api.gateway_response import get_gateway_response_or_default
    from localstack.services.apigateway.next_gen.execute_api.handlers.gateway_exception import GatewayExceptionHandler

    plain = GatewayExceptionHandler.create_exception_response

    def create_exception_response(handler: GatewayExceptionHandler, exception: Any, context: Any) -> Any:
        response = plain(handler, exception, context)
        configured = get_gateway_response_or_default(exception.type, context.deployment.rest_api.gateway_responses)
        if template := (configured.get("responseTemplates") or {}).get("application/json"):
            message = str(exception.message or "")
            quoted = template.replace("$context.error.messageString", json.dumps(message))
            for name, value in (context.context_variables.get("authorizer") or {}).items():
                quoted = quoted.replace(f"$context.authorizer.{name}", value)
            response.set_response(quoted.replace("$context.error.message", message))
        return response

    setattr(GatewayExceptionHandler, "create_exception_response", create_exception_response)  # noqa: B010 - a patch


def _attach_secrets() -> None:
    """Patch the core's provider in place: it takes precedence over an entry point of the same name."""
    from localstack.services.secretsmanager.resource_providers import (
        aws_secretsmanager_secrettargetattachment as attachment,
    )

    from farcall_localstack_plugin.providers import attach_secret

    setattr(attachment.SecretsManagerSecretTargetAttachmentProvider, "create", attach_secret)  # noqa: B010 - a patch


def _publish_versions() -> None:
    """Let an update of a stack publish versions of functions, and move aliases to them. The core cannot do so, and
    takes each change of a function for another function of its aliases and versions."""
    from localstack.services.lambda_.resource_providers.aws_lambda_version import LambdaVersionProvider
    from localstack.services.lambda_.resource_providers.lambda_alias import LambdaAliasProvider

    from farcall_localstack_plugin.providers import move_alias, publish_version

    LambdaVersionProvider.SCHEMA["createOnlyProperties"] = []
    LambdaAliasProvider.SCHEMA["createOnlyProperties"] = ["/properties/Name"]
    setattr(LambdaVersionProvider, "update", publish_version)  # noqa: B010 - a patch
    setattr(LambdaAliasProvider, "update", move_alias)  # noqa: B010 - a patch


def _separate_objects() -> None:
    """Give S3 its own directory: the default is a fixed one, which several LocalStacks would share."""
    from localstack.services.s3 import provider

    provider.DEFAULT_S3_TMP_DIR = str(settings().directory / "objects")


def _poll_often() -> None:
    """Poll the resources that a stack waits for ten times a second instead of once."""
    from localstack.services.cloudformation.resource_provider import ResourceProviderExecutor

    often = functools.partialmethod(ResourceProviderExecutor.deploy_loop, sleep_time=0.1)
    setattr(ResourceProviderExecutor, "deploy_loop", often)  # noqa: B010 - a patch


def _serve_own_paths() -> None:
    """Serve the tag of the Python that runs functions, which a deployment needs wheels for; and interrupt Spot tasks,
    which no AWS API can."""
    from localstack.http import Resource
    from localstack.services.internal import get_internal_apis

    get_internal_apis().add(Resource("/_localstack/farcall", _Python()))
    get_internal_apis().add(Resource("/_localstack/farcall/interrupt/<task_id>", _Interruption()))


class _Python:
    def on_get(self, _request: object) -> dict[str, str]:
        return {"python": settings().python_tag}


class _Interruption:
    def on_post(self, _request: object, task_id: str) -> dict[str, bool]:
        from farcall_localstack_plugin import ecs

        return {"interrupted": any(service.interrupt(task_id) for service in list(ecs.services.values()))}


def _stop_with_driver(lifeline_fd: int) -> None:
    """Block until the driver closes its end of the pipe, or ends; then end LocalStack and all its processes. After a
    byte in the pipe LocalStack keeps running.

    LocalStack's own shutdown is not used: it waits for threads that may take minutes, and does nothing while LocalStack
    still starts.
    """
    if not os.read(lifeline_fd, 1):
        children.stop_all()
        children.end_group(settings().database_directory, within_s=_CLEANUP_S)
