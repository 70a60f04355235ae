"""Train a model on one worker, then read hand-written digits with it on all of them.

    python examples/digits.py --endpoint ENDPOINT_ID

The images are the real ones of scikit-learn's digits set (NIST forms, 8 x 8 pixels). The model that training returns is
an ordinary object; it travels back here and out again with every batch of images that it is to read.
"""

from __future__ import annotations

import argparse
import dataclasses
from concurrent.futures import Executor
from typing import Any

BATCH_IMAGES = 100


@dataclasses.dataclass(frozen=True)
class Reading:
    """How many images were read, and how many of them rightly."""

    images: int
    right: int

    @property
    def accuracy(self) -> float:
        return self.right / self.images


def train(images: Any, digits: Any) -> Any:
    """A classifier for flattened images (n x 64), fitted to the digits they show. Runs on a worker."""
    from sklearn.svm import SVC

    return SVC(gamma=0.001, C=10.0).fit(images, digits)


def read(model: Any, images: Any) -> list[int]:
    """The digits that the model sees on the images. Runs on a worker."""
    return [int(digit) for digit in model.predict(images)]


def run(executor: Executor) -> Reading:
    """Train on half of the set and read the other half."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, digits = load_digits(return_X_y=True)
    known, unseen, answers, truth = train_test_split(images, digits, test_size=0.5, random_state=7, stratify=digits)
    model = executor.submit(train, known, answers).result()
    batches = [unseen[start : start + BATCH_IMAGES] for start in range(0, len(unseen), BATCH_IMAGES)]
    seen = [digit for digits_seen in executor.map(read, [model] * len(batches), batches) for digit in digits_seen]
    return Reading(len(seen), sum(int(a) == int(b) for a, b in zip(seen, truth, strict=True)))


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Read hand-written digits.")
    parser.add_argument("--endpoint", required=True, help="id of the endpoint to run on")
    with farcall.Executor(endpoint_id=parser.parse_args().endpoint) as executor:
        reading = run(executor)
    print(f"{reading.images} digits read, {reading.accuracy:.1%} of them rightly")


if __name__ == "__main__":
    main()
