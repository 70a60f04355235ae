"""TaPS benchmark: ``python -m benchmarks.taps [--quick] [--rounds N] [--python PATH]``: all executors in turn.

The interpreter has TaPS, its executors and Farcall. The executor ``farcall`` runs on the local tier, with an endpoint
of the same interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.engine.environments import run_driver
from benchmarks.report import RESULTS, new_report, parse_options, save
from benchmarks.taps.table import as_tables
from benchmarks.taps.workloads import CLOUD, EXECUTORS, KILLING, OBJECTS, RAISING
from farcall_local.endpoint import LocalEndpoint
from farcall_local.tier import LocalTier

_RESULTS: Final = "taps.json"
_DRIVER: Final = "benchmarks.taps.driver"
PYTHON: Final = Path(__file__).parents[2] / ".venv-taps" / "bin" / "python"
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""For each task: the executors run one task on each core."""


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=EXECUTORS, default=list(EXECUTORS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", type=Path, default=PYTHON, help="an interpreter with TaPS")
    parser.add_argument("--quick", action="store_true", help="one short round, which is printed and not written")
    options = parse_options(parser, _RESULTS)
    check_python(options.python)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rounds: dict[str, list[Any]] = {}
    report = new_report(rounds=rounds, failures={}, versions={})
    with tempfile.TemporaryDirectory(prefix="farcall-taps-") as directory, contextlib.ExitStack() as parts:
        variables = dict(_ONE_THREAD)
        if any(EXECUTORS[title]["name"] == CLOUD for title in options.only):
            variables |= parts.enter_context(deployment(Path(directory), options.python, variables))
        runs = {title: [title] for title in options.only}
        # One directory for all rounds: workers that stay remember where the store is.
        objects = ["--objects", str(Path(directory) / "objects")]
        runs |= {OBJECTS[title]: [title, *objects] for title in options.only if title in OBJECTS}
        for _ in range(1 if options.quick else options.rounds):
            for title, arguments in runs.items():
                found = _run(options.python, variables, *arguments, *(["--quick"] if options.quick else []))
                if isinstance(found, dict):
                    report["versions"] = found.pop("versions")
                    rounds.setdefault(title, []).append(found)
        for title in options.only:
            report["failures"][title] = _failures(options.python, variables, title)
    if options.quick and options.output == RESULTS / _RESULTS:
        print(as_tables(report))
        return
    save(report, options.output, as_tables)


def check_python(python: Path) -> None:
    """Look for TaPS. The package index has another ``taps``, which has no engine.

    :raises SystemExit: if this interpreter does not have it, or does not exist.
    """
    if not has_taps(python):
        sys.exit(
            f"{python} has no TaPS. Install it there as https://taps.proxystore.dev says: no package index has it."
        )


def has_taps(python: Path) -> bool:
    """Whether this interpreter exists, and has TaPS."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('taps.engine') is None)"
    return python.exists() and not subprocess.run([python, "-c", code], check=False, capture_output=True).returncode


@contextlib.contextmanager
def deployment(directory: Path, python: Path, variables: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """A local tier, and an endpoint with the interpreter of the tasks; yields the settings of a client."""
    with LocalTier(directory / "tier") as tier:
        environment = {**variables, **tier.environment()}
        with LocalEndpoint("taps", home=directory, environment=environment, python=python):
            yield {**tier.environment(), "FARCALL_HOME": str(directory)}


def _failures(python: Path, variables: Mapping[str, str], title: str) -> dict[str, Any]:
    """What failures look like. A killed worker comes last, in a program of its own, which may not outlive it."""
    seen: dict[str, Any] = {}
    for kinds in (RAISING, KILLING):
        found = _run(python, variables, title, "--failures", *kinds)
        seen |= dict.fromkeys(kinds, found) if isinstance(found, str) else found["failures"]
    return seen


def _run(python: Path, variables: Mapping[str, str], *arguments: str) -> dict[str, Any] | str:
    """What the driver found, or why it found nothing."""
    print(*arguments, "…", file=sys.stderr, flush=True)
    try:
        return run_driver(python, *arguments, driver=_DRIVER, variables=variables)
    except subprocess.CalledProcessError as error:
        return f"the program ended with status {error.returncode}"
    except (subprocess.SubprocessError, ValueError) as error:
        print(error, file=sys.stderr)
        return "no result"


if __name__ == "__main__":
    main()
