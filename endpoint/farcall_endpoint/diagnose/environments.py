"""Environments of tasks for a diagnosis: technologies, namespaces, Landlock, cgroups, CPU shares and uv, each by a
try."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from farcall_endpoint.environments.prepare.technologies import without_forks
from farcall_endpoint.environments.runners.registry import RUNNERS
from farcall_endpoint.environments.runners.uv import index_command
from farcall_endpoint.host import cgroups, process_reaper
from farcall_endpoint.host.isolation import Isolation, best_of, bubblewrap
from farcall_endpoint.qos.actuators import choose
from farcall_endpoint.worker import namespaces

_LIMIT_S: Final = 20.0
_MAX_SHOWN: Final = 300
_UNTRIED: Final = "could not be tried: "
_KERNEL: Final = (
    "user/max_user_namespaces",
    "user/max_pid_namespaces",
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
)
_TRY_TECHNOLOGIES: Final = f"from {__name__} import main; main()"
_TRY_NAMESPACES: Final = f"from {namespaces.__name__} import missing; print(missing())"


def environments(environ: Mapping[str, str], *, index_url: str, with_network: bool) -> dict[str, Any]:
    """Check what this machine allows. A result is an empty text if it works, else the reason that the system gives.
    All checks run at the same time, in processes that end within seconds.

    :param index_url: package index; empty: uv's default.
    """
    parts: dict[str, Callable[[], object]] = {
        "technologies": lambda: _technologies(environ),
        "namespaces_of_forks": lambda: _words([sys.executable, "-P", "-c", _TRY_NAMESPACES], environ),
        "bubblewrap_isolation": bubblewrap.missing,
        "without_forks": lambda: {name: without_forks(name, confined=False) for name in RUNNERS},
        "refused_submitters": lambda: best_of(Isolation.AUTO).refusal,
        "cgroups": lambda: [str(each.path) for each in cgroups.writable_hierarchies()],
        "cpu_shares": _cpu_shares,
        "kernel": lambda: {name: _setting(name) for name in _KERNEL},
    }
    if with_network:
        parts["uv_index"] = lambda: _index(environ, index_url)
    with concurrent.futures.ThreadPoolExecutor(len(parts)) as threads:
        found = {name: threads.submit(part) for name, part in parts.items()}
        return {name: future.result() for name, future in found.items()}


def findings(facts: Mapping[str, Any], *, needed: str) -> list[tuple[bool | None, str]]:
    """Return findings about the facts for users: whether a finding is good, and its text.

    :param needed: the technology of the endpoint's own environment on this machine; empty: none.
    """
    technologies: dict[str, str] = facts["technologies"]
    working = sorted(name for name, reason in technologies.items() if not reason)
    absent = sorted(name for name, reason in technologies.items() if reason.endswith("is not installed"))
    untried = sorted(name for name, reason in technologies.items() if reason.startswith(_UNTRIED))
    found: list[tuple[bool | None, str]] = [
        (None, f"environments: {reason}")
        for name, reason in sorted(technologies.items())
        if reason and name not in (*absent, *untried)
    ]
    if working or not untried:
        found.insert(0, (True, f"environments that work on this machine: {', '.join(working) or 'none'}"))
    if untried:
        reason = technologies[untried[0]].removeprefix(_UNTRIED)
        found.append((None, f"environments that could not be tried: {', '.join(untried)}: {reason}"))
    if absent:
        found.append((None, f"environments whose programs are not installed: {', '.join(absent)}"))
    if needed and technologies.get(needed) and needed not in untried:
        found.append((False, f"container_type: {needed} does not work on this machine: {technologies[needed]}"))
    if facts["refused_submitters"]:
        found.append((None, f"tasks of other submitters are refused: {facts['refused_submitters']}"))
    elif isolation := facts["bubblewrap_isolation"]:
        found.append((None, f"workers of other submitters are confined by Landlock only: {isolation}"))
    else:
        found.append((True, "workers of other submitters see their own files only (bubblewrap)"))
    if reason := facts["namespaces_of_forks"]:
        instead = "so each worker in a container is a fresh one"
        found.append((None, f"forks of templates cannot have namespaces of their own here, {instead}: {reason}"))
    else:
        found.append((True, "forks of templates can have namespaces of their own on this machine"))
    fresh: dict[str, str] = facts["without_forks"]
    for reason in sorted({reason for name, reason in fresh.items() if reason and name in working}):
        names = ", ".join(name for name in working if fresh.get(name) == reason)
        found.append((None, f"each worker of {names} is a fresh container: {reason}"))
    if not facts["cgroups"]:
        found.append((None, "no cgroup can be written here: processes of workers are found by their process tree"))
    shares: dict[str, str] = facts["cpu_shares"]
    if actuator := next((name for name, reason in shares.items() if not reason), ""):
        found.append((True, f"functions can have CPU shares of their own: {actuator}"))
    else:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in shares.items())
        found.append((None, f"functions can have no CPU shares of their own here: {reasons}"))
    if "uv_index" in facts:
        reason = facts["uv_index"]
        found.append((not reason, f"uv's package index: {reason or 'answers'}"))
    return found


def _technologies(environ: Mapping[str, str]) -> dict[str, str]:
    """The technologies are tried in a process of its own, as this starts containers."""
    return read_tried(_output([sys.executable, "-P", "-c", _TRY_TECHNOLOGIES], environ))


def read_tried(output: bytes) -> dict[str, str]:
    """Why each technology does not work, by the lines of :func:`main` and what else was printed."""
    found, rest = dict[str, str](), list[bytes]()
    for line in output.splitlines():
        try:
            name, found[name] = msgspec.json.decode(line, type=tuple[str, str])
        except msgspec.DecodeError:
            rest.append(line)
    return dict.fromkeys(RUNNERS, f"{_UNTRIED}{_shown(b' '.join(rest))}") | found


def main() -> None:
    """Try all technologies, and print for each, as soon as it is known, a line with its name and why it does not
    work."""
    with concurrent.futures.ThreadPoolExecutor(len(RUNNERS)) as threads:
        tries = {threads.submit(runner.missing): name for name, runner in RUNNERS.items()}
        for done in concurrent.futures.as_completed(tries):
            sys.stdout.write(msgspec.json.encode((tries[done], done.result())).decode() + "\n")
            sys.stdout.flush()


def _cpu_shares() -> dict[str, str]:
    """Why each actuator of CPU shares does not work, the best one first; empty for those that work."""
    groups = cgroups.Cgroups(cgroups.writable_hierarchies(), remove_leftovers=False)
    try:
        return dict(choose(groups).reasons)
    finally:
        groups.close()


def _index(environ: Mapping[str, str], index_url: str) -> str:
    """Why uv finds no packages, in its words: it looks for one that every index has."""
    try:
        command = index_command(index_url)
    except OSError as error:
        return str(error)
    return _words(command, {**environ, "UV_HTTP_RETRIES": "0"}, given=b"pip\n")


def _words(command: Sequence[str], environ: Mapping[str, str], *, given: bytes = b"") -> str:
    return _shown(_output(command, environ, given=given))


def _output(command: Sequence[str], environ: Mapping[str, str], *, given: bytes = b"") -> bytes:
    """Return the output of a command. After :data:`_LIMIT_S`, the command is killed with its descendants."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environ),
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(given, timeout=_LIMIT_S)[0]
        except subprocess.TimeoutExpired as late:
            return (late.output or b"") + f"\nno answer within {_LIMIT_S:.0f} s".encode()
        finally:
            process_reaper.kill_trees({process.pid})


def _shown(output: bytes) -> str:
    return " ".join(output.decode(errors="replace").split())[-_MAX_SHOWN:]


def _setting(name: str) -> str:
    """A setting of the kernel; empty if it has none of that name."""
    try:
        return (Path("/proc/sys") / name).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
