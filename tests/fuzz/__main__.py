"""``python -m tests.fuzz [SECONDS]``: coverage-guided fuzzing by atheris, each target for so many seconds (60).

Begins with the golden bytes and with what earlier runs have found interesting (``build/fuzz``). An input that breaks a
promise is left there as ``crash-…`` and printed; what it shows becomes a unit test beside the fix.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

_FOLDER: Final = Path("build/fuzz")
_MAX_INPUT_BYTES: Final = 4096
_MEMORY_MB: Final = 1024


def main() -> int:
    """Run all targets, each in a process of its own: the fuzzer ends its process."""
    if len(sys.argv) == 3:
        _fuzz(sys.argv[1], seconds=int(sys.argv[2]))
    seconds = sys.argv[1] if len(sys.argv) > 1 else "60"
    failed = 0
    for name in ("codec", "forwarder", "channel", "files", "blocks"):
        failed |= subprocess.run([sys.executable, "-m", "tests.fuzz", name, seconds], check=False).returncode
    return int(failed != 0)


def _fuzz(name: str, *, seconds: int) -> None:
    import atheris  # only in the dependency group `fuzz`

    with atheris.instrument_imports(include=["farcall_common.wire", "farcall_forwarder", "farcall_endpoint"]):
        from tests.fuzz import endpoint, targets
        from tests.fuzz.frames import pack

    is_of_endpoint = name in endpoint.TARGETS
    target = endpoint.TARGETS[name] if is_of_endpoint else targets.TARGETS[name]
    found = [pack(each) if name == "channel" else each[0] for each in endpoint.seeds(name)] if is_of_endpoint else None

    corpus = _FOLDER / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(targets.seeds(name) if found is None else found):
        (corpus / f"seed-{number:03}").write_bytes(seed)
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={_MAX_INPUT_BYTES}",
        f"-rss_limit_mb={_MEMORY_MB}",
        "-timeout=10",
        "-print_final_stats=1",
        "-verbosity=1",
        f"-artifact_prefix={_FOLDER / name}-",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *options], target, enable_python_coverage=True)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
