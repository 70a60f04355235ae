"""Train a model on one worker, then read hand-written digits with it on all of them.

    python examples/digits.py --endpoint ENDPOINT_ID

The images are the real ones of scikit-learn's digits set (NIST forms, 8 x 8 pixels); half of them are for training. The
model comes back here as bytes and goes out again with every batch: this machine needs no scikit-learn to hand it on.
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


@dataclasses.dataclass(frozen=True)
class Reading:
    """How many images were read, and how many of them rightly."""

    images: int
    right: int

    @property
    def accuracy(self) -> float:
        return self.right / self.images


def split() -> Any:
    """Images to learn from, images to read, and the digits on the ones and on the others. Runs on a worker."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, digits = load_digits(return_X_y=True)
    return train_test_split(images, digits, test_size=0.5, random_state=7, stratify=digits)


def train() -> bytes:
    """A classifier fitted to the images to learn from, pickled. Runs on a worker."""
    from sklearn.svm import SVC

    images, _, digits, _ = split()
    return pickle.dumps(SVC(gamma=0.001, C=10.0).fit(images, digits))


def read(model: bytes, batch: int) -> Reading:
    """Read one of the batches of unseen images. Runs on a worker."""
    _, images, _, digits = split()
    mine = slice(batch, None, BATCHES)
    seen = pickle.loads(model).predict(images[mine])
    return Reading(len(seen), int((seen == digits[mine]).sum()))


def run(executor: Executor) -> Reading:
    """Train on half of the set and read the other half."""
    model = executor.submit(train).result()
    readings = list(executor.map(read, [model] * BATCHES, range(BATCHES)))
    return Reading(sum(each.images for each in readings), sum(each.right for each in readings))


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Read hand-written digits.")
    parser.add_argument("--endpoint", required=True, help="id of the endpoint to run on")
    with farcall.Executor(endpoint_id=parser.parse_args().endpoint) as executor:
        reading = run(executor)
    print(f"{reading.images} digits read, {reading.accuracy:.1%} of them rightly")


if __name__ == "__main__":
    main()
