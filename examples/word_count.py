"""Word count: the most frequent words in the source text of Python's standard library.

    python examples/word_count.py --endpoint NAME [--parts 16]

MapReduce as a graph, which is one task: how many parts there are, and so how many calls, is known when it runs. The
files are those of the endpoint; only the most frequent words come back.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farcall import Graph

if TYPE_CHECKING:
    import farcall

PARTS = 16


@dataclasses.dataclass(frozen=True)
class Words:
    """The most frequent words, with how often they occur; ``total`` counts all words. ``stages`` of the graph are a
    table."""

    most_frequent: list[tuple[str, int]]
    total: int
    stages: Any


def files() -> list[Path]:
    """The modules of the standard library that are one file. Runs on a worker."""
    import os

    return sorted(Path(os.__file__).parent.glob("*.py"))


def split(paths: list[Path], parts: int) -> list[list[Path]]:
    """The files in so many parts, each with large and small ones; fewer if there are fewer files. Runs on a worker."""
    by_size = sorted(paths, key=lambda path: -path.stat().st_size)
    return [by_size[number::parts] for number in range(min(parts, len(paths)))]


def count_words(paths: list[Path]) -> Counter[str]:
    """How often each word is in some files. Runs on a worker."""
    import re

    counts: Counter[str] = Counter()
    for path in paths:
        counts.update(re.findall(r"[a-z]+", path.read_text(encoding="utf-8", errors="replace").lower()))
    return counts


def merge(counts: list[Counter[str]]) -> Counter[str]:
    """The counts of all parts together. Runs on a worker."""
    return sum(counts, start=Counter())


def summary(counts: Counter[str], most: int) -> tuple[list[tuple[str, int]], int]:
    """The most frequent words, those with equal counts by name, and the count of all. Runs on a worker."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most], counts.total()


def run(executor: farcall.Executor, *, parts: int = PARTS, most: int = 10) -> Words:
    """Count the words, in parts and for a check all at once.

    :raises RuntimeError: if the counts differ.
    """
    graph = Graph()
    paths = graph.call(files)
    counts = graph.map(count_words, graph.call(split, paths, parts))
    in_parts = graph.call(summary, graph.call(merge, counts), most)
    at_once = graph.call(summary, graph.options(name="count_all").call(count_words, paths), most)
    future = executor.submit(graph, [in_parts, at_once])
    found, expected = future.result()
    if found != expected:
        raise RuntimeError(f"in parts {found}, and all at once {expected}")
    return Words(*found, future.stages)


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Count the words of Python's standard library.")
    parser.add_argument("--endpoint", required=True, help="name or id of the endpoint to run on")
    parser.add_argument("--parts", type=int, default=PARTS)
    arguments = parser.parse_args()
    with farcall.Executor(endpoint_id=arguments.endpoint) as executor:
        words = run(executor, parts=arguments.parts)
    print(words.stages)
    print(f"{words.total:,} words; most frequent: {', '.join(f'{word} ({n:,})' for word, n in words.most_frequent)}")


if __name__ == "__main__":
    main()
