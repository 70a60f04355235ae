"""Agent under load: ``python -m benchmarks.engine.scale.agent MANAGERS TASKS`` prints the figures as JSON.

Each number of managers has its own process, so that the peak of its memory belongs to that number. It collects garbage
as rarely as the agent of an endpoint.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gc
import itertools
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.engine import functions
from benchmarks.engine.scale.simulator import allow_descriptors
from farcall_common.payload.functions import FunctionTable
from farcall_common.payload.native import NATIVE, dump_call
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskSpec
from farcall_endpoint.config.providers import LocalProviderConfig
from farcall_endpoint.config.settings import QosSettings
from farcall_endpoint.engine import EngineFuture
from farcall_endpoint.engine.loop import EngineLoop, EngineOptions, Submission
from farcall_endpoint.host.slots import Sharing
from farcall_endpoint.providers import LocalProvider, Provider
from farcall_endpoint.providers.local import LocalBlock

SLOTS: Final = 128
"""Workers of a manager."""
TASK_S: Final = 20e-6
"""Time of a no-op in a real worker, with its set-up."""
WINDOW: Final = 200_000
"""Most unfinished tasks."""
_PREFETCH: Final = 256
_CHUNK: Final = 5000
_WARM_UP: Final = 20_000
_IDLE_S: Final = 2.0
_READY_S: Final = 60.0
_READY_STEP_S: Final = 0.005
_PROCESSES: Final = 2
_DESCRIPTORS_EACH: Final = 2
_SPARE: Final = 256
_COLLECT_AFTER: Final = 100_000
_MANAGER: Final = "farcall_endpoint.manager"
_SIMULATOR: Final = "benchmarks.engine.scale.simulator"


class SimulatedProvider(LocalProvider):
    """Provider of blocks with many simulated managers, each block one process on this machine.

    :param managers: managers in all blocks together.
    :param task_s: seconds of each task.
    """

    def __init__(self, environment: Mapping[str, str], *, managers: int, blocks: int, task_s: float) -> None:
        super().__init__(environment)
        share, over = divmod(managers, blocks)
        self._shares = itertools.cycle([share + (number < over) for number in range(blocks)])
        self._task_s = task_s

    def start(
        self,
        command: Sequence[str],
        *,
        block_id: str,  # noqa: ARG002 - the command has it
        environment: Mapping[str, str],
        image: str = "",  # noqa: ARG002 - no pod
    ) -> LocalBlock:
        """As :meth:`Provider.start`."""
        at = command.index(_MANAGER)
        share = ["--agent-pid", str(os.getpid()), "--managers", str(next(self._shares)), "--task-s", str(self._task_s)]
        return self.spawn([*command[:at], _SIMULATOR, *command[at + 1 :], *share], environment)


class Agent(EngineLoop):
    """An engine's loop that starts simulated managers instead of real ones."""

    def __init__(self, *, managers: int, task_s: float = TASK_S) -> None:
        blocks = min(_PROCESSES, managers)
        super().__init__(
            EngineOptions(
                sharing=Sharing(max_workers=SLOTS),
                workers=SLOTS,
                prefetch=_PREFETCH,
                batching=True,
                scheduling="random",
                working_dir=Path.cwd(),
                scripts_root=Path.cwd(),
                provider=LocalProviderConfig(init_blocks=blocks, min_blocks=blocks, max_blocks=blocks),
                address=None,
                worker_port_range=None,
                max_idletime_s=120.0,
                max_block_failures=1,
                block_failure_period_s=0.0,
                qos=QosSettings(),
            )
        )
        self._simulated = functools.partial(SimulatedProvider, managers=managers, blocks=blocks, task_s=task_s)
        self._workers = managers * SLOTS
        self._function = FunctionTable().get(functions.noop)
        self._payload = dump_call((), {})
        self._options = TaskOptions(result_serializers=NATIVE)
        self._cancel = self.cancel
        self._numbers = itertools.count(1)

    def _make_address(self, belongings: contextlib.ExitStack) -> str:
        directory = belongings.enter_context(tempfile.TemporaryDirectory(prefix="farcall-scale-"))
        return f"ipc://{directory}/agent.ipc"

    def _make_provider(self, directory: Path) -> Provider:  # noqa: ARG002 - it has none
        return self._simulated(os.environ)

    def __enter__(self) -> Agent:
        allow_descriptors(_SPARE + _DESCRIPTORS_EACH * self._workers // SLOTS)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(cancel=True)
        self.join()

    def wait_ready(self) -> None:
        """Wait until all managers are registered.

        :raises TimeoutError: if they are not in time.
        """
        deadline = time.monotonic() + _READY_S
        while self.stats.workers < self._workers:
            if time.monotonic() >= deadline or not self.is_alive():
                raise TimeoutError(f"{self.stats.workers:,} of {self._workers:,} workers: {self.stats.problem}")
            self.changed.wait(_READY_STEP_S)

    def run(self, tasks: int) -> None:
        """Run no-ops, at most the window at a time, and check every result."""
        chunks: collections.deque[list[EngineFuture[None]]] = collections.deque()
        for start in range(0, tasks, _CHUNK):
            if len(chunks) * _CHUNK >= WINDOW:
                _check(chunks.popleft())
            chunks.append([self._submit_noop() for _ in range(min(_CHUNK, tasks - start))])
        for chunk in chunks:
            _check(chunk)

    def clocks(self) -> dict[str, float]:
        """CPU seconds of this loop's thread, its process, the simulators and the machine; and the time."""
        assert self._thread.ident is not None
        simulators = [child.cpu_times() for child in psutil.Process().children()]
        machine = psutil.cpu_times()
        return {
            "agent": time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident)),
            "process": time.process_time(),
            "simulators": sum(times.user + times.system for times in simulators),
            "machine": sum(machine) - machine.idle - machine.iowait,
            "elapsed": time.perf_counter(),
        }

    def _submit_noop(self) -> EngineFuture[None]:
        task_id = str(next(self._numbers))
        spec = TaskSpec(task_id, 1, "", self._function.hash, self._options, 0)
        future: EngineFuture[None] = EngineFuture(task_id, self._cancel)
        self.submit(Submission(spec, self._function, self._payload, future))
        return future


