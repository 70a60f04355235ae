"""An endpoint that two submitters share, at each level of isolation that this machine has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import psutil
import pytest

from farcall_endpoint.host.isolation import bubblewrap, landlock
from tests.support.endpoint.endpoint_process import EndpointProcess, running_endpoint
from tests.support.endpoint.fake_cloud import FakeCloud
from tests.waiting import wait_until

ATTACKER: Final = "018f0000-0000-7000-8000-00000000000a"
VICTIM: Final = "018f0000-0000-7000-8000-00000000000b"

#: What this machine lacks for a level; empty if it has everything.
MISSING: Final = {"landlock": landlock.missing_alone(), "bubblewrap": bubblewrap.missing()}
LEVELS: Final = [
    pytest.param(level, marks=pytest.mark.skipif(bool(MISSING.get(level)), reason=MISSING.get(level, "")))
    for level in ("none", "process", "landlock", "bubblewrap")
]


def endpoint_at_each_level(
    *, workers: int, levels: Sequence[Any] = LEVELS, variables: Mapping[str, str] | None = None
) -> Any:
    """Return a fixture of a module: an endpoint whose workers are ready.

    :param variables: environment variables of the agent.
    """

    @pytest.fixture(scope="module", params=levels)
    def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
        home = tmp_path_factory.mktemp("home")
        with pytest.MonkeyPatch.context() as environment:
            for name, value in (variables or {}).items():
                environment.setenv(name, value)
            with running_endpoint(home, workers=workers, engine={"isolation": request.param}) as endpoint:
                wait_until(lambda: endpoint.directory.read_status().get("workers") == workers)
                yield endpoint

    return endpoint


@pytest.fixture
def cloud(endpoint: EndpointProcess) -> FakeCloud:
    """The cloud of a module's endpoint."""
    return endpoint.cloud


@pytest.fixture
def level(endpoint: EndpointProcess) -> str:
    """The isolation of a module's endpoint."""
    return str(endpoint.directory.read_status()["isolation"])


def victims_of(endpoint: EndpointProcess) -> list[psutil.Process]:
    """The processes of an endpoint that call themselves "victim"."""
    found = []
    for process in endpoint.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if process.name() == "victim" else []
    return found
