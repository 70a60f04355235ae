"""Actuators: set the CPU shares of functions on a node, by what the machine permits.

The best one is used: cgroups of version 2, cgroups of version 1, autogroups, or none. Whether one works is tried, not
read: files that look writable often are not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from farcall_endpoint.config.settings import ActuatorName
from farcall_endpoint.host.cgroups import Cgroups, own_hierarchies
from farcall_endpoint.qos import autogroup
from farcall_endpoint.qos.autogroup import AutogroupShares
from farcall_endpoint.qos.cgroup_shares import CgroupShares, describe_error, hierarchy_of, try_directory
from farcall_endpoint.qos.weights import check_weight

_CGROUP_VERSIONS: Final = (2, 1)
"""The best first."""

_NAMES: Final[Mapping[ActuatorName, str]] = {
    "cgroup2": "cgroup v2",
    "cgroup1": "cgroup v1",
    "autogroup": "autogroup",
}

_WAITING: Final = "import sys; print(flush=True); sys.stdin.read()"


class Actuator(Protocol):
    """Gives the processes of functions their shares of the CPUs. Not for several threads.

    A weight is a number in which 100 is the ordinary one; 20 to 2000 are used, and 1 to 10,000 possible. When two
    functions want one CPU, it is divided in the ratio of their weights, however many processes each of them has. What
    one does not use, the other gets. How weights become numbers of the kernel:

    - cgroup v2: ``cpu.weight`` is the weight.
    - cgroup v1: ``cpu.shares`` is 1024 for a weight of 100, in proportion.
    - autogroup: nice 0 for the largest weight, and for the others what is nearest to their ratio to it, in steps of
      about 1.25, down to 1/68. One change in 100 ms.
    - none: nothing.

    No method raises ``OSError``: a process that has ended is left out, a group that was removed is made again, and
    :attr:`problem` says what does not work.
    """

    @property
    def name(self) -> str:
        """Name of the backend for display: ``cgroup v2``, ``cgroup v1``, ``autogroup`` or ``none``."""

    @property
    def problem(self) -> str:
        """The last failure, in the kernel's words; empty if there is none."""

    def join(self, pid: int, function: str) -> None:
        """Count a worker process with all its descendants, also later ones, to a function, and to no other any more.

        This is quick for a process that has joined the same function already. Otherwise it takes the kernel up to 30
        ms with cgroups, and takes effect at the next :meth:`tick` with autogroups.

        :param pid: of a process in a session of its own.
        :param function: any text.
        """

    def set_weights(self, weights: Mapping[str, float], running: Mapping[str, int] | None = None) -> None:
        """Set the weights of these functions; others keep theirs, which is 100 at first. Call it at each interval of
        control: it also tries again what did not work.

        :param running: how many processes of each function compute now, for backends that give each of them its part
            of a weight; not given: all do.
        :raises ValueError: for a weight that is not a positive number.
        """

    def tick(self) -> float | None:
        """Do what could not be done at once. The seconds after which to call it again; None: nothing is left to do."""

    def forget(self, function: str) -> None:
        """Remove a function. Its processes get their ordinary share again."""

    def close(self) -> None:
        """Remove all groups that it has made. With autogroups, processes that still run keep their nice values."""


class NoActuator:
    """The actuator of a machine that permits none. The order of dispatch is the only means then."""

    def __init__(self, problem: str = "") -> None:
        self.name = "none"
        self.problem = problem

    def join(self, pid: int, function: str) -> None:
        """Do nothing."""

    def set_weights(self, weights: Mapping[str, float], running: Mapping[str, int] | None = None) -> None:  # noqa: ARG002
        """Only look whether they are weights."""
        for weight in weights.values():
            check_weight(weight)

    def tick(self) -> float | None:
        """Do nothing."""
        return None

    def forget(self, function: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The best actuator that this machine permits."""

    actuator: Actuator
    reasons: Mapping[str, str]
    """Why each backend does not work, in the kernel's words; empty for one that works. The best one is the first."""


def choose(cgroups: Cgroups, wanted: ActuatorName = "auto") -> Choice:
    """Try all actuators on this machine; takes a moment, and 2 s at most.

    :param cgroups: of this process, for the groups of functions.
    :param wanted: the only one to choose, if it works.
    """
    if wanted == "none":
        return Choice(NoActuator(), {})
    shares = [CgroupShares(cgroups, version) for version in _CGROUP_VERSIONS]
    own = own_hierarchies()
    autogroups = AutogroupShares()
    with _trial_process() as (pid, problem):
        # Before the process is in a cgroup, as autogroups work in the uppermost one only.
        no_autogroup = problem or autogroup.unsupported_reason(pid, hierarchy_of(own, 1) or hierarchy_of(own, 2))
        reasons = {
            each.name: problem or _missing(cgroups, each.version) or each.unsupported_reason(pid) for each in shares
        }
    reasons[autogroups.name] = no_autogroup
    actuators: list[Actuator] = [*shares, autogroups]
    if wanted != "auto":
        actuators = [each for each in actuators if each.name == _NAMES[wanted]]
    best = next((each for each in actuators if not reasons[each.name]), None)
    return Choice(best or NoActuator("; ".join(f"{name}: {reason}" for name, reason in reasons.items())), reasons)


def _missing(cgroups: Cgroups, version: int) -> str:
    """Why this process has no groups in the hierarchy of a version."""
    if hierarchy_of(cgroups.hierarchies, version) is not None:
        return ""
    own = hierarchy_of(own_hierarchies(), version)
    if own is None:
        return "not mounted, or the own group is outside of what is mounted"
    return try_directory(own.path) or f"{own.path}: no group was made in it"


@contextlib.contextmanager
def _trial_process() -> Iterator[tuple[int, str]]:
    """A process that waits, in a session of its own; or why there is none."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WAITING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        yield 0, describe_error(error)
        return
    with process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # before it is its own program, /proc may not let its user write
            yield process.pid, ""
        finally:
            process.kill()
