"""What the page for users of Globus Compute names is there, and what it calls refused is refused."""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

import msgspec
import pytest

import farcall
from farcall.testing import FakeCloud
from farcall_common.task_options import TaskOptions
from farcall_endpoint import config
from farcall_endpoint.config.schema import EngineConfig
from tests.docs.pages import DOCS

TEXT: Final = (DOCS / "migrate.md").read_text(encoding="utf-8")
ENDPOINT: Final = "00000000-0000-4000-8000-000000000001"
#: What the page says is refused, as it is written there, and how it is asked for.
REFUSED: Final[dict[str, Any]] = {
    "`Client(app=…)`": lambda c: farcall.Client("https://farcall.test", "token", app=object()),
    "`Client(environment=…)`, `local_compute_services`": lambda c: farcall.Client(
        "https://farcall.test", "token", environment="production"
    ),
    "`Client.register_function`: `group`, `ha_endpoint_id`": lambda c: c.register_function(print, group=ENDPOINT),
    "`Client.register_endpoint`: `auth_policy`, `high_assurance`, `admins`": lambda c: c.register_endpoint(
        "x", high_assurance=True
    ),
    "`Client.create_batch`: `create_websocket_queue`": lambda c: c.create_batch(create_websocket_queue=True),
    "`Client.get_result_amqp_url`": lambda c: c.get_result_amqp_url(),
    "`Client.stop_endpoint`": lambda c: c.stop_endpoint(ENDPOINT),
    "`Client.logout`": lambda c: c.logout(),
    "`amqp_port`": lambda c: farcall.Executor(ENDPOINT, c, amqp_port=443),
}


def test_every_name_on_the_page_exists() -> None:
    names = set(re.findall(r"`(?:farcall\.)?([A-Z]\w+)\.(\w+)`", TEXT))
    known = {(owner, name) for owner, name in names if hasattr(farcall, owner)}
    assert len(known) > 40
    missing = {f"{owner}.{name}" for owner, name in known if not hasattr(getattr(farcall, owner), name)}
    assert missing == set()
    alone = set(re.findall(r"`farcall\.(\w+)`", TEXT))
    assert alone
    assert {name for name in alone if not hasattr(farcall, name)} == set()


def test_refused_options_match_the_page() -> None:
    rows = {row.split(" | ")[0].removeprefix("| ") for row in TEXT.splitlines() if "| refused" in row}
    assert rows == set(REFUSED)


@pytest.mark.parametrize("asked", REFUSED.values(), ids=list(REFUSED))
def test_it_is_refused(asked: Any) -> None:
    with FakeCloud() as cloud, cloud.client() as client, pytest.raises(farcall.Unsupported) as refused:
        asked(client)
    assert refused.value.hint


def test_defaults_match_the_page() -> None:
    given = inspect.signature(farcall.Executor).parameters
    assert given["batch_size"].default == 500
    assert given["api_burst_limit"].default is None
    assert TaskOptions().max_attempts == 3
    assert inspect.signature(farcall.Client).parameters["do_version_check"].default is False


def test_endpoint_fields_with_the_same_name_exist() -> None:
    [row] = [row for row in TEXT.splitlines() if row.startswith("| `max_workers_per_node`")]
    same = re.findall(r"`(\w+)`", row)
    assert len(same) > 5
    assert set(same) <= {field.name for field in msgspec.structs.fields(EngineConfig)}
    for provider in ("Slurm", "PBSPro", "Torque", "LSF", "GridEngine", "Condor", "Kubernetes", "Local"):
        assert hasattr(config, f"{provider}ProviderConfig")
