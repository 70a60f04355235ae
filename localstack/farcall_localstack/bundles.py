"""Choice of the bundles for a LocalStack: wheels for this Python, or for Lambda's own image.

Our plugin runs functions and tasks as processes under the Python of the process that started LocalStack, and reports
its version. Without the plugin, LocalStack runs them in containers, from Lambda's image for the template's processor.
"""

from __future__ import annotations

import json
import platform
import sys
import urllib.error
import urllib.request
from typing import Final

from farcall_common.errors import ConfigurationError, Unavailable

#: The tag of the wheels that this Python can load.
THIS_PYTHON: Final = f"{sys.platform}-{platform.machine()}-{sys.implementation.cache_tag}"
AUTO: Final = "auto"
#: The values of ``--bundles``, and the app's target for each.
BUNDLES: Final = {"host": "localstack", "arm64": "localstack-arm64", "x86_64": "localstack-x86_64"}
_MACHINES: Final = {"aarch64": "arm64", "amd64": "x86_64"}  # names of the operating system that differ from Lambda's
_TIMEOUT_S: Final = 30.0


def target_of(endpoint_url: str, *, bundles: str = AUTO) -> str:
    """The app's target for the LocalStack at ``endpoint_url``; ``bundles`` is :data:`AUTO` or one of :data:`BUNDLES`.

    LocalStack does not report the processor of its containers: this machine's is assumed.

    :raises ConfigurationError: if that LocalStack cannot run them, or ``bundles`` is unknown.
    :raises Unavailable: if there is no LocalStack.
    """
    wanted = target_named(bundles) if bundles != AUTO else None
    python = _python_of(endpoint_url)
    if python is None:
        return wanted or BUNDLES[_processor()]
    if wanted not in (None, BUNDLES["host"]):
        raise ConfigurationError(
            f"the LocalStack at {endpoint_url} runs functions under {python}, but bundles for {bundles} need "
            "containers of Lambda's image",
            hint="Omit --bundles.",
        )
    if python != THIS_PYTHON:
        raise ConfigurationError(
            f"the LocalStack at {endpoint_url} runs functions under {python}, but this Python is {THIS_PYTHON}",
            hint="Deploy with the Python that started LocalStack: the bundles contain wheels for it.",
        )
    return BUNDLES["host"]


def target_named(bundles: str) -> str:
    """The app's target for one of :data:`BUNDLES`.

    :raises ConfigurationError: if ``bundles`` is unknown.
    """
    if bundles not in BUNDLES:
        raise ConfigurationError(f"unknown bundles {bundles!r}", hint=f"Choose one of: {', '.join(BUNDLES)}.")
    return BUNDLES[bundles]


def _processor() -> str:
    machine = platform.machine().lower()
    processor = _MACHINES.get(machine, machine)
    if processor not in BUNDLES:
        raise ConfigurationError(
            f"Lambda has no image for {machine}", hint="Name the processor of LocalStack's machine with --bundles."
        )
    return processor


def _python_of(endpoint_url: str) -> str | None:
    """The Python that runs functions, as reported by the plugin; None without the plugin.

    :raises Unavailable: if there is no LocalStack.
    """
    _get(f"{endpoint_url}/_localstack/health")
    try:
        return str(json.loads(_get(f"{endpoint_url}/_localstack/farcall"))["python"])
    except _NotThere:
        return None


class _NotThere(Unavailable):
    """The server answers with an HTTP error."""


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


_HINT: Final = "Start LocalStack, or set AWS_ENDPOINT_URL to its address."
