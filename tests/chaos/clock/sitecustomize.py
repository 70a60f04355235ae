"""Moves the wall clock of one process: the programs of the chaos test find this file on their PYTHONPATH.

``CHAOS_CLOCKS`` names a folder. A process that runs module ``m`` (``python -m m``) adds the number in its file ``m``
(seconds, as a double) to ``time.time`` and ``time.time_ns``; the test writes it while the process runs.
"""

import mmap
import os
import pathlib
import struct
import sys
import time


def _move_clock(path: pathlib.Path) -> None:
    with path.open("rb") as file:
        offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    unpack, now, now_ns = struct.Struct("d").unpack_from, time.time, time.time_ns
    time.time = lambda: now() + unpack(offset)[0]
    time.time_ns = lambda: now_ns() + int(unpack(offset)[0] * 1e9)


if "CHAOS_CLOCKS" in os.environ and "-m" in sys.orig_argv[:-1]:
    _file = pathlib.Path(os.environ["CHAOS_CLOCKS"], sys.orig_argv[sys.orig_argv.index("-m") + 1])
    if _file.exists():
        _move_clock(_file)
