"""Preloading: which modules a template imports, learned from what tasks of its environment really imported.

Workers report the names of modules that their tasks imported; a task can forge that, so a name is only a name: the
template imports it from the environment's own directories or not at all, and measures itself what that costs. What has
crashed, hung or made a template unfit is not tried again.

The decisions are pure; :class:`PreloadStore` keeps the statistics in a directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from farcall_common.environments import Environment
from farcall_common.files import keep_latest, write_private
from farcall_endpoint.environments.cache import make_private
from farcall_endpoint.worker.fork_hazards import is_forbidden

_logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z_]\w{0,99}(\.[A-Za-z_]\w{0,99}){0,9}", re.ASCII)
_MOST_MODULES: Final = 2000
_MOST_EXCLUDED: Final = 500
_MOST_REASON: Final = 300
_LEAST_SHARE: Final = 0.05
"""Smallest share of workers that must have imported a module for its preload."""
_LEAST_SAVED_S: Final = 0.0002
"""Least time per worker that a preload must save: the module's pages and page tables cost each fork as much."""
_DECAY_AT: Final = 1000.0
"""Number of reports after which all counts are halved, so that the last few thousand reports decide."""
_SAVE_PERIOD_S: Final = 5.0
_MOST_KEPT: Final = 200
_MOST_FILES: Final = 1000
"""Submitters may name any number of environments."""


class Module(msgspec.Struct, frozen=True, omit_defaults=True):
    """A module that tasks imported. ``place``: in the order of imports, where the packages of a module come before it;
    ``seconds`` and ``size_bytes``: what its import took in a template; None: never tried."""

    reports: float
    place: int
    seconds: float | None = None
    size_bytes: int = 0


class Statistics(msgspec.Struct, frozen=True):
    """Statistics of an environment's imports. ``reports``: of workers; ``excluded``: reasons by module."""

    reports: float = 0.0
    modules: dict[str, Module] = {}
    excluded: dict[str, str] = {}


def learned(statistics: Statistics, names: Sequence[str]) -> Statistics:
    """Return the statistics after the report of one worker.

    :param names: the modules that its tasks imported, in order.
    """
    modules = dict(statistics.modules)
    for place, name in enumerate(dict.fromkeys(names)):
        if place >= _MOST_MODULES:
            break
        if len(name) > 200 or not _NAME.fullmatch(name) or _is_excluded(name, statistics) or is_forbidden(name):
            continue
        known = modules.get(name)
        modules[name] = (
            Module(1.0, place) if known is None else msgspec.structs.replace(known, reports=known.reports + 1)
        )
    reports = statistics.reports + 1
    if reports >= _DECAY_AT:
        reports /= 2
        modules = {name: msgspec.structs.replace(each, reports=each.reports / 2) for name, each in modules.items()}
    if len(modules) > _MOST_MODULES:
        most = sorted(modules, key=lambda name: -modules[name].reports)[:_MOST_MODULES]
        modules = {name: modules[name] for name in most}
    return Statistics(reports, modules, statistics.excluded)


def measured(
    statistics: Statistics, cost: Mapping[str, tuple[float, int]], skipped: Mapping[str, str] | None = None
) -> Statistics:
    """After the start of a template: what the imports cost, and what it did not import.

    Of that, only what tasks imported is left out from then on: the environment's own list is tried by each template, as
    what is missing may be installed later.
    """
    modules = {
        name: msgspec.structs.replace(each, seconds=cost[name][0], size_bytes=cost[name][1]) if name in cost else each
        for name, each in statistics.modules.items()
    }
    found = Statistics(statistics.reports, modules, statistics.excluded)
    for name, reason in (skipped or {}).items():
        if name in statistics.modules:
            found = excluded(found, name, reason)
    return found


def excluded(statistics: Statistics, module: str, reason: str) -> Statistics:
    """Without a module, from now on, and without the modules of that package: to import them is to import it."""
    reasons = {**statistics.excluded, module: reason[:_MOST_REASON]}
    for oldest in list(reasons)[: max(0, len(reasons) - _MOST_EXCLUDED)]:
        del reasons[oldest]
    below = f"{module}."
    modules = {name: each for name, each in statistics.modules.items() if name != module and not name.startswith(below)}
    return Statistics(statistics.reports, modules, reasons)


