"""Shell functions: command lines that run on an endpoint as functions."""

from __future__ import annotations

import functools
import inspect
import keyword
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, cast, overload

from farcall import _shell_remote
from farcall._shell_remote import ShellResult

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # checkers bring it along

    R = TypeVar("R", default=ShellResult)
else:
    from typing import TypeVar

    R = TypeVar("R")


class ShellFunction(Generic[R]):
    """A command line that is called like a function, and returns a :class:`ShellResult`.

    ::

        count = ShellFunction("wc -l {path}", walltime=60)
        result = executor.submit(count, path="/data/run7.log").result()
        print(result.returncode, result.stdout)

    It is sent as source text: workers need bash, any version of Python, and no package of ours.

    :param cmd: the command line, run by bash. Fields in braces are replaced by the keyword arguments of the call, as
        by :meth:`str.format`: arguments are not quoted, and braces of the shell are doubled.
    :param stdout: a file on the worker's machine to which standard output is appended; else it is kept for as long as
        the command runs.
    :param stderr: the same for standard error.
    :param walltime: after how many seconds the command and its children are stopped; its return code is 124 then.
    :param snippet_lines: how many lines of each stream come back, the last ones (and at most 4 MiB).
    :param name: name of the function in lists; a Python identifier.
    :param return_dict: return a dictionary with the result's fields instead: plain JSON.
    :param run_in_sandbox: run in a directory of the task's own, below the one that workers run in.
    :raises ValueError: for a name that is not an identifier, or a negative walltime.
    """

    _mpi: ClassVar[bool] = False

    @overload
    def __init__(
        self: ShellFunction[ShellResult],
        cmd: str,
        stdout: str | None = None,
        stderr: str | None = None,
        walltime: float | None = None,
        snippet_lines: int = 1000,
        name: str | None = None,
        return_dict: Literal[False] = False,
        run_in_sandbox: bool = False,
    ) -> None: ...

    @overload
    def __init__(
        self: ShellFunction[dict[str, Any]],
        cmd: str,
        stdout: str | None = None,
        stderr: str | None = None,
        walltime: float | None = None,
        snippet_lines: int = 1000,
        name: str | None = None,
        *,
        return_dict: Literal[True],
        run_in_sandbox: bool = False,
    ) -> None: ...

    def __init__(
        self,
        cmd: str,
        stdout: str | None = None,
        stderr: str | None = None,
        walltime: float | None = None,
        snippet_lines: int = 1000,
        name: str | None = None,
        return_dict: bool = False,
        run_in_sandbox: bool = False,
    ) -> None:
        name = name or type(self).__name__
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(f"name must be a Python identifier, not {name!r}")
        if walltime is not None and walltime < 0:
            raise ValueError("walltime must not be negative")
        self.cmd = cmd
        self.stdout = stdout
        self.stderr = stderr
        self.walltime = walltime
        self.snippet_lines = snippet_lines
        self.return_dict = return_dict
        self.run_in_sandbox = run_in_sandbox
        self.__name__ = name

    def __call__(self, **kwargs: Any) -> R:
        """Run the command line in this process. An executor runs it on its endpoint."""
        return cast("R", _shell_remote.run(self.cmd.format(**kwargs), **self._settings()))

    def __str__(self) -> str:
        header = "   command: "
        cmd = self.cmd.strip()
        shown = "\n".join(cmd[:1024].splitlines()[:10])
        if shown != cmd:
            shown += "\n[... truncated; see .cmd for full script ...]"
        if "\n" in shown:
            indent = "\n" + " " * len(header)
            shown = f"-----{indent}{shown.strip().replace(chr(10), indent)}{indent}-----"
        lines = [self.__name__]
        lines += [] if self.walltime is None else [f" wall time: {self.walltime}"]
        lines += [] if self.stdout is None else [f"    stdout: {self.stdout!r}"]
        lines += [] if self.stderr is None else [f"    stderr: {self.stderr!r}"]
        return "\n".join([*lines, f"     lines: {self.snippet_lines!r}", f"{header}{shown}"])

    def __repr__(self) -> str:
        given = {"cmd": self.cmd, "name": self.__name__, **self._settings()}
        del given["mpi"]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __reduce__(self) -> tuple[Any, ...]:
        # On its way to a worker inside of something else: as the plain function that the text defines.
        from farcall_common.payload.source import function_from_source

        name, text = self.source()
        return function_from_source, (name, text)

    def source(self) -> tuple[str, str]:
        """A name, and the text of a module in which it is this function. The text needs the standard library only."""
        settings = ", ".join(f"{name}={value!r}" for name, value in self._settings().items())
        call = f"def call(**kwargs):\n    return run({self.cmd!r}.format(**kwargs), {settings})\n"
        return "call", f"{_remote_text()}\n\n{call}"

    def _settings(self) -> dict[str, Any]:
        return {
            "stdout": self.stdout,
            "stderr": self.stderr,
            "walltime": self.walltime,
            "snippet_lines": self.snippet_lines,
            "return_dict": self.return_dict,
            "run_in_sandbox": self.run_in_sandbox,
            "mpi": self._mpi,
        }


class MPIFunction(ShellFunction[R]):
    """A command line that is started by the endpoint's MPI launcher; otherwise a :class:`ShellFunction`.

    The executor's options set its nodes and ranks: ``num_nodes``, ``ranks_per_node``,
    ``num_ranks``. The launcher stands in front of the first line of the command only.
    """

    _mpi = True

    if TYPE_CHECKING:  # which of the two it is, is not inherited

        @overload
        def __init__(
            self: MPIFunction[ShellResult],
            cmd: str,
            stdout: str | None = None,
            stderr: str | None = None,
            walltime: float | None = None,
            snippet_lines: int = 1000,
            name: str | None = None,
            return_dict: Literal[False] = False,
            run_in_sandbox: bool = False,
        ) -> None: ...

        @overload
        def __init__(
            self: MPIFunction[dict[str, Any]],
            cmd: str,
            stdout: str | None = None,
            stderr: str | None = None,
            walltime: float | None = None,
            snippet_lines: int = 1000,
            name: str | None = None,
            *,
            return_dict: Literal[True],
            run_in_sandbox: bool = False,
        ) -> None: ...

        def __init__(self, cmd: str, *args: Any, **settings: Any) -> None: ...


@functools.cache
def _remote_text() -> str:
    return inspect.getsource(_shell_remote)
