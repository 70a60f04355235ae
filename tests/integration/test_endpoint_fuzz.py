"""Fuzzing of an endpoint, bounded and the same in each run: the channel of a worker, and the servers of nodes. ``make
fuzz`` looks further."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.endpoint import TARGETS, seeds
from tests.fuzz.frames import pack
from tests.fuzz.mutations import mutated
from tests.support.endpoint.fake_agent import FakeAgent, connected_agent

COUNT = {"channel": 5_000, "files": 1_000, "blocks": 1_000}
ROUNDS = 30
PACKETS = 40
MOST_BYTES = 256 * 2**20


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with connected_agent(tmp_path, slots=2) as agent:
        yield agent


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_seeds_pass_every_target(name: str) -> None:
    for frames in seeds(name):
        TARGETS[name](pack(frames) if name == "channel" else frames[0])


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_mutated_seeds_pass_every_target(name: str) -> None:
    single = [frame for frames in seeds(name) for frame in frames]
    for data in mutated(single, count=COUNT[name], seed=1):
        TARGETS[name](pack([data]) if name == "channel" else data)


def seven() -> int:
    return 7


def send_packets(packets: list[bytes]) -> None:
    import gc

    from farcall_endpoint.contracts.manager_worker import Channel
    from farcall_endpoint.host.shared_memory import MemoryFile, ancillary

    [end] = [each for each in gc.get_objects() if isinstance(each, Channel)]
    files = [MemoryFile.of([bytes(1000)])]
    for packet in packets:
        end.socket.sendmsg([packet[1:]], ancillary(files if packet[0] & 1 else []))


def peak_bytes(agent: FakeAgent) -> int:
    status = Path(f"/proc/{agent.manager.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def test_manager_lives_through_mutated_packets_and_serves_other_tasks(agent: FakeAgent) -> None:
    single = [frame for frames in seeds("channel") for frame in frames]
    agent.run("first", seven)
    assert agent.value("first") == 7
    before = peak_bytes(agent)
    for number in range(ROUNDS):
        name = f"hostile-{number}"
        # An empty packet is an end of the connection.
        packets = [each for each in mutated(single, count=PACKETS, seed=number) if len(each) > 1]
        agent.run(name, send_packets, packets, submitter="another")
        agent.run(f"good-{number}", seven)
        assert agent.value(f"good-{number}") == 7
        agent.listen(
            lambda: name in agent.finished or name in {died.task_id for each in agent.progress for died in each.died}  # noqa: B023
        )
    assert agent.manager.poll() is None
    assert peak_bytes(agent) - before < MOST_BYTES
