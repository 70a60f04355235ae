"""Graphs as tasks: their functions, the checks before they are sent, and their payload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from farcall._binding import check_arguments
from farcall._functions import FunctionHandle, FunctionTable, PackedCall, Requirements, pack_arguments, with_files
from farcall._future import inputs_of, resolved
from farcall._shell import MPIFunction
from farcall_common.errors import PayloadTooLarge, SerializationError
from farcall_common.graph_builder import Plan, Stage
from farcall_common.graph_packing import check_callees, pack_plan
from farcall_common.payload import Serializer
from farcall_common.task_options import TaskOptions


class GraphTask:
    """A target of a graph, on its way to be one task.

    :param endpoint_id: returns the id of an endpoint by its name.
    :param target: the endpoint that runs it, if it is known.
    :raises TypeError: for a function that a stage cannot have.
    :raises ValueError: for too many functions.
    :raises SerializationError, PayloadTooLarge: if a function cannot be sent.
    """

    def __init__(
        self,
        plan: Plan,
        functions: FunctionTable,
        serializer: Serializer,
        *,
        spread: bool,
        endpoint_id: Callable[[str], str],
        target: str,
    ) -> None:
        self._plan = plan
        self._serializer = serializer
        self._spread = spread
        self._endpoint_id = endpoint_id
        self._target = target
        self._handles = {id(function): self._handle(functions, function) for function in plan.functions}
        self.callees: tuple[FunctionHandle, ...] = tuple(dict.fromkeys(self._handles.values()))
        """Its functions, each once."""
        check_callees(plan, self.callees)
        last = plan.stages[plan.output].function
        self.function: FunctionHandle = self.callees[0] if last is None else self._handles[id(last)]
        """The task's own: that of the target, or of the first stage if that is several."""

    def _handle(self, functions: FunctionTable, function: Any) -> FunctionHandle:
        if isinstance(function, MPIFunction):
            raise TypeError(f"{self._first(function)}: an MPIFunction is a task of its own; submit it to the executor")
        try:
            return functions.handle(function, is_stage=True)
        except (SerializationError, PayloadTooLarge) as error:
            raise type(error)(f"{self._first(function)}: {error.record.message}", hint=error.hint) from error

    def _first(self, function: object) -> str:
        """The first stage with a function, in words."""
        return self._plan.where(next(at for at, each in enumerate(self._plan.stages) if each.function is function))

    def inputs(self) -> Sequence[Future[Any]]:
        """The futures among the arguments of stages, as those of calls (see :meth:`Executor.submit`).

        :raises TypeError: if there are any, as :meth:`pack`.
        """
        found = {
            id(future): future
            for stage in self._plan.stages
            if not stage.is_constant
            for future in inputs_of(stage.args, stage.kwargs)
        }
        if found:  # what can be refused now is not refused when they are done
            for at, stage in enumerate(self._plan.stages):
                self._check(stage, at)
        return tuple(found.values())

    def _check(self, stage: Stage, at: int) -> None:
        if stage.function is None or (accepts := self._handles[id(stage.function)].accepts) is None:
            return
        try:
            check_arguments(stage.function, accepts, stage.args, stage.kwargs)
        except TypeError as error:
            raise TypeError(f"{self._plan.where(at)}: {error}") from None

    def pack(self, options: TaskOptions) -> PackedCall:
        """The payload; the futures among the arguments are done.

        :param options: those of the task.
        :raises TypeError: for arguments that a function does not take.
        :raises SerializationError: if an argument cannot be sent.
        :raises PayloadTooLarge: if it is too large.
        """
        places = {handle: at for at, handle in enumerate(self.callees)}
        packed = pack_plan(
            self._plan,
            callees={key: places[handle] for key, handle in self._handles.items()},
            identity=tuple(self._handles.values()),
            options=options,
            packer=self._serializer,
            pack_call=self._pack_call,
            spread=self._spread,
        )
        return with_files(PackedCall(packed.payload, _all_of(packed.requirements)), "the graph")

    def _pack_call(self, stage: Stage, at: int) -> tuple[bytes, Requirements | None]:
        where = self._plan.where(at)
        args, kwargs = stage.args, stage.kwargs
        self._check(stage, at)
        if not stage.is_constant:
            args, kwargs = resolved(args, kwargs)
        try:
            found = pack_arguments(
                args,
                kwargs,
                function_name=where,
                serializer=self._serializer,
                reads_binary=_yes,
                endpoint_id=self._endpoint_id,
                target=self._target,
            )
        except SerializationError as error:
            raise SerializationError(f"{where}: {error.record.message}", hint=error.hint) from error
        return found.payload, found.requirements


def _yes() -> bool:
    """Return True: every endpoint that runs graphs reads large values as bytes."""
    return True


def _all_of(requirements: Sequence[Requirements]) -> Requirements | None:
    """Requirements for a reader of all stages."""
    if not requirements:
        return None
    strategies = frozenset[str]().union(*(each.strategies for each in requirements))
    bound = next((each for each in requirements if each.python), requirements[0])
    files = tuple(dict.fromkeys(file for each in requirements for file in each.files))
    return Requirements(strategies, bound.python, bound.classes, files)
