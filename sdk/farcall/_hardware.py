"""What a worker says of its machine. The function travels as its source text, so that workers need nothing of ours."""

from __future__ import annotations

import inspect
from typing import Final


def hardware_report() -> str:
    import os
    import platform
    import shutil
    import socket
    import subprocess
    import sys

    lines = {
        "host": socket.gethostname(),
        "python": sys.version.replace("\n", " "),
        "interpreter": sys.executable,
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": f"{os.cpu_count()}, of which {len(os.sched_getaffinity(0))} are for this process"
        if hasattr(os, "sched_getaffinity")
        else str(os.cpu_count()),
        "disk": f"{shutil.disk_usage('.').free / 1e9:.1f} GB free here",
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        lines["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB"
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
        lines["accelerators"] = listed.stdout.strip().replace("\n", "; ")
    return "\n".join(f"{name:>12}: {value}" for name, value in lines.items())


#: The text and the name of its function, as they are registered.
SOURCE: Final = (inspect.getsource(hardware_report), hardware_report.__name__)
