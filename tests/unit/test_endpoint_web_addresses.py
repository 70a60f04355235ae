"""Files on the web: addresses that submitters without rights in the endpoint's network may reach, and versions."""

from __future__ import annotations

import ipaddress
from typing import Final

import httpx
import pytest

from farcall_endpoint.files.movers import Found
from farcall_endpoint.files.movers.globus_documents import found_of
from farcall_endpoint.files.movers.web import _found, _is_public

#: Blocks of https://www.iana.org/assignments/iana-ipv4-special-registry that are not globally reachable, those for
#: which the registry says N/A, and multicast.
_IPV4: Final = (
    *("0.0.0.0/8", "0.0.0.0/32", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.0.0.0/24", "192.0.0.0/29", "192.0.0.8/32", "192.0.0.170/32", "192.0.0.171/32", "192.0.2.0/24"),
    *("192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4"),
    *("240.0.0.0/4", "255.255.255.255/32"),
)
#: The same of iana-ipv6-special-registry, and site-local addresses (RFC 3879).
_IPV6: Final = (
    *("::1/128", "::/128", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001::/32", "2001:2::/48"),
    *("2001:10::/28", "2001:db8::/32", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
)
#: Where virtual machines of clouds reach services of their host: AWS, GCP, Alibaba, Oracle, Azure, IBM.
_CLOUDS: Final = (
    *("169.254.169.254", "169.254.170.2", "fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "192.0.0.192"),
    *("168.63.129.16", "161.26.0.7", "166.9.12.1"),
)


class _EachIsGlobal4(ipaddress.IPv4Address):
    """An address by a release of Python whose own table has none of the blocks."""

    is_global = True


class _EachIsGlobal6(ipaddress.IPv6Address):
    is_global = True


def _ends(blocks: tuple[str, ...]) -> list[str]:
    networks = map(ipaddress.ip_network, blocks)
    return [str(each[place]) for each in networks for place in (0, -1)]


@pytest.mark.parametrize("text", [*_ends(_IPV4), *_ends(_IPV6), *_CLOUDS])
def test_special_addresses_are_refused_by_the_tables_of_farcall(text: str) -> None:
    assert not _is_public(_EachIsGlobal6(text) if ":" in text else _EachIsGlobal4(text))


@pytest.mark.parametrize("text", [*_ends(_IPV4), *(each for each in _CLOUDS if "." in each)])
def test_forms_of_special_addresses_in_ipv6_are_refused(text: str) -> None:
    number = int(ipaddress.IPv4Address(text))
    forms = [
        (0xFFFF << 32) + number,
        (0xFFFF << 48) + number,
        (0x64FF9B << 96) + number,
        (0x2002 << 112) + (number << 80),
    ]
    assert not [each for each in map(ipaddress.IPv6Address, forms) if _is_public(each)]


@pytest.mark.parametrize("text", ["1.1.1.1", "192.31.196.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1"])
def test_public_addresses_are_taken(text: str) -> None:
    assert _is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    ("headers", "version"),
    [
        ({"etag": '"1"', "last-modified": "Thu, 01 Jan 2099 00:00:00 GMT"}, '"1"'),
        ({"last-modified": "Thu, 01 Jan 2026 00:00:00 GMT"}, "Thu, 01 Jan 2026 00:00:00 GMT 4"),
        ({"last-modified": "Thu, 01 Jan 2099 00:00:00 GMT"}, ""),
        ({"last-modified": "Thu, 01 Jan 2026 00:00:00 GMT", "date": "Thu, 01 Jan 2026 00:00:01 GMT"}, ""),
        ({"last-modified": "yesterday"}, ""),
        ({}, ""),
    ],
)
def test_a_time_is_a_version_once_the_file_cannot_change_within_it(headers: dict[str, str], version: str) -> None:
    assert _found(httpx.Response(200, headers={**headers, "content-length": "4"})) == Found(4, version)


@pytest.mark.parametrize(("modified", "is_version"), [("2026-01-01 00:00:00+00:00", True), ("2099-01-01", False)])
def test_the_same_holds_for_files_of_globus(modified: str, is_version: bool) -> None:
    found = found_of("globus://c/f", {"size": 4, "last_modified": modified})
    assert found == Found(4, f"4 {modified}" if is_version else "")
