"""Experiments, and the policies that are compared. Pure.

The rates keep the relations of the QoS paper (section 4) as far as the load of two cores permits it.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.qos.arrivals import Arrival, arrivals, bursts, poisson
from farcall_endpoint.config.settings import PolicyName

CORES: Final = 2
TARGET: Final = 2.0
"""Of a latency to the baseline: above it a call violates its target."""
BATCH_CPU_MS: Final = 400
BATCH_OUTSTANDING: Final = 6
SHORT_CPU_MS: Final = 60
WEIGHTS: Final = (100, 200, 400, 800, 1600)
QUICK_WEIGHTS: Final = (100, 400, 1600)
"""Of the sweep for the oracle."""
THRESHOLD_DELTAS: Final = (5, 20, 100)
NONE, PI, SHORT_FIRST, ORACLE, RESERVED = "none", "pi", "short-first", "oracle", "reserved"


@dataclasses.dataclass(frozen=True)
class FunctionClass:
    """A function with a target. ``rate_per_s``: of its calls; ``spread``: of their work."""

    name: str
    cpu_ms: float
    rate_per_s: float
    spread: float = 0.0


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment. ``load``: the one whose arrivals it has; ``deltas``: those that ``threshold`` has for itself."""

    name: str
    title: str
    classes: Sequence[FunctionClass]
    load: str
    has_batch: bool = False
    is_bursty: bool = False
    deltas: tuple[tuple[str, int], ...] = ()

    @property
    def utilisation(self) -> float:
        """The part of the cores that calls with targets need."""
        return sum(each.cpu_ms / 1000 * each.rate_per_s for each in self.classes) / CORES

    def arrivals(self, segments_s: Sequence[float], seed: int) -> list[Arrival]:
        """The calls with targets, in order; the same for all policies of a repetition."""
        rng = random.Random(f"{self.load} {seed}")
        instants = bursts if self.is_bursty else poisson
        return sorted(
            itertools.chain.from_iterable(
                arrivals(each.name, each.rate_per_s, segments_s, rng, instants=instants, spread=each.spread)
                for each in self.classes
            )
        )


@dataclasses.dataclass(frozen=True)
class Arm:
    """What is compared. Two with the same settings are one run, whatever their names are.

    :param is_reserved: calls with a target have one core, and batch work has the other one.
    """

    name: str = dataclasses.field(compare=False)
    policy: PolicyName = "none"
    delta: int = 0
    deltas: tuple[tuple[str, int], ...] = ()
    weights: tuple[tuple[str, float], ...] = ()
    is_reserved: bool = False


_NAMES_AND_AES: Final = (
    FunctionClass("name_generation", 150, 4.0),
    FunctionClass("pyaes", 400, 2.3),
)
EXPERIMENTS: Final = (
    Experiment("1", "resize, batch", (FunctionClass("resize", 80, 7.0, 0.25),), "1", has_batch=True),
    Experiment(
        "2", "resize in bursts, batch", (FunctionClass("resize", 80, 7.0, 0.25),), "2", has_batch=True, is_bursty=True
    ),
    Experiment(
        "3", "training, resize", (FunctionClass("training", 1000, 0.8), FunctionClass("resize", 80, 9.0, 0.25)), "3"
    ),
    Experiment("4", "name generation, pyaes", _NAMES_AND_AES, "4"),
    Experiment("5", "as 4, delta 20 for name generation", _NAMES_AND_AES, "4", deltas=(("name_generation", 20),)),
)
CPU_MS: Final[Mapping[str, float]] = {
    "short": SHORT_CPU_MS,
    **{each.name: each.cpu_ms for every in EXPERIMENTS for each in every.classes},
}


def threshold_name(delta: int) -> str:
    """Of the arm with this step."""
    return f"threshold, delta {delta}"


def arms(experiment: Experiment, oracle: Mapping[str, float]) -> list[Arm]:
    """The policies of an experiment.

    :param oracle: the weights that a sweep has found.
    """
    found = [Arm(NONE)]
    for delta in THRESHOLD_DELTAS:
        own = tuple(pair for pair in experiment.deltas if pair[1] != delta)
        found.append(Arm(threshold_name(delta), "threshold", delta=delta, deltas=own))
    found += [
        Arm(PI, "pi"),
        Arm(SHORT_FIRST, "short-first"),
        Arm(ORACLE, "static", weights=tuple(sorted(oracle.items()))),
    ]
    if experiment.has_batch:
        found.append(Arm(RESERVED, is_reserved=True))
    return found


def sweep(experiment: Experiment, weights: Sequence[float]) -> list[dict[str, float]]:
    """The weights among which the oracle is found: beside batch work each; of two functions, each ratio once."""
    names = [each.name for each in experiment.classes]
    if experiment.has_batch:
        return [dict.fromkeys(names, weight) for weight in weights]
    least = min(weights)
    found = [dict.fromkeys(names, least)]
    for name in names:
        found += [{**dict.fromkeys(names, least), name: weight} for weight in weights if weight != least]
    return found
