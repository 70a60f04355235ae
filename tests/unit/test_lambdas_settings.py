"""The settings of the API."""

from __future__ import annotations

import pytest

from farcall_common.errors import ConfigurationError
from farcall_lambdas.settings import ApiSettings


def test_limits_have_defaults_and_are_read_from_the_environment() -> None:
    settings = ApiSettings.from_environment({"FARCALL_MAX_PAYLOAD_BYTES": "1000", "FARCALL_HEARTBEAT_S": "1.5"})

    assert settings == ApiSettings(max_payload_bytes=1000, heartbeat_s=1.5)
    assert (ApiSettings().max_payload_bytes, ApiSettings().max_inline_bytes) == (10 * 1024 * 1024, 64 * 1024)
    assert ApiSettings().max_request_bytes == 4 * 1024 * 1024


@pytest.mark.parametrize("value", ["", "much", "0", "-1", "1.5"])
def test_a_limit_must_be_a_positive_number(value: str) -> None:
    with pytest.raises(ConfigurationError, match="FARCALL_MAX_INLINE_BYTES"):
        ApiSettings.from_environment({"FARCALL_MAX_INLINE_BYTES": value})


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_time_must_be_finite(value: str) -> None:
    with pytest.raises(ConfigurationError):
        ApiSettings.from_environment({"FARCALL_HEARTBEAT_S": value})
