"""Runs a command line on a worker. The text of this module is sent to workers: it may import the standard library
only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

#: Seconds between SIGTERM, after the walltime, and SIGKILL.
GRACE_S = 5.0
#: ``timeout`` of the GNU coreutils ends with this code, too.
WALLTIME_CODE = 124
#: Limit of each stream in the result.
MAX_SNIPPET_BYTES = 4 * 1024 * 1024


class ShellResult:
    """Result of a command line.

    ``cmd`` is the command as it ran, ``stdout`` and ``stderr`` are the last lines that it wrote, ``returncode`` is its
    exit code (124 after the walltime), ``exception_name`` is None for 0.
    """

    def __init__(self, cmd: str, stdout: str, stderr: str, returncode: int, exception_name: str | None = None) -> None:
        self.cmd = cmd
        self.stdout = stdout
        self.stderr = stderr
        self.returncode = returncode
        self.exception_name = exception_name

    def __repr__(self) -> str:
        names = ["returncode", "cmd", *(["exception_name"] if self.exception_name else []), "stdout", "stderr"]
        return f"ShellResult({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __str__(self) -> str:
        shown = f"exit code: {self.returncode}\n   stdout:\n{_tail(self.stdout, 'stdout')}"
        if self.returncode != 0:
            shown += f"\n\n   stderr:\n{_tail(self.stderr, 'stderr')}"
            if self.exception_name:
                shown += f"\n\nexception: {self.exception_name}"
        return shown

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker that has only this text cannot import the class; the reader of the result can.
        fields = (self.cmd, self.stdout, self.stderr, self.returncode, self.exception_name)
        return eval, ("__import__('farcall').ShellResult(*fields)", {"fields": fields})


def run(
    cmd: str,
    *,
    stdout: str | None,
    stderr: str | None,
    walltime: float | None,
    snippet_lines: int,
    return_dict: bool,
    run_in_sandbox: bool,
    mpi: bool,
) -> ShellResult | dict[str, Any]:
    """Run a command line under bash and wait for it, at most ``walltime`` seconds.

    :raises RuntimeError: for ``mpi`` where no launcher is set, or the task has no nodes.
    """
    if mpi:
        if not os.environ.get("PARSL_MPI_PREFIX"):
            raise RuntimeError(
                "PARSL_MPI_PREFIX is not set: the executor's options must set num_nodes or num_ranks, "
                "and the endpoint must have an MPI launcher"
            )
        cmd = f"$PARSL_MPI_PREFIX {cmd}"
    place = _place(run_in_sandbox)
    code, failure = 0, None
    with _opened(stdout, place) as out, _opened(stderr, place) as err:
        starts = out.tell(), err.tell()
        process = subprocess.Popen(
            ["/bin/bash", "-c", cmd],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=place,
            start_new_session=True,
        )
        try:
            code = process.wait(walltime)
            failure = "subprocess.CalledProcessError" if code else None
        except subprocess.TimeoutExpired:
            code, failure = WALLTIME_CODE, "subprocess.TimeoutExpired"
        finally:
            _end(process)
        texts = [_last_lines(file, start, snippet_lines) for file, start in zip((out, err), starts, strict=True)]
    result = ShellResult(cmd, texts[0], texts[1], code, failure)
    return vars(result) if return_dict else result


def _place(run_in_sandbox: bool) -> Path:
    """The directory to run in: the endpoint's sandbox if it has one, or one of this task's own, or where we are."""
    given = os.environ.get("GC_TASK_SANDBOX_DIR")
    place = Path(given) if given else Path.cwd()
    if run_in_sandbox and not given:
        place /= os.environ.get("GC_TASK_UUID") or f"shell-{os.getpid()}"
    place.mkdir(parents=True, exist_ok=True)
    return place


@contextlib.contextmanager
def _opened(name: str | None, place: Path) -> Iterator[IO[bytes]]:
    """A file to append to, or a temporary one."""
    if name is None:
        with tempfile.TemporaryFile() as file:
            yield file
        return
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0, os.SEEK_END)
        yield file


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the command and its child processes, unless it has ended."""
    if process.poll() is not None:
        return
    for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # child processes that ignored SIGTERM


def _last_lines(file: IO[bytes], start: int, lines: int) -> str:
    """The last lines of the output since ``start``."""
    end = file.seek(0, os.SEEK_END)
    first = max(start, end - MAX_SNIPPET_BYTES)
    file.seek(first)
    text = file.read(end - first).decode(errors="replace")
    return "".join(text.splitlines(keepends=True)[-lines:]) if lines > 0 else ""


def _tail(text: str, name: str) -> str:
    """The last ten lines of a stream."""
    text = text.lstrip("\n").rstrip()
    shown = "\n".join(text[-1024:].splitlines()[-10:])
    return shown if shown == text else f"[... truncated; see .{name} for full output ...]\n{shown}"
