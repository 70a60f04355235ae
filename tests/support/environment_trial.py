"""Workers in an environment, as an ordinary user.

``python -m tests.support.environment_trial TYPE LOCATION DIRECTORY`` prints what a fresh worker and a fork saw, or two
fresh ones where the type permits no forks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from farcall_common.environments import Environment
from farcall_endpoint.environments.prepare.technologies import without_forks
from farcall_endpoint.manager.core.events import EnvironmentReady
from tests.support.environments import running_node
from tests.waiting import wait_until


def seen() -> tuple[str, str, str | None]:
    import os
    import pathlib
    import sys

    return sys.executable, str(pathlib.Path.cwd()), os.environ.get("OF_IMAGE")


def main(type_: str, location: str, directory: str) -> None:
    environment = Environment(type=type_, location=location)
    with running_node(Path(directory)) as node:
        worker = node.ready(environment)
        answers = [node.run(worker, seen)]

        def is_forkable() -> bool:
            node.serve()
            return EnvironmentReady(environment.key, forkable=True) in node.events

        permits_forks = not without_forks(type_, confined=False)
        if permits_forks:
            wait_until(is_forkable)
        fork = node.launch(environment)
        assert (fork.container is None) == permits_forks
        node.packet(fork)
        answers.append(node.run(fork, seen))
        deaths = [node.kill(each) for each in (worker, fork)]
    print(json.dumps([answers, deaths]))


if __name__ == "__main__":
    main(*sys.argv[1:])
