"""Planner: the plan that is fastest, or cheapest, of all that an endpoint permits. No I/O, no clock."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

from farcall_analytics.model import Estimate, Infeasible, Method, Plan, Shuffle, estimate
from farcall_analytics.profiles import Profile

Objective = Literal["fastest", "cheapest"]

_ROUND_PARTS: Final = (0.02, 0.025, 1 / 30, 0.05, 0.1, 0.2, 0.5)
"""Fractions of the data that a round of a hybrid exchange may move."""
_COPIES_AFTER: Final = 0.9


@dataclasses.dataclass(frozen=True)
class Option:
    """A plan with its estimate."""

    plan: Plan
    estimate: Estimate


@dataclasses.dataclass(frozen=True)
class Choice:
    """The best plan, and what it was compared with.

    :param others: of each other method and storage, the best plan.
    :param refused: why a method cannot be used, or twice as many workers do not help, by method and storage.
    """

    best: Option
    others: tuple[Option, ...]
    refused: tuple[tuple[str, str], ...]

    def explain(self) -> str:
        """A table: the best plan with ``*`` first, and why others cannot be used."""
        rows = [_row(each, mark="* "[each is not self.best]) for each in (self.best, *self.others)]
        lines = [table_text(_HEADING, rows)]
        return "\n".join([*lines, *(f"no {name}: {reason}" for name, reason in self.refused)])


class NoPlan(ValueError):
    """No plan keeps the deadline, or the budget."""


def choose(
    shuffle: Shuffle,
    profile: Profile,
    *,
    objective: Objective = "cheapest",
    deadline_s: float | None = None,
    budget: float | None = None,
    input_tier: str = "",
) -> Choice:
    """The best plan.

    :param objective: what it is best at; the other one decides between equals.
    :param deadline_s: that it keeps in 95 % of cases. ``budget``: in dollars.
    :raises NoPlan: if there is none, with the nearest one.
    """
    options: list[Option] = []
    refused: dict[str, str] = {}
    for plan in plans(shuffle, profile):
        try:
            options.append(Option(plan, estimate(shuffle, plan, profile, input_tier=input_tier)))
        except Infeasible as error:
            refused.setdefault(name_of(plan), str(error))

    def rank(option: Option) -> tuple[float, float]:
        found = option.estimate
        return (found.seconds, found.dollars) if objective == "fastest" else (found.dollars, found.seconds)

    def keeps(option: Option) -> bool:
        found = option.estimate
        in_time = deadline_s is None or found.high_s <= deadline_s
        return in_time and (budget is None or found.dollars <= budget)

    best_of: dict[str, Option] = {}
    for option in sorted(options, key=lambda each: (not keeps(each), rank(each))):
        best_of.setdefault(name_of(option.plan), option)
    for name in best_of:
        refused.pop(name, None)
    if not best_of:
        raise NoPlan("; ".join(f"{name}: {reason}" for name, reason in refused.items()) or "there is no storage")
    best, *others = best_of.values()
    if not keeps(best):
        raise NoPlan(_missed(options, deadline_s, budget))
    twice = dataclasses.replace(best.plan, parallel=2 * best.plan.parallel)
    with contextlib.suppress(Infeasible):
        if reason := why_slower(best.estimate, estimate(shuffle, twice, profile, input_tier=input_tier)):
            refused[f"faster with {twice.parallel} workers"] = reason
    return Choice(best, tuple(others), tuple(refused.items()))


def why_slower(found: Estimate, wide: Estimate) -> str:
    """Why a plan with more tasks does not help; nothing if it does."""
    if wide.seconds < found.seconds:
        return ""
    return f"{wide.seconds:.3g} s, now {found.seconds:.3g} s, limited by {wide.limited_by}"


def plans(shuffle: Shuffle, profile: Profile) -> Iterator[Plan]:
    """All plans that are compared."""
    workers = profile.workers
    slow = [name for name, tier in profile.tiers.items() if not tier.is_fast]
    fast = [name for name, tier in profile.tiers.items() if tier.is_fast]
    kinds: list[tuple[Method, str, str, float]] = []
    for name in slow:
        kinds += [(method, name, "", 0.0) for method in (Method.SLOW, Method.COMBINED, Method.TWO_LEVEL)]
        for other, part in itertools.product(fast, _ROUND_PARTS):
            kinds.append((Method.HYBRID, name, other, part * shuffle.size))
    kinds += [(Method.FAST, name, "", 0.0) for name in fast]
    for (method, tier, other, fast_bytes), memory, parallel, codec, copies in itertools.product(
        kinds, workers.memories, _parallel(workers.most), profile.codecs, (None, _COPIES_AFTER)
    ):
        yield Plan(method, tier, memory, parallel, other, fast_bytes * codec.ratio, codec, copies)


def name_of(plan: Plan) -> str:
    """Return the name of a plan: its method and storages."""
    return f"{plan.method} {plan.tier}{f' + {plan.fast_tier}' if plan.fast_tier else ''}"


def _parallel(most: int) -> Sequence[int]:
    steps = math.ceil(math.log2(most)) * 2
    return sorted({round(2 ** (step / 2)) for step in range(steps)} | {most})


def _missed(options: Sequence[Option], deadline_s: float | None, budget: float | None) -> str:
    in_budget = [each for each in options if budget is None or each.estimate.dollars <= budget]
    nearest = min(in_budget or options, key=lambda each: each.estimate.high_s)
    return missed_text(f"the nearest one, {name_of(nearest.plan)},", nearest.estimate, deadline_s, budget)


def missed_text(nearest: str, found: Estimate, deadline_s: float | None, budget: float | None) -> str:
    """That no plan keeps what is wanted, and what the nearest one takes."""
    wanted = [
        f"{deadline_s:g} s" if deadline_s is not None else "",
        f"{budget:g} dollars" if budget is not None else "",
    ]
    return (
        f"no plan keeps {' and '.join(filter(None, wanted))}; {nearest} takes {seconds_text(found)} "
        f"and {number_text(found.dollars)} dollars"
    )


_HEADING: Final = ("", "method", "storage", "workers", "memory", "rounds", "time (90 %)", "dollars", "limited by")


def _row(option: Option, *, mark: str) -> tuple[str, ...]:
    plan, found = option.plan, option.estimate
    storage = f"{plan.tier} + {plan.fast_tier} {bytes_text(plan.fast_bytes)}" if plan.fast_tier else plan.tier
    rounds = next((phase for phase in found.phases if phase.repeats > 1), None)
    return (
        mark,
        plan.method,
        storage if plan.codec.name == "none" else f"{storage}, {plan.codec.name}",
        str(plan.parallel),
        bytes_text(plan.memory),
        "1" if rounds is None else str(rounds.repeats),
        seconds_text(found),
        number_text(found.dollars),
        found.limited_by,
    )


def table_text(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in columns."""
    every = [tuple(heading), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in every)


def seconds_text(found: Estimate) -> str:
    """Seconds with their interval."""
    return f"{number_text(found.seconds)} s ({number_text(found.low_s)} to {number_text(found.high_s)})"


def number_text(value: float) -> str:
    """A number, short."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def bytes_text(size: float) -> str:
    """A size with its unit."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} bytes"
