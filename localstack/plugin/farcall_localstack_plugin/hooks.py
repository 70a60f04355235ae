"""What happens when LocalStack starts and stops."""

from __future__ import annotations

import os
import signal
import threading

from localstack.runtime import hooks

from farcall_localstack_plugin import children
from farcall_localstack_plugin.settings import settings

__all__ = ["farcall_start", "farcall_stop"]


@hooks.on_infra_start()
def farcall_start() -> None:
    """Add what the core has no entry point for, and watch the driver."""
    _complete_api_gateway()
    _attach_secrets()
    _keep_objects_apart()
    if (lifeline := settings().lifeline_fd) is not None:
        threading.Thread(target=_stop_with_driver, args=(lifeline,), name="lifeline", daemon=True).start()


@hooks.on_infra_shutdown()
def farcall_stop() -> None:
    """Stop every process that we started."""
    children.stop_all()


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


def _stop_with_driver(lifeline_fd: int) -> None:
    """Block until the driver's end of the pipe is closed, by it or by its death, then stop LocalStack."""
    while os.read(lifeline_fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
