"""What happens when LocalStack starts and stops."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from typing import Final

from localstack.runtime import hooks

from farcall_localstack_plugin import children
from farcall_localstack_plugin.settings import settings

__all__ = ["farcall_start", "farcall_stop"]

#: For so long it is tried to leave nothing behind, in seconds, before LocalStack ends anyway.
_LEAVE_NOTHING_S: Final = 60.0


@hooks.on_infra_start()
def farcall_start() -> None:
    """Add what the core has no entry point for, and watch the driver."""
    _complete_api_gateway()
    _attach_secrets()
    _keep_objects_apart()
    _look_often()
    _say_what_runs_functions()
    if (lifeline := settings().lifeline_fd) is not None:
        threading.Thread(target=_stop_with_driver, args=(lifeline,), name="lifeline", daemon=True).start()


@hooks.on_infra_shutdown()
def farcall_stop() -> None:
    """Stop every process that we started; the driver may be gone, so what they stored goes here."""
    children.stop_all()
    shutil.rmtree(settings().database_directory, ignore_errors=True)


def _complete_api_gateway() -> None:
    from localstack.services.apigateway.next_gen.execute_api import handlers

    from farcall_localstack_plugin.authorizer import TokenAuthorizer
    from farcall_localstack_plugin.gateway_responses import use_templates

    handlers.preprocess_request.append(TokenAuthorizer())
    use_templates()


def _attach_secrets() -> None:
    """A provider that the core has already wins over an entry point of the same name, so it is changed in place."""
    from localstack.services.secretsmanager.resource_providers import (
        aws_secretsmanager_secrettargetattachment as attachment,
    )

    from farcall_localstack_plugin.providers import attach_secret

    setattr(attachment.SecretsManagerSecretTargetAttachmentProvider, "create", attach_secret)  # noqa: B010 - a patch


def _keep_objects_apart() -> None:
    """S3's objects are in one fixed directory by default, which several LocalStacks would share."""
    from localstack.services.s3 import provider

    provider.DEFAULT_S3_TMP_DIR = str(settings().directory / "objects")


def _look_often() -> None:
    """What a stack waits for is looked at ten times a second and not once: some functions, a service, a database."""
    from localstack.services.cloudformation.resource_provider import ResourceProviderExecutor

    often = functools.partialmethod(ResourceProviderExecutor.deploy_loop, sleep_time=0.1)
    setattr(ResourceProviderExecutor, "deploy_loop", often)  # noqa: B010 - a patch


def _say_what_runs_functions() -> None:
    """Whoever deploys has to bring wheels for this Python, and may not be who started us."""
    from localstack.http import Resource
    from localstack.services.internal import get_internal_apis

    get_internal_apis().add(Resource("/_localstack/farcall", _Python()))


class _Python:
    def on_get(self, _request: object) -> dict[str, str]:
        return {"python": settings().python_tag}


def _stop_with_driver(lifeline_fd: int) -> None:
    """Block until the driver's end of the pipe is closed, by it or by its death, then end LocalStack and all that it
    started. A byte before that lets it run on.

    LocalStack's own shutdown is not asked for: it waits for threads that may wait for minutes, and does nothing at all
    when it is asked for while LocalStack still starts.
    """
    if not os.read(lifeline_fd, 1):
        children.stop_all()
        children.end_group(settings().database_directory, within_s=_LEAVE_NOTHING_S)
