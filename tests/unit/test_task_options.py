"""Task options: one definition, used by every part."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import msgspec
import pytest

from farcall import Executor
from farcall_common.task_options import TaskOptions, TaskOptionsDict
from farcall_lambdas.models.tasks import Submit, SubmitV2

NAMES = set(TaskOptions.__struct_fields__)


def test_every_option_has_a_keyword_an_attribute_and_a_field_of_a_submit() -> None:
    # Requirements write an environment, and the client finds sources itself.
    assert get_type_hints(TaskOptionsDict).keys() == (NAMES | {"requirements"}) - {
        "sources",
        "source_files",
        "max_calls",
    }
    assert {name for name in get_type_hints(TaskOptionsDict) if not hasattr(Executor, name)} == set()
    for shape in (Submit, SubmitV2):
        assert NAMES - shape.model_fields.keys() == set()
        made = shape.model_construct(**{name: field.default for name, field in shape.model_fields.items()})
        assert made.options() == TaskOptions()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"walltime_s": 0.0},
        {"walltime_s": -1},
        {"walltime_s": float("inf")},
        {"walltime_s": float("nan")},
        {"memory_bytes": 0},
        {"memory_bytes": "2 GB"},
        {"num_nodes": True},
        {"num_ranks": 1.5},
        {"keep_output": "yes"},
        {"idempotent": None},
    ],
)
def test_values_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TaskOptions.of(**wrong)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TaskOptions.of(memory_bytes=1).changed(**wrong)


def test_unknown_option_or_non_json_is_a_type_error() -> None:
    wrong: Any = {"wall_time": 5}
    with pytest.raises(TypeError, match="wall_time"):
        TaskOptions.of(**wrong)
    for value in (["a list"], {"not": {object()}}, {"walltime_s": math.nan}, {"a": [{"b": (-math.inf,)}]}):
        for name in ("resource_specification", "user_endpoint_config"):
            wrong = {name: value}
            with pytest.raises(TypeError, match=name):
                TaskOptions.of(**wrong)


def test_changed_options_keep_the_others() -> None:
    options = TaskOptions.of(walltime_s=5, result_serializers=["a"], resource_specification={"x": 1})
    assert options.changed(max_attempts=1) == TaskOptions(
        walltime_s=5.0, max_attempts=1, result_serializers=("a",), resource_specification={"x": 1}
    )
    assert options.changed(walltime_s=None, result_serializers=None, resource_specification=None) == TaskOptions()


def test_a_resource_specification_is_translated_once() -> None:
    said = {
        "num_nodes": 2,
        "ranks_per_node": 4,
        "memory_bytes": 5,
        "keep_output": True,
        "num_ranks": None,
        "queue": "q",
    }
    options = TaskOptions.of(memory_bytes=3, resource_specification=said).translated()
    assert options == TaskOptions(
        num_nodes=2, ranks_per_node=4, memory_bytes=3, keep_output=True, resource_specification={"queue": "q"}
    )
    assert options.translated() is options
    assert TaskOptions.of(resource_specification={"num_nodes": 1}).translated() == TaskOptions(num_nodes=1)


@pytest.mark.parametrize("value", [0, -1, "2 GB", True, 1.5])
def test_resource_specification_with_an_invalid_limit_is_refused(value: object) -> None:
    options = TaskOptions.of(resource_specification={"memory_bytes": value})
    with pytest.raises(ValueError, match="memory_bytes"):
        options.translated()
    assert options.untranslatable() == ("memory_bytes", value)
    assert TaskOptions.of(resource_specification={"queue": "q"}).untranslatable() is None


def test_unset_options_take_no_bytes() -> None:
    assert msgspec.json.encode(TaskOptions()) == b"{}"
    assert TaskOptions().to_json() == {"idempotent": True, "max_attempts": 3}
    assert TaskOptions.of(memory_bytes=5).to_json() == {"idempotent": True, "max_attempts": 3, "memory_bytes": 5}
