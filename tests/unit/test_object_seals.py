"""Seals of objects in memory that tasks of other submitters could change."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from farcall_common import running
from farcall_common.errors import ObjectDamaged
from farcall_common.objects.memory import Memory
from farcall_common.objects.references import Reference
from farcall_common.objects.store import Store

LARGE = b"x" * 500_000


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(running, "seals_memory", True)
    monkeypatch.setenv("FARCALL_ENDPOINT_ID", "e1")
    return Store(Memory(tmp_path / "objects"))


def travelled(reference: Reference[Any]) -> Reference[Any]:
    found: Reference[Any] = pickle.loads(pickle.dumps(reference))
    return found


def file_of(store: Store, reference: Reference[Any]) -> Path:
    assert isinstance(store.connector, Memory)
    return Path(store.connector.path, reference.key.name)


@pytest.mark.parametrize("value", [7, LARGE, bytearray(LARGE)])
@pytest.mark.parametrize("endpoint_id", ["e1", ""])
def test_changed_object_is_refused_before_it_is_unpickled(
    store: Store, monkeypatch: pytest.MonkeyPatch, value: object, endpoint_id: str
) -> None:
    monkeypatch.setenv("FARCALL_ENDPOINT_ID", endpoint_id)
    reference = travelled(store.put(value))
    file = file_of(store, reference)
    original = file.read_bytes()
    assert reference.get() == value
    for at in (0, 10, 70, len(original) - 1):
        file.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
        with pytest.raises(ObjectDamaged, match="SHA-256"):
            reference.get()
    file.write_bytes(original + b"x")
    with pytest.raises(ObjectDamaged, match="should have"):
        reference.get()
    file.write_bytes(original[:-1])
    with pytest.raises(ObjectDamaged):
        reference.get()
    file.write_bytes(original)
    assert reference.get() == value


def test_object_of_another_reference_is_refused(store: Store) -> None:
    first, second = store.put(LARGE), store.put(LARGE[:-1] + b"y")
    file_of(store, first).write_bytes(file_of(store, second).read_bytes())
    with pytest.raises(ObjectDamaged):
        travelled(first).get()


def test_value_of_a_sealed_object_does_not_change_with_its_file(store: Store) -> None:
    reference = travelled(store.put(bytearray(LARGE)))
    value = reference.get()
    file_of(store, reference).write_bytes(bytes(len(LARGE)))
    assert value == LARGE


def test_buffer_of_sealed_memory_has_no_file(store: Store) -> None:
    buffer = store.buffer(500_000)
    buffer[:] = LARGE
    assert isinstance(store.connector, Memory)
    assert not Path(store.connector.path).exists()
    assert travelled(store.put(buffer)).get() == LARGE


def test_copy_at_another_endpoint_has_the_same_seal(store: Store, tmp_path: Path) -> None:
    reference = store.put(LARGE)
    copy = tmp_path / "copy"
    copy.write_bytes(file_of(store, reference).read_bytes())
    elsewhere = dataclasses.replace(reference, _copy=str(copy))
    assert elsewhere.get() == LARGE
    copy.write_bytes(copy.read_bytes()[:-1] + b"y")
    with pytest.raises(ObjectDamaged):
        elsewhere.get()


def test_object_without_a_seal_is_refused_where_all_have_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "seals_memory", False)
    reference = travelled(store.put(7))
    assert reference.get() == 7
    monkeypatch.setattr(running, "seals_memory", True)
    with pytest.raises(ObjectDamaged, match="has no seal"):
        reference.get()
