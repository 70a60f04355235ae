"""The memory of workers in environments, as the warm pool counts it."""

from __future__ import annotations

from pathlib import Path

from farcall_common.environments import Environment
from farcall_endpoint.manager.core.events import EnvironmentReady
from tests.support import images
from tests.support.environments import running_node


def test_the_memory_of_a_worker_is_measured(tmp_path: Path) -> None:
    def fill() -> int:
        import builtins

        builtins.kept = bytearray(b"x") * 100_000_000  # type: ignore[attr-defined]
        return 0

    environment = Environment(type="bubblewrap", location=str(images.image(images.DEBIAN)))
    with running_node(tmp_path) as node:
        worker = node.ready(environment)
        before = node.launcher.measured(worker)
        node.run(worker, fill)
        after = node.launcher.measured(worker)
        assert isinstance(before, EnvironmentReady)
        assert isinstance(after, EnvironmentReady)
        assert before.memory_bytes is not None
        assert after.memory_bytes is not None
        assert 2_000_000 < before.memory_bytes < 90_000_000 < after.memory_bytes - before.memory_bytes
        node.launcher.release(environment.key)
        assert node.launcher.measured(worker) is None
