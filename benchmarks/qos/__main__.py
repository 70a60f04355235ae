"""Latency targets: ``python -m benchmarks.qos [--quick] [--repetitions N] [--continue]``: policies, table, picture.

The five experiments of the QoS paper, scaled to two cores, on the engine of an endpoint. All policies of a repetition
have the same arrivals, and an order that is drawn at random; the oracle is the best of the static weights that are
tried before. Then what the controller costs, and how soon it reacts. With ``--continue`` it adds what an earlier run
that was stopped, or had fewer repetitions, has not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.qos import parts
from benchmarks.qos.experiments import (
    CPU_MS,
    EXPERIMENTS,
    PI,
    QUICK_WEIGHTS,
    TARGET,
    WEIGHTS,
    Arm,
    Experiment,
    arms,
    sweep,
)
from benchmarks.qos.figures import mean_violations
from benchmarks.qos.functions import rounds_per_ms
from benchmarks.qos.measuring import Timing, measure_baselines, run
from benchmarks.qos.plot import draw
from benchmarks.qos.table import as_tables
from benchmarks.report import Report, new_report, parse_options, save

_SWEEP_SEED: Final = 1_000_000


@dataclasses.dataclass(frozen=True)
class Form:
    """How much is measured. ``sweep``: the runs that find the oracle; ``controls``: repetitions of the controller's
    cost."""

    timing: Timing
    sweep: Timing
    weights: Sequence[float]
    repetitions: int
    controls: int
    paced_s: float
    noops: int
    bursts: int


QUICK: Final = Form(Timing(1.5, 10.0, 2), Timing(0.5, 3.0, 1), QUICK_WEIGHTS, 1, 1, 4.0, 5_000, 1)
FULL: Final = Form(Timing(3.0, 15.0, 5), Timing(2.0, 15.0, 5), WEIGHTS, 10, 10, 10.0, 20_000, 10)


class Measurement:
    """The runs of one measurement, each with a line on standard error."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.rounds_per_ms = rounds_per_ms()
        self._began = time.monotonic()

    def targets_ms(self, names: Collection[str]) -> dict[str, float]:
        """Twice the baseline of each function."""
        found = measure_baselines(names, self.rounds_per_ms, max(3, self.form.timing.baseline_calls))
        self.say(", ".join(f"{name} {value:.0f} ms" for name, value in found.items()))
        return {name: TARGET * value for name, value in found.items()}

    def oracle(self, experiment: Experiment, targets_ms: Mapping[str, float]) -> dict[str, float]:
        """The static weights with fewest violations; of those with as few, the ones with most batch work."""
        found = []
        for weights in sweep(experiment, self.form.weights):
            arm = Arm(f"static {weights}", "static", weights=tuple(sorted(weights.items())))
            figures = self._run(experiment, arm, _SWEEP_SEED, targets_ms, self.form.sweep)
            found.append((mean_violations(figures), -figures["batch_calls"], weights))
        return min(found, key=lambda each: each[:2])[2]

    def repetition(
        self, number: int, experiments: Sequence[Experiment], oracles: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        """All policies of all experiments, once: by experiment and policy."""
        targets_ms = self.targets_ms(CPU_MS)
        done: dict[tuple[str, Arm], dict[str, Any]] = {}
        found: dict[str, Any] = {}
        for experiment in experiments:
            compared = arms(experiment, oracles[experiment.load])
            for arm in random.Random(f"{experiment.name} {number}").sample(compared, len(compared)):
                key = experiment.load, arm
                if key not in done:
                    done[key] = self._run(experiment, arm, number, targets_ms, self.form.timing)
            found[experiment.name] = {
                arm.name: _stored(done[experiment.load, arm], has_weights=arm.name == PI and number == 0)
                for arm in compared
            }
        return found

    def _run(
        self, experiment: Experiment, arm: Arm, seed: int, targets_ms: Mapping[str, float], timing: Timing
    ) -> dict[str, Any]:
        wanted = {each.name: targets_ms[each.name] for each in experiment.classes}
        figures = run(experiment, arm, seed=seed, targets_ms=wanted, rounds_per_ms=self.rounds_per_ms, timing=timing)
        violations = ", ".join(
            f"{name} {each['violations']} of {each['calls']}" for name, each in figures["classes"].items()
        )
        self.say(f"{experiment.name} {arm.name}: violations {violations}; {figures['batch_calls']:.1f} batch calls")
        return figures

    def say(self, text: str) -> None:
        """A line of progress, with the seconds since the beginning."""
        print(f"{time.monotonic() - self._began:5.0f} s  {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one repetition, in ten minutes")
    parser.add_argument("--repetitions", type=int, help="of all experiments")
    parser.add_argument("--only", nargs="*", choices=[each.name for each in EXPERIMENTS], help="these experiments")
    parser.add_argument("--continue", dest="former", action="store_true", help="add to what the output has already")
    options = parse_options(parser, "qos.json")
    form = QUICK if options.quick else FULL
    if options.repetitions is not None:
        form = dataclasses.replace(form, repetitions=options.repetitions)
    names = [each.name for each in EXPERIMENTS] if options.only is None else options.only
    experiments = [each for each in EXPERIMENTS if each.name in names]
    report = begun(form, experiments, json.loads(options.output.read_text()) if options.former else None)
    _measure(form, experiments, report, options.output)


def _stored(run: Mapping[str, Any], *, has_weights: bool) -> dict[str, Any]:
    """What is stored of a run: of the weights over time, those that the picture shows."""
    return {name: value for name, value in run.items() if has_weights or name != "weights"}


def begun(form: Form, experiments: Sequence[Experiment], former: Report | None) -> Report:
    """A report without any measurement, or an earlier one.

    :raises SystemExit: if that has another form, other experiments or other policies.
    """
    report = new_report(
        repetitions=form.repetitions,
        measured_s=form.timing.measured_s,
        oracles={},
        experiments={each.name: [] for each in experiments},
        controller=[],
        reaction={},
    )
    if former is None:
        return report
    if (former["measured_s"], former["experiments"].keys()) != (report["measured_s"], report["experiments"].keys()):
        raise SystemExit("the output has another form, or other experiments")
    for each in experiments:
        policies = {arm.name for arm in arms(each, {})}
        if any(runs.keys() != policies for runs in former["experiments"][each.name]):
            raise SystemExit("the output has other policies")
    return {**former, "repetitions": form.repetitions}


def _measure(form: Form, experiments: Sequence[Experiment], report: Report, output: Path) -> None:
    measurement = Measurement(form)
    targets_ms = measurement.targets_ms(CPU_MS)
    for each in experiments:
        if each.load not in report["oracles"]:
            report["oracles"][each.load] = measurement.oracle(each, targets_ms)
    for number in range(len(report["experiments"][experiments[0].name]), form.repetitions):
        for name, runs in measurement.repetition(number, experiments, report["oracles"]).items():
            report["experiments"][name].append(runs)
        output.write_text(json.dumps(report, indent=1) + "\n")  # two hours of runs are not lost with the last one
    for number in range(len(report["controller"]), form.controls):
        report["controller"].append(parts.controller(number, paced_s=form.paced_s, noops=form.noops))
        measurement.say("controller")
    report["reaction"] = parts.reaction(
        0, target_ms=targets_ms["short"], rounds_per_ms=measurement.rounds_per_ms, bursts=form.bursts
    )
    measurement.say("reaction")
    draw(report, output.with_suffix(".png"))
    save(report, output, as_tables)


if __name__ == "__main__":
    main()
