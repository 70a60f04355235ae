"""Names of endpoints: which one is meant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from farcall._names import EndpointNames
from farcall_common.errors import ConfigurationError, EndpointUnknown

CLUSTER = "c1a57e40-0000-4000-8000-000000000001"
LAPTOP = "c1a50000-0000-4000-8000-000000000002"
OTHERS = "0f0f0000-0000-4000-8000-000000000003"


def endpoint(endpoint_id: str, name: str, display_name: str = "") -> dict[str, str]:
    return {"uuid": endpoint_id, "name": name, "display_name": display_name}


OWN = [endpoint(CLUSTER, "cluster", "The Cluster"), endpoint(LAPTOP, "laptop")]
ALL = [*OWN, endpoint(OTHERS, "cluster"), endpoint(OTHERS.replace("0003", "0004"), "public")]


def names(own: Any = OWN, everything: Any = ALL, *, home: Path | None = None, **environ: str) -> EndpointNames:
    variables: Mapping[str, str] = {"FARCALL_HOME": str(home or "/nonexistent"), **environ}
    return EndpointNames(lambda role: own if role == "owner" else everything, environ=variables)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("cluster", CLUSTER),
        ("The Cluster", CLUSTER),
        ("laptop", LAPTOP),
        ("public", ALL[3]["uuid"]),
        ("c1a57", CLUSTER),
        ("C1A57E40-0000", CLUSTER),
        ("0f0f0000-0000-4000-8000-000000000003", OTHERS),
        (OTHERS.upper(), OTHERS),
    ],
)
def test_an_endpoint_is_found_by_name_id_or_the_beginning_of_the_id(wanted: str, found: str) -> None:
    assert names().find(wanted) == found


@pytest.mark.parametrize("wanted", ["Cluster", "clust", "c1", "ffff", ""])
def test_an_endpoint_that_does_not_exist_is_refused(wanted: str) -> None:
    with pytest.raises((EndpointUnknown, ConfigurationError)):
        names().find(wanted)


def test_names_that_mean_several_endpoints_are_refused_with_their_ids() -> None:
    with pytest.raises(ConfigurationError, match=f"There are 2: cluster \\({CLUSTER}\\), laptop"):
        names().find("c1a5")
    with pytest.raises(ConfigurationError, match="which endpoint"):
        names().find(None)


def test_endpoints_of_others_do_not_take_the_place_of_own_ones() -> None:
    assert names(own=[]).find("public") == ALL[3]["uuid"]
    with pytest.raises(ConfigurationError, match="There are 2"):
        names(own=[]).find("cluster")


def test_the_default_is_in_the_environment_or_the_configuration_or_the_only_one(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[default]\nendpoint = "laptop"\n')
    assert names(home=tmp_path).find(None) == LAPTOP
    assert names(home=tmp_path, FARCALL_ENDPOINT="cluster").find(None) == CLUSTER
    assert names(own=OWN[:1]).find(None) == CLUSTER
    assert names(own=[], everything=ALL[3:]).find(None) == ALL[3]["uuid"]
    with pytest.raises(ConfigurationError, match="no endpoint"):
        names(own=[], everything=[]).find(None)


def test_endpoints_are_listed_once_in_a_while() -> None:
    asked: list[str] = []

    def listed(role: str) -> list[dict[str, str]]:
        asked.append(role)
        return OWN

    found = EndpointNames(listed, environ={})
    assert [found.find(name) for name in ("cluster", "cluster", CLUSTER, "laptop")] == [CLUSTER] * 3 + [LAPTOP]
    assert asked == ["owner", "owner"]
