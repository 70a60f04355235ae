"""Which URLs a storage of an endpoint's configuration has."""

from __future__ import annotations

import pytest

from farcall_endpoint.files.access import normalized
from farcall_endpoint.files.settings import Storage


def has(storage: str, url: str) -> bool:
    return Storage(url=storage).has(normalized(url))


@pytest.mark.parametrize(
    ("storage", "url"),
    [
        ("s3://lab/public", "s3://lab/public/a"),
        ("s3://lab/public/", "s3://lab/public/a?b#c"),
        ("s3://lab", "s3://lab/a"),
        ("https://host/public", "https://HOST/public/a?version=1"),
        ("https://host/public", "https://host/public/a;v=1"),
        ("https://host", "https://host/a..b/..c"),
    ],
)
def test_a_url_below_a_storage_belongs_to_it(storage: str, url: str) -> None:
    assert has(storage, url)


@pytest.mark.parametrize(
    ("storage", "url"),
    [
        ("s3://lab", "s3://lab-private/a"),
        ("s3://lab/public", "s3://lab/public-not/a"),
        ("s3://lab/public", "s3://lab/public?a"),  # keys that begin alike, in no folder
        ("s3://lab/public", "s3://lab/public#/../secret"),
        ("s3://lab", "s3://lab?@other/a"),
        ("s3://lab/public", "s3://lab/public/../secret"),
        ("s3://lab/public", "s3://lab/public/%252e%252e/secret"),
        ("https://host/public", "https://host.evil/public/a"),
        ("https://host/public", "https://host@evil/public/a"),
        ("https://host/public", "https://evil#@host/public/a"),
        ("https://host/public", "https://host:8443/public/a"),
        ("https://host/public", "https://host/public/..;/secret"),
        ("https://host/public", "https://host/public/%2e%2e;a=b/secret"),
        ("https://host/public", "https://host/public/%5c..%5csecret"),
    ],
)
def test_a_url_that_may_lead_elsewhere_belongs_to_no_storage(storage: str, url: str) -> None:
    assert not has(storage, url)
