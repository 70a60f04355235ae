"""A graph that runs: which calls are ready, which values are still needed, and the end. Pure: no I/O, no clock.

A call is ready when its inputs are there; a map gets its calls when the number of its elements is known, and each of
them starts with its own elements. A value stays until all calls that read it have ended for good. What is lost (a call
has failed for good) and what is not needed any more goes through the graph in a queue of work, not by recursion: a
graph may be 100,000 stages deep.
"""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from farcall_common.graphs import COLLECT, MAX_CALLS, MAX_READS, MAX_STATES, Graph, Input, Stage, StageState
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.manager_worker import InputOrder
from farcall_endpoint.graphs.attempts import Attempts
from farcall_endpoint.graphs.stages import (
    DONE,
    DROPPED,
    FAILED,
    STARTED,
    WAITING,
    Edge,
    Failure,
    RunningStage,
    shown_error,
)
from farcall_endpoint.graphs.values import Memory
from farcall_endpoint.host.shared_memory import Frame

Call = tuple[int, int]
"""Number of a stage and of its element; 0 for the only call of a stage."""
_SMALL_BYTES: Final = 4 * 1024
_MOST_FULL_ERRORS: Final = 20
"""When more stages have failed, their errors are shown without tracebacks."""
_MOST_KEPT_ERRORS: Final = 1000
"""When more stages have failed, whose readers go on without them, their errors are kept without tracebacks."""
_MOST_SMALL_BYTES: Final = 64 * 1024
"""Values of stages that have ended are in the details of a failed graph if they are not larger, and all together."""


