"""Digit recognition: train models on all workers, then read hand-written digits with the best one.

    python examples/digits.py --endpoint NAME

The images are the real ones of scikit-learn's digits set (NIST forms, 8 x 8 pixels); half of them are for training.
Models come back as bytes, and the best one is sent with every batch: this machine needs no scikit-learn.
"""

# The scientific packages carry no types.
# mypy: disable-error-code="no-untyped-call, import-untyped"

from __future__ import annotations

import argparse
import dataclasses
import pickle
from concurrent.futures import Executor
from typing import Any

BATCHES = 9
GAMMAS = (0.0003, 0.001, 0.003, 0.01)


@dataclasses.dataclass(frozen=True)
class Reading:
    """The number of images, and how many of them were read correctly."""

    images: int
    correct: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.images


def split() -> Any:
    """Training images, test images, and the digits of both. Runs on a worker."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, digits = load_digits(return_X_y=True)
    return train_test_split(images, digits, test_size=0.5, random_state=7, stratify=digits)


def train(gamma: float) -> tuple[float, bytes]:
    """A classifier with this kernel width: its score in cross-validation, and the model, pickled.

    Runs on a worker.
    """
    from sklearn.model_selection import cross_val_score
    from sklearn.svm import SVC

    images, _, digits, _ = split()
    model = SVC(gamma=gamma, C=10.0)
    score = cross_val_score(model, images, digits, cv=3).mean()
    return float(score), pickle.dumps(model.fit(images, digits))


def read(model: bytes, batch: int) -> Reading:
    """Read one batch of the test images. Runs on a worker."""
    _, images, _, digits = split()
    mine = slice(batch, None, BATCHES)
    seen = pickle.loads(model).predict(images[mine])
    return Reading(len(seen), int((seen == digits[mine]).sum()))


def run(executor: Executor) -> Reading:
    """Train on half of the set, and read the other half."""
    _, model = max(executor.map(train, GAMMAS))
    readings = list(executor.map(read, [model] * BATCHES, range(BATCHES)))
    return Reading(sum(each.images for each in readings), sum(each.correct for each in readings))


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Read hand-written digits.")
    parser.add_argument("--endpoint", required=True, help="name or id of the endpoint to run on")
    with farcall.Executor(endpoint_id=parser.parse_args().endpoint) as executor:
        reading = run(executor)
    print(f"{reading.images} digits read, {reading.accuracy:.1%} of them correctly")


if __name__ == "__main__":
    main()
