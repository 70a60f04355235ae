"""Which bundles a LocalStack can run: those for this Python, or those for Lambda's own image.

Our plugin runs functions and tasks as processes under the Python of whoever started LocalStack, and tells which one
that is. A LocalStack without it runs them in containers, of Lambda's image for the processor that the template names.
"""

from __future__ import annotations

import json
import platform
import sys
import urllib.error
import urllib.request
from typing import Final

from farcall_common.errors import ConfigurationError, Unavailable

__all__ = ["AUTO", "BUNDLES", "THIS_PYTHON", "target_named", "target_of"]

#: Which wheels the Python that runs this program can load.
THIS_PYTHON: Final = f"{sys.platform}-{platform.machine()}-{sys.implementation.cache_tag}"
AUTO: Final = "auto"
#: What can be asked for, and the app's target for it.
BUNDLES: Final = {"host": "localstack", "arm64": "localstack-arm64", "x86_64": "localstack-x86_64"}
_MACHINES: Final = {"aarch64": "arm64", "amd64": "x86_64"}  # where the operating system has another word than Lambda
_TIMEOUT_S: Final = 30.0


def target_of(endpoint_url: str, *, bundles: str = AUTO) -> str:
    """The app's target for the LocalStack at ``endpoint_url``; ``bundles`` is :data:`AUTO` or one of :data:`BUNDLES`.

    LocalStack does not tell the processor of its containers: it is taken to be this machine's.

    :raises ConfigurationError: if it cannot run them, or there are no such bundles.
    :raises Unavailable: if there is no LocalStack.
    """
    wanted = target_named(bundles) if bundles != AUTO else None
    python = _python_of(endpoint_url)
    if python is None:
        return wanted or BUNDLES[_processor()]
    if wanted not in (None, BUNDLES["host"]):
        raise ConfigurationError(
            f"the LocalStack at {endpoint_url} runs functions under {python}, and bundles for {bundles} are for "
            "containers of Lambda's image",
            hint="Leave --bundles out.",
        )
    if python != THIS_PYTHON:
        raise ConfigurationError(
            f"the LocalStack at {endpoint_url} runs functions under {python}, and this is {THIS_PYTHON}",
            hint="Deploy with the Python that started it: its wheels go into the bundles.",
        )
    return BUNDLES["host"]


def target_named(bundles: str) -> str:
    """The app's target for one of :data:`BUNDLES`.

    :raises ConfigurationError: if there are no such bundles.
    """
    if bundles not in BUNDLES:
        raise ConfigurationError(f"there are no bundles {bundles!r}", hint=f"Choose one of: {', '.join(BUNDLES)}.")
    return BUNDLES[bundles]


def _processor() -> str:
    machine = platform.machine().lower()
    processor = _MACHINES.get(machine, machine)
    if processor not in BUNDLES:
        raise ConfigurationError(
            f"Lambda has no image for {machine}", hint="Name what LocalStack's machine has with --bundles."
        )
    return processor


def _python_of(endpoint_url: str) -> str | None:
    """What the plugin says that functions run under; None if there is no plugin.

    :raises Unavailable: if there is no LocalStack.
    """
    _get(f"{endpoint_url}/_localstack/health")
    try:
        return str(json.loads(_get(f"{endpoint_url}/_localstack/farcall"))["python"])
    except _NotThere:
        return None


class _NotThere(Unavailable):
    """It answers, but not this."""


def _get(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the user's own LocalStack
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        with error:
            raise _NotThere(f"there is no LocalStack at {url}: HTTP {error.code}", hint=_HINT) from error
    except (OSError, ValueError) as error:
        raise Unavailable(f"there is no LocalStack at {url}: {error}", hint=_HINT) from error


_HINT: Final = "Start it, or set AWS_ENDPOINT_URL to where it is."
