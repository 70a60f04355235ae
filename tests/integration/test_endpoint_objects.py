"""Stores of objects at an endpoint, with each isolation and in an image: tasks of one submitter share theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farcall_common.environments import Environment
from tests.integration.test_endpoint_data import ALICE, BOB, endpoint_with, value
from tests.support.endpoint.levels import LEVELS, MISSING
from tests.support.images import DEBIAN, image

LARGE = 1_000_000


def put(text: str) -> Any:
    from farcall import store

    return store.put([text, bytes(LARGE)])


def read(found: list[Any]) -> list[Any]:
    return [found[0], len(found[1])]


@pytest.mark.parametrize("level", LEVELS)
def test_tasks_of_a_submitter_share_a_store(tmp_path: Path, level: str) -> None:
    with endpoint_with(tmp_path, isolation=level) as endpoint:
        cloud = endpoint.cloud
        references = {each: value(cloud, put, f"of {each}", submitter=each) for each in (ALICE, BOB, "")}
        for submitter, reference in references.items():
            assert value(cloud, read, reference, submitter=submitter) == [f"of {submitter}", LARGE]
        if level == "bubblewrap":  # elsewhere those who are given a path in memory can read there
            error = cloud.end(cloud.submit(read, references[ALICE], submitter=BOB)).error
            assert error["code"] == "OBJECT_GONE"
            assert "argument 1" in error["message"]


@pytest.mark.skipif(bool(MISSING["bubblewrap"]), reason=MISSING["bubblewrap"])
def test_a_task_in_an_image_has_the_same_store(tmp_path: Path) -> None:
    environment = Environment(type="bubblewrap", location=str(image(DEBIAN)))
    with endpoint_with(tmp_path, isolation="bubblewrap", locations=[environment.location]) as endpoint:
        outside = value(endpoint.cloud, put, "outside", submitter=ALICE)
        assert value(endpoint.cloud, read, outside, submitter=ALICE, environment=environment) == ["outside", LARGE]
        inside = value(endpoint.cloud, put, "inside", submitter=ALICE, environment=environment)
        assert value(endpoint.cloud, read, inside, submitter=ALICE) == ["inside", LARGE]
