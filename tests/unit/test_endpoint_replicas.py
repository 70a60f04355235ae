"""Replicas: which manager copies which file from where, with managers that fail, end and remove copies."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from farcall_endpoint.agent.core.replicas import ENDPOINT, MOST_READERS, MOST_READS, CopyOrder, Replicas
from farcall_endpoint.contracts.agent_manager import FileContent

A, B = FileContent("", "a" * 64, 100), FileContent("", "b" * 64, 100)


def named(count: int) -> list[str]:
    return [f"m{number}" for number in range(count)]


def taken(replicas: Replicas) -> list[CopyOrder]:
    orders, replicas.orders = replicas.orders, []
    return orders


class World:
    """All managers, whose copies take some rounds. Checks each decision."""

    def __init__(self, managers: Iterable[str]) -> None:
        self.replicas = Replicas()
        self.alive = set(managers)
        for each in self.alive:
            self.replicas.joined(each)
        self.open: dict[tuple[str, FileContent], str] = {}
        self.copies: set[tuple[str, FileContent]] = set()
        self.received: collections.Counter[tuple[str, FileContent]] = collections.Counter()
        self.endpoint_reads: collections.Counter[FileContent] = collections.Counter()
        self.without_source: set[tuple[str, FileContent]] = set()

    def take(self) -> None:
        for manager_id, content, source in taken(self.replicas):
            assert manager_id in self.alive
            assert (manager_id, content) not in self.open
            assert (manager_id, content) not in self.copies
            if source is None:
                self.without_source.add((manager_id, content))
                continue
            assert source == ENDPOINT or source in self.alive
            assert source == ENDPOINT or (source, content) in self.copies or (source, content) in self.open
            self.open[manager_id, content] = source
            self.endpoint_reads[content] += source == ENDPOINT
            readers = collections.Counter(self.open.values())
            assert all(count <= MOST_READERS for each, count in readers.items() if each != ENDPOINT)
            at_endpoint = collections.Counter(each[1] for each, name in self.open.items() if name == ENDPOINT)
            assert max(at_endpoint.values(), default=0) <= MOST_READERS
            assert max(collections.Counter(reader for reader, _ in self.open).values()) <= MOST_READS

    def may_succeed(self, manager_id: str, content: FileContent) -> bool:
        source = self.open[manager_id, content]
        return source == ENDPOINT or (source, content) in self.copies

    def depth(self, manager_id: str, content: FileContent) -> int:
        """How many nodes its bytes pass before."""
        source = self.open.get((manager_id, content))
        return 0 if source is None or source == ENDPOINT else 1 + self.depth(source, content)

    def succeed(self, manager_id: str, content: FileContent) -> None:
        assert self.may_succeed(manager_id, content)
        del self.open[manager_id, content]
        self.copies.add((manager_id, content))
        self.received[manager_id, content] += 1
        self.replicas.have(manager_id, [content])
        self.take()

    def fail(self, manager_id: str, content: FileContent, *, reached: bool = True) -> None:
        del self.open[manager_id, content]
        self.replicas.failed(manager_id, content, reached=reached)
        self.take()

    def lose(self, manager_id: str) -> None:
        self.alive.discard(manager_id)
        self.open = {each: source for each, source in self.open.items() if each[0] != manager_id}
        self.copies = {each for each in self.copies if each[0] != manager_id}
        self.replicas.lost(manager_id)
        self.take()

    def want(self, manager_id: str, content: FileContent) -> None:
        self.replicas.wanted(manager_id, [content])
        self.take()

    def finish(self) -> None:
        """Let all that is on its way arrive; what cannot, because its source is gone or has failed, fails."""
        while self.open:
            ended = 0
            for (manager_id, content), source in list(self.open.items()):
                if self.may_succeed(manager_id, content):
                    self.succeed(manager_id, content)
                elif (source, content) in self.open:
                    continue  # it gets what its source gets
                else:
                    self.fail(manager_id, content, reached=source in self.alive)
                ended += 1
            assert ended, "a circle"


def test_one_node_reads_the_endpoints_copy_and_the_others_read_from_nodes() -> None:
    world = World(managers := named(8))
    for each in managers:
        world.want(each, A)
    assert list(world.open.values()) == [ENDPOINT, "m0", "m0", "m1", "m1", "m2", "m2", "m3"]
    world.finish()
    assert world.endpoint_reads == {A: 1}
    assert world.copies == {(each, A) for each in managers}


def test_a_hundred_nodes_get_a_file_at_the_same_time() -> None:
    world = World(managers := named(100))
    for each in managers:
        world.want(each, A)
    assert len(world.open) == 100
    assert max(world.depth(each, A) for each in managers) == 6  # 1, 2, 4, … nodes
    world.finish()
    assert world.endpoint_reads[A] == 1
    assert set(world.received.values()) == {1}


def test_many_files_are_read_by_different_nodes_first() -> None:
    world = World(["m", "n"])
    contents = [FileContent("", f"{number:064}", 1) for number in range(20)]
    for each in contents:
        world.want("m", each)
    for each in contents:
        world.want("n", each)
    world.finish()
    assert world.endpoint_reads.total() == 20
    assert set(world.received.values()) == {1}


def test_a_source_that_fails_is_replaced_by_another_one_and_at_last_by_the_endpoint() -> None:
    world = World(["m", "n", "o", "p"])
    for each in ("m", "n", "o"):
        world.want(each, A)
    world.finish()
    world.want("p", A)
    sources = [world.open["p", A]]
    world.fail("p", A)
    sources.append(world.open["p", A])
    world.fail("p", A)
    assert world.open["p", A] == ENDPOINT
    assert len(set(sources)) == 2
    world.fail("p", A)
    assert world.without_source == {("p", A)}
    world.want("p", A)  # another task, later
    assert ("p", A) in world.open


def test_a_manager_that_cannot_be_reached_is_not_tried_for_each_file() -> None:
    world = World(["m", "n"])
    world.want("m", A)
    world.want("m", B)
    world.finish()
    world.want("n", A)
    world.fail("n", A, reached=False)
    assert world.open["n", A] == ENDPOINT
    world.want("n", B)
    assert world.open["n", B] == ENDPOINT


def test_who_waits_for_a_manager_that_ends_gets_the_file_otherwise() -> None:
    world = World(["m", "n"])
    world.want("m", A)
    world.want("n", A)
    assert world.open == {("m", A): ENDPOINT, ("n", A): "m"}
    world.lose("m")
    world.fail("n", A)
    assert world.open == {("n", A): ENDPOINT}


def test_who_was_let_down_reads_from_complete_copies_only() -> None:
    world = World(["m", "n", "o", "p"])
    for each in ("m", "n", "o", "p"):
        world.want(each, A)
    assert world.open["p", A] == "n"
    world.fail("m", A)  # the endpoint's copy could not be read
    assert ("m", A) not in world.open, "it waits: n and o are to get the file, as far as it is known"
    for each in ("n", "o", "p"):
        world.fail(each, A)
    assert world.open == {("n", A): ENDPOINT, ("p", A): ENDPOINT}  # o waits for n, which p does not trust
    assert world.without_source == {("m", A)}
    world.succeed("n", A)
    assert world.open == {("o", A): "n", ("p", A): ENDPOINT}
    world.finish()
    assert world.copies == {(each, A) for each in ("n", "o", "p")}


def test_a_copy_that_was_removed_is_no_source() -> None:
    world = World(["m", "n"])
    world.want("m", A)
    world.finish()
    world.copies.clear()
    world.replicas.gone("m", [A])
    world.want("n", A)
    assert world.open == {("n", A): ENDPOINT}


def test_a_manager_that_does_not_want_a_file_any_more_leaves_its_turn_to_others() -> None:
    world = World(["m", "n"])
    for each in ("m", "n"):
        for number in range(4):  # as many as it gets at a time
            world.want(each, FileContent(each, f"{number:064}", 1))
        world.want(each, A)
    world.replicas.dropped("m", [A])
    world.finish()
    assert world.received["m", A] == 0
    assert world.received["n", A] == world.endpoint_reads[A] == 1


def test_files_that_cannot_be_had_do_not_hold_up_those_behind_them() -> None:
    world = World(["m", "n"])
    contents = [FileContent("", f"{number:064}", 1) for number in range(20)]
    for each in contents:
        world.want("m", each)
        world.want("n", each)
    for each in contents[:10]:
        for manager_id in "mnmn":
            if (manager_id, each) in world.open:
                world.fail(manager_id, each)
    world.finish()
    assert world.without_source | world.copies == {(name, each) for name in "mn" for each in contents}
    assert {(name, each) for name in "mn" for each in contents[10:]} <= world.copies


def test_submitters_have_copies_of_their_own() -> None:
    world = World(["m", "n"])
    world.want("m", A)
    world.finish()
    world.want("n", FileContent("other", A.sha256, A.size_bytes))
    assert list(world.open.values()) == [ENDPOINT]


CONTENTS = [FileContent("", f"{number:064}", 1) for number in range(12)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["want", "want", "succeed", "fail", "unreached", "gone", "lose", "drop"]),
        st.integers(0, 7),
        st.integers(0, 11),
    ),
    max_size=200,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_whatever_happens_all_end_and_no_source_serves_more_than_the_limit(steps: list[tuple[str, int, int]]) -> None:
    world = World(managers := named(8))
    wanted: set[tuple[str, FileContent]] = set()
    for step, manager, number in steps:
        key = manager_id, content = managers[manager], CONTENTS[number]
        if manager_id not in world.alive:
            continue
        if step == "want" and key not in world.copies and key not in wanted:
            wanted.add(key)
            world.without_source.discard(key)
            world.want(*key)
        elif step == "succeed" and key in world.open and world.may_succeed(*key):
            world.succeed(*key)
        elif step in ("fail", "unreached") and key in world.open:
            world.fail(*key, reached=step == "fail")
        elif step == "gone" and key in world.copies:
            world.copies.discard(key)
            wanted.discard(key)
            world.replicas.gone(manager_id, [content])
            world.take()
        elif step == "lose" and len(world.alive) > 2:
            wanted = {each for each in wanted if each[0] != manager_id}
            world.lose(manager_id)
        elif step == "drop" and key in wanted and key not in world.copies:
            world.open.pop(key, None)
            wanted.discard(key)
            world.replicas.dropped(manager_id, [content])
            world.take()
    world.finish()
    assert wanted <= world.copies | world.without_source


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.randoms())
def test_without_failures_each_file_is_read_once(nodes: int, files: int, rng: random.Random) -> None:
    world = World(managers := named(nodes))
    wishes = [(each, content) for each in managers for content in CONTENTS[:files]]
    rng.shuffle(wishes)
    for each in wishes:
        world.want(*each)
        if world.open and rng.random() < 0.3:
            world.succeed(*rng.choice([each for each in world.open if world.may_succeed(*each)]))
    while world.open:
        world.succeed(*rng.choice([each for each in world.open if world.may_succeed(*each)]))
    assert world.copies == set(wishes)
    assert set(world.received.values()) == {1}
    assert set(world.endpoint_reads.values()) == {1}