def measure(*, managers: int, tasks: int) -> dict[str, Any]:
    """The figures of one agent with this number of managers."""
    began = time.perf_counter()
    with Agent(managers=managers) as agent:
        agent.wait_ready()
        ready_s = time.perf_counter() - began
        agent.run(_WARM_UP)
        before = agent.clocks()
        time.sleep(_IDLE_S)
        idle = _since(before, agent.clocks())
        before = agent.clocks()
        agent.run(tasks)
        used = _since(before, agent.clocks())
    others_s = max(0.0, used["machine"] - used["process"] - used["simulators"])
    return {
        "managers": managers,
        "workers": managers * SLOTS,
        "tasks": tasks,
        "ready_s": ready_s,
        "idle_share": idle["agent"] / idle["elapsed"],
        "per_s": tasks / used["elapsed"],
        "agent_us": used["agent"] / tasks * 1e6,
        "process_us": used["process"] / tasks * 1e6,
        "simulators_us": used["simulators"] / tasks * 1e6,
        "others": others_s / (used["elapsed"] * len(os.sched_getaffinity(0))),
        "peak_mib": _peak_mib(),
    }


def _check(futures: Sequence[EngineFuture[None]]) -> None:
    for future in reversed(futures):  # the last one first: after it, the others are rarely pending
        assert future.result() is None


def _since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in before}


def _peak_mib() -> float:
    """The peak memory of this process; unlike ``ru_maxrss``, without that of its parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) / 1024
    raise LookupError("VmHWM")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("managers", type=int)
    parser.add_argument("tasks", type=int)
    options = parser.parse_args()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
    print(json.dumps(measure(managers=options.managers, tasks=options.tasks)))


if __name__ == "__main__":
    main()
