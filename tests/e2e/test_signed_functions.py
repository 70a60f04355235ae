"""Signed functions, through the whole system: registered, signed, refused and run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from farcall import Client, Executor, TaskFailed
from farcall_local.endpoint import LocalEndpoint
from tests.unit.test_ssh_signatures import KEY, OTHER, line, write_key
from tests.waiting import WAIT_S

SOURCE = "def grow(x):\n    return x + 1\n"


def test_an_endpoint_runs_what_an_allowed_key_has_signed(
    client: Client, own_endpoint: Callable[..., LocalEndpoint], tmp_path: Path
) -> None:
    endpoint = own_endpoint("signed")
    endpoint.stop()
    with (endpoint.directory / "config.yaml").open("a") as config:
        config.write("\nallowed_signers: allowed_signers\n")
    signers = endpoint.directory / "allowed_signers"
    signers.write_text(line("ssh-ed25519") + "\n")
    signers.chmod(0o600)
    endpoint.start()
    assert "allowed signers" in endpoint.command("status", endpoint.name)
    function_id = client.register_source_code(SOURCE, "grow")
    copy_id = client.register_source_code(SOURCE, "grow")

    with Executor(endpoint.endpoint_id, client=client) as executor:

        def call(called: str) -> object:
            return executor.submit_to_registered_function(called, [1]).result(WAIT_S)

        with pytest.raises(TaskFailed, match="FUNCTION_NOT_SIGNED"):
            call(function_id)
        assert client.update_function(function_id, sign_with=write_key(tmp_path, OTHER)) == 2
        with pytest.raises(TaskFailed, match="not among the allowed signers"):
            call(function_id)
        assert client.update_function(function_id, sign_with=write_key(tmp_path, KEY)) == 3
        assert call(function_id) == 2, "signed in the session in which it was refused"
        assert call(f"{function_id}@1") == 2, "the same body"
        client.update_function(function_id, name="shrink")
        assert call(copy_id) == 2, "what was signed stays signed while the agent runs"
    assert "function grow" in endpoint.log_path.read_text()
