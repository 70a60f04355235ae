"""Warm starts: ``python -m benchmarks.warm_starts [--count N] [--one-shots N]``, as root.

Measures with the launcher that a manager has, which also delivers the tasks: forks with NumPy and pandas in a container
of an image's own root, as root and as an ordinary user; starts by technology; functions of FunctionBench from request
to result; memory; one-shot workers. What is compared takes turns. With ``--one-shots`` only the last, for long, with
what the node has between its parts.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

import psutil

from benchmarks.report import RESULTS, Figure, new_report, parse_options, save
from benchmarks.warm_starts import forks, technologies, workloads
from benchmarks.warm_starts.plot import draw
from benchmarks.warm_starts.table import as_tables, sustained_tables

_RESULTS: Final = "warm_starts.json"
_STARTS: Final = 20
"""Of each technology and of each function in each way."""


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=400, help="forks of each kind")
    parser.add_argument("--one-shots", type=int, help="only this: so many one-shot workers, and a tenth in containers")
    options = parse_options(parser, _RESULTS)
    if os.geteuid() != 0:
        sys.exit("Only root can make the containers and the ordinary user of this benchmark.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with tempfile.TemporaryDirectory(prefix="farcall-bench-") as name:
        Path(name).chmod(0o755)
        if options.one_shots:
            report = new_report(one_shots=forks.sustained(Path(name), options.one_shots))
            default = options.output == RESULTS / _RESULTS
            path = RESULTS / "warm_one_shots.json" if default else options.output
            save(report, path, sustained_tables)
            return
        before = _present()
        report = new_report(user="root")
        figures = forks.measure(Path(name), options.count)
        starts = min(_STARTS, options.count)
        report["technologies"] = technologies.measure(Path(name), starts)
        report["functions"] = workloads.measure(Path(name), starts)
        left = sum(max(0, now - then) for now, then in zip(_present(), before, strict=True))
        left += sum(name in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    figures.append(Figure("processes, descriptors and mounts that are left", left, "", "0", not left))
    report["figures"] = [dataclasses.asdict(figure) for figure in figures]
    draw(report, options.output.with_suffix(".png"))
    save(report, options.output, as_tables)


def _present() -> tuple[int, int, int]:
    """Processes below this one, its descriptors, and the mounts that it sees."""
    me = psutil.Process()
    return len(me.children(recursive=True)), me.num_fds(), len(Path("/proc/self/mounts").read_text().splitlines())


if __name__ == "__main__":
    main()