def _is_excluded(module: str, statistics: Statistics) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:count]) in statistics.excluded for count in range(1, len(parts) + 1))


def chosen(statistics: Statistics, environment: Environment | None, *, budget_bytes: int) -> tuple[str, ...]:
    """The modules that a template imports, in order.

    Those that the environment names; else those that tasks import often, the ones first that save the most time for
    their memory: share of the workers x seconds / bytes.

    :param budget_bytes: of memory for learned modules.
    """
    if environment is not None and environment.preload is not None:
        return tuple(name for name in environment.preload if not _is_excluded(name, statistics))
    found: list[tuple[float, str]] = []
    for name, module in statistics.modules.items():
        share = min(1.0, module.reports / max(1.0, statistics.reports))
        if share < _LEAST_SHARE:
            continue
        if module.seconds is None:
            found.append((float("inf"), name))  # to be measured
        elif share * module.seconds >= _LEAST_SAVED_S:
            found.append((share * module.seconds / max(4096, module.size_bytes), name))
    left_bytes = budget_bytes
    taken: list[str] = []
    for _, name in sorted(found, key=lambda each: (-each[0], statistics.modules[each[1]].place, each[1])):
        size_bytes = statistics.modules[name].size_bytes
        if size_bytes <= left_bytes:
            taken.append(name)
            left_bytes -= size_bytes
    return tuple(sorted(taken, key=lambda name: (statistics.modules[name].place, name)))


@dataclasses.dataclass
class _Kept:
    statistics: Statistics
    saved_at: float | None = None
    is_saved: bool = True


def statistics_key(environment_key: str, submitter: str) -> str:
    """Return the key of statistics. The owner has separate ones: otherwise, other submitters could choose modules that
    the owner's templates, which are not confined, would import.

    :param environment_key: empty for the endpoint's own Python.
    :param submitter: empty for the owner.
    """
    return f"{environment_key or 'own'}-others" if submitter else environment_key


class PreloadStore:
    """Statistics by key, in a directory that several managers may share: the last writer wins.

    :param directory: in that of the cache; made when it is needed. Where it cannot be written, or others can write,
        what is learned lasts as long as this object.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept: dict[str, _Kept] = {}

    def of(self, key: str) -> Statistics:
        """The statistics of an environment; empty ones if none are known, or they cannot be read."""
        return self._of(key).statistics

    def put(self, key: str, statistics: Statistics, *, now: float, at_once: bool = False) -> None:
        """Change them. They are written ``at_once``, or every few seconds; ``now`` is in monotonic seconds."""
        kept = self._of(key)
        kept.statistics, kept.is_saved = statistics, False
        if at_once or kept.saved_at is None or now >= kept.saved_at + _SAVE_PERIOD_S:
            kept.saved_at = now
            self._save(key, kept)

    def close(self) -> None:
        """Write what has not been written."""
        for key, kept in self._kept.items():
            if not kept.is_saved:
                self._save(key, kept)

    def _of(self, key: str) -> _Kept:
        if key not in self._kept:
            if len(self._kept) >= _MOST_KEPT:
                self._forget()
            statistics = Statistics()
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                self._check_directory()
                statistics = msgspec.json.decode(self._path(key).read_bytes(), type=Statistics)
            self._kept[key] = _Kept(statistics)
        kept = self._kept[key] = self._kept.pop(key)  # the latest are at the end
        return kept

    def _forget(self) -> None:
        """Forget what was not needed for longest, and remove the oldest files."""
        oldest = next(iter(self._kept))
        kept = self._kept.pop(oldest)
        if not kept.is_saved:
            self._save(oldest, kept)
        with contextlib.suppress(OSError):
            self._check_directory()
            keep_latest(self._directory.iterdir(), _MOST_FILES)

    def _save(self, key: str, kept: _Kept) -> None:
        kept.is_saved = True
        try:
            self._check_directory()
            write_private(self._path(key), msgspec.json.encode(kept.statistics))
        except OSError as error:
            _logger.debug("what tasks import is not saved: %s", error)

    def _check_directory(self) -> None:
        """Make the directory; before each use, as a program that cleans ``/tmp`` may have removed it.

        :raises OSError: if other users could put files or links there.
        """
        make_private(self._directory.parent)
        make_private(self._directory)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key or 'own'}.json"