class GraphRun:
    """One graph.

    ``ready``: calls to make now, and ``dropped``: calls that were made and are not needed; their taker clears the
    lists. ``end``: how the task has ended.

    :param options: of the task. Its limit of time is not one of the calls.
    :param memory: where values are counted.
    :param jitter: returns numbers in [0, 1), which shorten the wait before a retry by up to a half.
    """

    def __init__(self, graph: Graph, *, options: TaskOptions, memory: Memory, jitter: Callable[[], float]) -> None:
        self.graph = graph
        self._options = options
        self.memory = memory
        self.ready: list[Call] = []
        self.dropped: list[Call] = []
        self.end: TaskState | None = None
        self.result: Frame = b""
        self.failure: Failure | None = None
        self._calls = 0
        self._reads = 0
        self._failed = 0
        self._work: collections.deque[tuple[Callable[[RunningStage, int], None], RunningStage, int]]
        self._work = collections.deque()
        self._attempts: Attempts[Call] = Attempts(jitter)
        self._waits: list[tuple[float, Call]] = []  # seconds from now on
        self._due: list[tuple[float, Call]] = []
        self._active: set[int] = set()  # stages that run or have failed
        self._small: dict[int, bytes] = {}
        self._small_bytes = 0
        specs = list(graph.stages)
        self._output = graph.output
        if specs[graph.output].is_map:  # its calls' values become one
            self._output = len(specs)
            specs.append(Stage(COLLECT, inputs=(Input(graph.output, ()),)))
        self.stages = [RunningStage(number, spec) for number, spec in enumerate(specs)]
        self._link()

    def start(self) -> None:
        """Make the first calls ready."""
        for stage in self.stages:
            if not stage.is_over and not stage.is_map:
                self._check_call(stage, 0)
        self._settle()

    # -- what happened -------------------------------------------------------------------------------------------------

    def is_out(self, call: Call) -> bool:
        """Whether a call was made, and its end counts."""
        stage, element = call
        return self.end is None and self.stages[stage].calls[element] == STARTED

    def succeeded(self, call: Call, parts: Sequence[Frame], *, on_disk: bool = False) -> None:
        """A call has ended, with the buffers of its value, which are in a file on disk if its worker had no room."""
        stage = self.stages[call[0]]
        if stage.is_spread:
            stage.is_list = True
        self._made(stage, call[1], parts, on_disk=on_disk)
        self._settle()

    def failed(self, call: Call, record: dict[str, Any]) -> None:
        """A call has failed for good."""
        self._fail(self.stages[call[0]], call[1], record)
        self._settle()

    def raised(self, call: Call, record: dict[str, Any], *, is_retried: bool) -> None:
        """The function of a call raised, or the call was stopped; it may be retried."""
        stage = self.stages[call[0]]
        wait_s, record = self._attempts.raised(call, record, options=self.options(stage), is_retried=is_retried)
        if wait_s is None:
            self.failed(call, record)
        else:
            stage.retries += 1
            self._waits.append((wait_s, call))

    def died(self, call: Call, reason: str, *, stdout_tail: str = "", stderr_tail: str = "") -> None:
        """The worker of a call is gone: the call is made again, if it may."""
        stage = self.stages[call[0]]
        record = self._attempts.died(
            call, reason, options=self.options(stage), stdout_tail=stdout_tail, stderr_tail=stderr_tail
        )
        if record is None:
            stage.retries += 1
            self._begin_again(call)
        else:
            self.failed(call, record)

    def stop(self, state: TaskState, record: dict[str, Any]) -> None:
        """End the whole graph: it was cancelled, or exceeds a limit."""
        if self.end is None:
            self.failure = Failure(-1, 0, record)
            self._finish(state)

    def next_deadline(self) -> float | None:
        """When :meth:`retry_due` has something to do, as of its last call."""
        return self._due[0][0] if self._due else None

    def retry_due(self, now: float) -> None:
        """Make the calls ready whose time for a retry has come; call it after events, too."""
        for wait_s, call in self._waits:
            heapq.heappush(self._due, (now + wait_s, call))
        self._waits.clear()
        while self._due and self._due[0][0] <= now:
            _, call = heapq.heappop(self._due)
            if self.is_out(call):
                self._begin_again(call)

    def _begin_again(self, call: Call) -> None:
        stage, element = self.stages[call[0]], call[1]
        if all(source.has_value_for(spec, element) for source, spec in stage.sources) or stage.taken:
            self.ready.append(call)
        else:  # it was made ahead, and what its worker had got the manager has not
            self.take_back(call)

    # -- calls that are made ahead -------------------------------------------------------------------------------------

    def follower(self, call: Call) -> tuple[Call, int] | None:
        """The only call that reads the value of this one, and with which of its inputs, if it waits for nothing
        else."""
        stage, element = self.stages[call[0]], call[1]
        if len(stage.readers) != 1 or stage.is_spread or stage.number == self._output:
            return None
        reader, number, each = stage.readers[0]
        if reader.needs or reader.collects or reader.is_over or each != stage.is_map or reader.is_map != each:
            return None
        got, total, lost = reader.whole_got, reader.whole_total, reader.whole_lost
        if not each:
            element = 0
        elif element >= reader.size:
            return None
        else:
            got, total, lost = got + reader.got[element], total + reader.each_total, lost + reader.lost[element]
        if lost or got + 1 != total or reader.calls[element] != WAITING:
            return None
        return (reader.number, element), number

    def begin_ahead(self, call: Call) -> None:
        """A call is made that only waits for one that runs."""
        self._mark_started(self.stages[call[0]], call[1])

    def take_back(self, call: Call) -> None:
        """A call that was made ahead has not started: it is made when its inputs are there."""
        if self.is_out(call):
            stage, element = self.stages[call[0]], call[1]
            stage.calls[element] = WAITING
            stage.running -= 1
            self._check_call(stage, element)
            self._settle()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def options(self, stage: RunningStage) -> TaskOptions:
        """The options of the calls of a stage."""
        return self._options if stage.spec.options is None else stage.spec.options

    def is_output(self, stage: RunningStage) -> bool:
        """Whether the value of a stage is the result of the graph."""
        return stage.number == self._output

    def starts(self, call: Call) -> tuple[int, int]:
        """Return how many attempts of a call ended with a worker's death, and how many raised and were retried."""
        return self._attempts.before(call)

    def inputs(self, call: Call, *, awaited: int = -1) -> tuple[tuple[InputOrder, ...], tuple[Frame, ...]]:
        """Return the inputs of a call, and the buffers with the values of these inputs, in order.

        :param awaited: number of the input that another worker sends.
        """
        stage, element = self.stages[call[0]], call[1]
        taken = None if stage.taken is None else stage.taken.get(element)
        orders: list[InputOrder] = []
        frames: list[Frame] = []
        parts: list[Frame]
        for number, (source, spec) in enumerate(stage.sources):
            if number == awaited:
                order, parts = InputOrder(spec.path, awaited=True), []
            elif taken is not None and (chosen := taken[number]) is not None:
                order, parts = _order(source, spec, chosen)
            elif taken is not None:
                order, parts = InputOrder(spec.path, missing=True), []
            elif spec.each:
                order, parts = _order(source, spec, (element,), is_list=False)
            elif not spec.path:  # the calls of a map are the result
                for part in range(len(source.uses)):
                    order, parts = _order(source, Input(spec.stage, (part,)), (part,), is_list=False)
                    orders.append(order)
                    frames += parts
                break
            elif stage.whole_orders is not None:
                found = stage.whole_orders.get(number)
                if found is None:
                    found = stage.whole_orders[number] = _order(source, spec, range(len(source.uses)))
                order, parts = found
            elif len(source.uses) == 1 and source.parts is not None and (part_of := source.parts[0]) is not None:
                orders.append(InputOrder(spec.path, (len(part_of),), source.is_list))
                frames.append(part_of)
                continue
            else:
                order, parts = _order(source, spec, range(len(source.uses)))
            orders.append(order)
            frames += parts
        return tuple(orders), tuple(frames)

    # -- for people ----------------------------------------------------------------------------------------------------

    def states(self, node: str = "") -> list[StageState]:
        """How the stages are. Of a large graph, :data:`farcall_common.graphs.MAX_STATES` of them: those that run or
        have failed, then the first."""
        end = "" if self.end is None else "skipped" if self.end is TaskState.SUCCESS else "cancelled"
        count = len(self.graph.stages)
        chosen: Iterable[int] = range(count)
        if count > MAX_STATES:
            first = itertools.islice((each for each in range(count) if each not in self._active), MAX_STATES)
            told = [*sorted(each for each in self._active if each < count), *first][:MAX_STATES]
            chosen = sorted(told)
        failed = sum(self.stages[number].failed > 0 for number in self._active)
        is_brief = failed > _MOST_FULL_ERRORS
        return [self.stages[number].state(node=node, end=end, is_brief=is_brief) for number in chosen]

    def small_values(self) -> dict[int, bytes]:
        """The small values of stages that have ended, by number."""
        return self._small

    def where(self, failure: Failure) -> str:
        """Which call that was; empty if it was none."""
        if failure.stage < 0 or failure.stage >= len(self.graph.stages):
            return ""
        stage = self.stages[failure.stage]
        element = f", element {failure.element}" if stage.is_map and stage.size >= 0 else ""
        return f"stage {stage.number} ({stage.spec.name}){element}"

    def running(self) -> str:
        """Which stages run, in words: the first, and how many more; empty if none does."""
        numbers = sorted(n for n in self._active if n < len(self.graph.stages) and self.stages[n].running)
        if not numbers:
            return ""
        first, others = self.stages[numbers[0]], len(numbers) - 1
        more = f" and {others} more {'stage' if others == 1 else 'stages'}" if others else ""
        return f"stage {first.number} ({first.spec.name}){more}"

    # -- the start -----------------------------------------------------------------------------------------------------

    def _link(self) -> None:
        """Join the stages that the output needs; the others are skipped."""
        needed = bytearray(len(self.stages))
        needed[self._output] = 1
        for stage in reversed(self.stages):
            if needed[stage.number]:
                for each in stage.spec.inputs:
                    needed[each.stage] = 1
        for stage in self.stages:
            if not needed[stage.number]:
                stage.is_over = stage.is_skipped = True
                continue
            for number, each in enumerate(stage.spec.inputs):
                source = self.stages[each.stage]
                stage.sources.append((source, each))
                source.readers.append(Edge(stage, number, each.each))
                source.held += 1
                if each.each:
                    stage.each_total += 1
                    stage.pending += 1
                    source.is_spread = not source.is_map
                elif stage.by_element:
                    stage.unsized += 1
                else:
                    stage.whole_total += 1
        self.stages[self._output].held += 1

    # -- readiness -----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        work = self._work
        while work:
            action, stage, element = work.popleft()
            action(stage, element)

    def _check(self, stage: RunningStage) -> None:
        """An input of a stage is there as a whole, or lost."""
        if stage.is_over:
            return
        if not stage.is_map:
            self._check_call(stage, 0)
        elif stage.size >= 0:
            if stage.needs or stage.whole_lost or stage.whole_got == stage.whole_total:
                for element in range(stage.size):
                    self._check_call(stage, element)
        elif stage.whole_lost and not stage.needs:
            self._work.append((self._lose_stage, stage, 0))

    def _check_call(self, stage: RunningStage, element: int) -> None:
        """Start a call whose inputs are there, and give up one whose inputs never will be."""
        if stage.calls[element] != WAITING:
            return
        got, lost, total = stage.whole_got, stage.whole_lost, stage.whole_total
        if stage.is_map:
            got += stage.got[element]
            lost += stage.lost[element]
            total += stage.each_total
        needs = stage.needs
        if not needs:
            if lost:
                self._work.append((self._lose_call, stage, element))
            elif got == total:
                self._begin(stage, element)
        elif got >= needs:
            self._begin(stage, element)
        elif not stage.unsized and total - lost < needs:
            self._work.append((self._lack if stage.cause is None else self._lose_call, stage, element))

    def _mark_started(self, stage: RunningStage, element: int) -> None:
        stage.calls[element] = STARTED
        stage.running += 1
        self._active.add(stage.number)

    def _begin(self, stage: RunningStage, element: int) -> None:
        self._mark_started(stage, element)
        if stage.needs:
            self._take_what_is_there(stage, element)
        if stage.collects and stage.number != self._output and self._is_flat(stage):
            self._work.append((self._collect, stage, element))
        else:
            self.ready.append((stage.number, element))

    def _is_flat(self, stage: RunningStage) -> bool:
        """Whether a list of a stage's inputs needs no worker: each of them is one buffer."""
        return all(not source.is_list for source, _ in stage.sources)

    def _collect(self, stage: RunningStage, element: int) -> None:
        if stage.calls[element] == STARTED:
            stage.is_list = True
            self._made(stage, element, self.inputs((stage.number, element))[1])

    def _expand(self, stage: RunningStage, _: int) -> None:
        """The elements of a map are counted: it gets its calls."""
        if stage.is_over or stage.size >= 0 or stage.pending or not stage.held:  # then it is dropped next
            return
        each = [source for source, spec in stage.sources if spec.each]
        sizes = [len(source.uses) for source in each if source.parts is not None]
        if not sizes:
            self._lose_stage(stage, 0)
            return
        size = min(sizes)
        self._calls += size
        if self._calls > MAX_CALLS:
            self.failure = Failure(stage.number, 0, outcomes.too_many_calls(MAX_CALLS).to_json())
            self._finish(TaskState.FAILED)
            return
        lists = (len(source.uses) for source, spec in stage.sources if not spec.each and source.is_list)
        if not self._has_reads(stage, size * (len(stage.sources) + sum(lists)) + sum(sizes)):
            return
        if not self._has_reads(stage, size * len(stage.readers)):
            return
        stage.size = size
        stage.calls = bytearray(size)
        stage.got, stage.lost = [0] * size, [0] * size
        stage.parts, stage.uses = [None] * size, [stage.held] * size
        for source in each:
            if source.parts is None:
                stage.lost = [lost + 1 for lost in stage.lost]
                continue
            for element in range(size):
                if source.has_part(element):
                    stage.got[element] += 1
                elif source.is_lost(element):
                    stage.lost[element] += 1
            for element in range(size, len(source.uses)):
                self._release(source, element)
        self._sized(stage, size, 0)
        for element in range(size):
            self._check_call(stage, element)
        if not size:
            self._over(stage)
            self._complete(stage)

    def _has_reads(self, stage: RunningStage, more: int) -> bool:
        """Count what calls read; False if that is too much, and the end: each of them takes memory and time here."""
        self._reads += more
        if self._reads > MAX_READS:
            self.failure = Failure(stage.number, 0, outcomes.too_many_reads(MAX_READS).to_json())
            self._finish(TaskState.FAILED)
        return self.end is None

    # -- values --------------------------------------------------------------------------------------------------------

    def _made(self, stage: RunningStage, element: int, parts: Sequence[Frame], *, on_disk: bool = False) -> None:
        """A call has a value."""
        stage.value_bytes += sum(map(len, parts))
        if stage.number != self._output:
            self.memory.add(parts, on_disk=on_disk)  # before the inputs are released, which it may consist of
        self._set_over(stage, element, DONE)
        stage.done += 1
        if stage.number == self._output:
            self.result = parts[0] if parts else b""
            self._finish(TaskState.SUCCESS)
            return
        if not stage.is_map:
            stage.parts, stage.uses = list(parts), [stage.held] * len(parts)
            if stage.is_list:
                calls = sum(max(1, reader.size) for reader, _, each in stage.readers if not each)
                if not self._has_reads(stage, len(parts) * (1 + calls)):
                    return
            if not stage.is_list:
                self._keep_small(stage.number, parts[0])
            units = len(parts) if stage.is_list else 1
            self._sized(stage, units, units)
            self._complete(stage)
            return
        assert stage.parts is not None
        stage.parts[element] = parts[0]
        for reader, _, each in stage.readers:
            if reader.is_over:
                continue
            if each:
                if element < reader.size:
                    reader.got[element] += 1
                    self._check_call(reader, element)
            elif reader.by_element:
                reader.whole_got += 1
                self._check(reader)
        if stage.done == stage.size:
            self._complete(stage)

    def _sized(self, stage: RunningStage, units: int, got: int) -> None:
        """Record the number of a value's units, of which ``got`` have arrived."""
        for reader, _, each in stage.readers:
            if reader.is_over:
                continue
            if each:
                reader.pending -= 1
                if not reader.pending:
                    self._work.append((self._expand, reader, 0))
            elif reader.by_element:
                reader.unsized -= 1
                reader.whole_total += units
                reader.whole_got += got
                self._check(reader)

    def _complete(self, stage: RunningStage) -> None:
        """The whole value of a stage is there."""
        for reader, _, each in stage.readers:
            if not (each or reader.by_element or reader.is_over):
                reader.whole_got += 1
                self._check(reader)

    def _take_what_is_there(self, stage: RunningStage, element: int) -> None:
        """A call starts without some of its inputs: it holds those that it gets, and no others."""
        taken: list[Sequence[int] | None] = []
        for number, (source, spec) in enumerate(stage.sources):
            if spec.each:
                is_there = source.parts is not None and source.has_part(element)
                taken.append([element] if is_there else None)
                if not is_there and source.parts is not None:
                    self._release(source, element)
            elif stage.is_map:
                is_there = source.parts is not None and source.done == source.size
                taken.append(range(len(source.uses)) if is_there else None)
            elif source.parts is None:
                taken.append(None)
                self._release_input(stage, number)
            else:
                there = [part for part in range(len(source.uses)) if source.has_part(part)]
                taken.append(there if there or source.is_list else None)
                for part in range(len(source.uses)):
                    if not source.has_part(part):
                        self._release(source, part)
        assert stage.taken is not None
        stage.taken[element] = taken

    def _release(self, source: RunningStage, part: int) -> None:
        """A call does not need a part of a value any more."""
        source.uses[part] -= 1
        if source.uses[part]:
            return
        if source.parts is not None and (frame := source.parts[part]) is not None:
            source.parts[part] = None
            self.memory.remove(frame)
        elif source.is_map:
            self._work.append((self._drop_call, source, part))

    def _release_input(self, stage: RunningStage, number: int) -> None:
        """A stage does not need an input any more, of which it has read no part."""
        source, _ = stage.sources[number]
        if source.parts is None:
            source.held -= 1
            if not source.held:
                self._work.append((self._drop_stage, source, 0))
        else:
            uses = source.uses
            for part in range(len(uses)):
                if uses[part] > 1:
                    uses[part] -= 1
                else:
                    self._release(source, part)

    def _keep_small(self, number: int, frame: Frame) -> None:
        size = len(frame)
        if isinstance(frame, bytes) and size <= _SMALL_BYTES and self._small_bytes + size <= _MOST_SMALL_BYTES:
            self._small[number] = frame
            self._small_bytes += size

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _set_over(self, stage: RunningStage, element: int, state: int) -> None:
        """A call has ended for good: what it has read is not needed by it any more."""
        if stage.calls[element] == STARTED:
            stage.running -= 1
        stage.calls[element] = state
        stage.ended += 1
        taken = None if stage.taken is None else stage.taken.pop(element, None)
        for number, (source, spec) in enumerate(stage.sources):
            if spec.each:
                if source.parts is not None and (taken is None or taken[number] is not None):
                    self._release(source, element)
            elif stage.is_map:
                continue
            elif taken is None:
                self._release_input(stage, number)
            else:
                for part in taken[number] or ():
                    self._release(source, part)
        if stage.ended == stage.size:
            self._over(stage)

    def _over(self, stage: RunningStage) -> None:
        stage.is_over = True
        if not stage.failed:
            self._active.discard(stage.number)
        if stage.is_map:
            for number, (_, spec) in enumerate(stage.sources):
                if not spec.each:
                    self._release_input(stage, number)
            stage.whole_orders = {}

    def _fail(self, stage: RunningStage, element: int, record: dict[str, Any]) -> None:
        if not stage.failed:
            self._failed += 1
        if self._failed > _MOST_KEPT_ERRORS:
            record = shown_error(record, is_brief=True)
        failure = Failure(stage.number, element, record)
        if not stage.failed:
            stage.cause = failure
        stage.failed += 1
        self._active.add(stage.number)
        self._set_over(stage, element, FAILED)
        self._lose_part(stage, element, failure)

    def _lose_part(self, stage: RunningStage, element: int, failure: Failure | None) -> None:
        """A call will have no value: tell those that would read it."""
        if stage.number == self._output:
            self.failure = failure
            self._finish(TaskState.FAILED)
        elif not stage.is_map:
            self._lose_value(stage, failure)
        else:
            is_first = stage.ended - stage.done == 1
            for reader, _, each in stage.readers:
                if reader.is_over:
                    continue
                if each:
                    reader.cause = reader.cause or failure
                    if element < reader.size:
                        reader.lost[element] += 1
                        self._check_call(reader, element)
                elif reader.by_element or is_first:
                    reader.cause = reader.cause or failure
                    reader.whole_lost += 1
                    self._check(reader)

    def _lose_value(self, stage: RunningStage, failure: Failure | None) -> None:
        """A stage whose parts are not known will have no value."""
        for reader, _, each in stage.readers:
            if reader.is_over:
                continue
            reader.cause = reader.cause or failure
            if each:
                reader.pending -= 1
                if not reader.needs:
                    self._work.append((self._lose_stage, reader, 0))
                elif not reader.pending:
                    self._work.append((self._expand, reader, 0))
                continue
            reader.whole_lost += 1
            if reader.by_element:
                reader.whole_total += 1
                reader.unsized -= 1
            self._check(reader)

    def _lose_call(self, stage: RunningStage, element: int) -> None:
        """A call cannot be made: an input is lost."""
        if stage.calls[element] == WAITING and self.end is None:
            self._set_over(stage, element, DROPPED)
            self._lose_part(stage, element, stage.cause)

    def _lack(self, stage: RunningStage, element: int) -> None:
        """A call needs more inputs than it has."""
        if stage.calls[element] == WAITING and self.end is None:
            total = stage.whole_total + stage.each_total
            self._fail(stage, element, outcomes.too_few_inputs(stage.needs, total).to_json())

    def _lose_stage(self, stage: RunningStage, _: int) -> None:
        """A map cannot get its calls: an input is lost."""
        if stage.size >= 0:  # it has got them meanwhile
            self._check(stage)
        elif not stage.is_over and self.end is None:
            stage.is_over = True
            for number in range(len(stage.sources)):
                self._release_input(stage, number)
            self._lose_value(stage, stage.cause)

    def _drop_call(self, stage: RunningStage, element: int) -> None:
        """The value of a call is not needed any more."""
        state = stage.calls[element]
        if state <= STARTED and self.end is None:
            if state == STARTED:
                self.dropped.append((stage.number, element))
            self._set_over(stage, element, DROPPED)

    def _drop_stage(self, stage: RunningStage, _: int) -> None:
        """The value of a stage is not needed any more."""
        if stage.is_over:
            return
        stage.is_skipped = True
        if not stage.is_map:
            self._drop_call(stage, 0)
        else:
            stage.is_over = True
            for number in range(len(stage.sources)):
                self._release_input(stage, number)

    def _finish(self, state: TaskState) -> None:
        """The end, once. Nothing is ready any more, and no value is kept."""
        if self.end is not None:
            return
        self.end = state
        self._work.clear()
        self.ready.clear()
        self._due.clear()
        self._waits.clear()
        for stage in self.stages:
            if stage.running:
                self.dropped += [(stage.number, element) for element, each in enumerate(stage.calls) if each == STARTED]
            if stage.parts is not None:
                for part in stage.parts:
                    if part is not None:
                        self.memory.remove(part)
                stage.parts = None
            stage.whole_orders = None
            # Without them there is no cycle, and the memory is free at once: to look for cycles among so many objects
            # takes longer than anything else here.
            stage.sources, stage.readers = [], []


def _order(
    source: RunningStage, spec: Input, chosen: Sequence[int], *, is_list: bool | None = None
) -> tuple[InputOrder, list[Frame]]:
    parts = source.parts
    assert parts is not None
    frames = [part for number in chosen if (part := parts[number]) is not None]
    return InputOrder(spec.path, tuple(map(len, frames)), source.is_list if is_list is None else is_list), frames
