"""Mover of files on the web: ``https://``, and ``http://`` with a checksum; by ``httpx``. obstore looks a file up only
where the server says when it was modified, and drops the query of a URL.

A submitter without rights in the endpoint's network reaches public addresses only: the name is resolved here, each
address is checked, and the connection goes to the one that was checked, also behind each redirect.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import functools
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import httpx

from farcall_common.file_arguments import shown
from farcall_common.http_client import http_client
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.files.movers import DraftWriter, Found, MoveCancelled, MoveError, ReadOnlyMover, is_settled

SCHEMES: Final = frozenset({"http", "https"})
_MOST_REDIRECTS: Final = 10
_CONNECTIONS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=64)
_TIMEOUT: Final = httpx.Timeout(60.0, connect=15.0)
_GONE: Final = frozenset({404, 410})
_DENIED: Final = frozenset({401, 403, 407})
_NO_HEAD: Final = frozenset({400, 401, 403, 405, 501})
"""What servers answer that know no HEAD, or have signed a URL for GET only."""
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_WITH_IPV4: Final = tuple(map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96")))
"""Addresses that end with one of IPv4: compatible ones, translated ones, and those of NAT64."""
_NOT_PUBLIC: Final = tuple(
    map(
        ipaddress.ip_network,
        # Special-purpose registries of IANA: blocks that are not globally reachable, and deprecated ones. ``is_global``
        # has other tables in each release of Python.
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
            *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
            *("::1/128", "::/128", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001:db8::/32"),
            *("3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
            # Hosts and services that clouds give to their virtual machines alone: Azure, IBM. Those of other clouds
            # are in the blocks above (Alibaba: 100.100.100.200, Oracle: 192.0.0.192).
            *("168.63.129.16/32", "161.26.0.0/16", "166.8.0.0/14"),
        ),
    )
)
"""Networks of hosts that are not public. In 64:ff9b:1::/48 the place of the IPv4 address depends on the network."""


class WebMover(ReadOnlyMover):
    """Gets files of one submitter.

    :param may_reach: whether the submitter may reach a URL wherever it is; others must be ``https`` and public.
    """

    def __init__(self, *, may_reach: Callable[[str], bool]) -> None:
        self._may_reach = may_reach
        self._client: httpx.Client | None = None
        self._lock = threading.Lock()

    def stat(self, url: str) -> Found:
        """See :class:`~farcall_endpoint.files.movers.Mover`."""
        with self._requested("HEAD", url) as response:
            if response.status_code in _NO_HEAD:
                return Found(None)
            _check(response, url)
            return _found(response)

    def fetch(
        self, url: str, draft: Path, found: Found, report: Callable[[int], None], cancelled: Callable[[], bool]
    ) -> str:
        """See :class:`~farcall_endpoint.files.movers.Mover`."""
        with self._requested("GET", url) as response, DraftWriter(draft) as file:
            _check(response, url)
            now = _found(response)
            if found.version and now.version != found.version:
                raise MoveError(outcomes.file_changed(shown(url)))
            for chunk in response.iter_raw():  # as they come: a slow one has progress, and can be cancelled
                if cancelled():
                    raise MoveCancelled
                file.write(chunk)
                report(file.size_bytes)
        if now.size_bytes is not None and file.size_bytes != now.size_bytes:
            raise MoveError(outcomes.file_unreachable(shown(url), "the connection ended before the file did"))
        return file.sha256()

    @contextlib.contextmanager
    def _requested(self, method: str, url: str) -> Iterator[httpx.Response]:
        """The answer behind all redirects."""
        try:
            target = httpx.URL(url)
            for _ in range(_MOST_REDIRECTS):
                if target.scheme != "https" and url.startswith("https:"):
                    raise MoveError(outcomes.file_denied(shown(url), "its server redirects to http://"))
                with self._sent(method, target, url) as response:
                    location = response.headers.get("location", "")
                    if response.status_code not in _REDIRECTS or not location:
                        yield response
                        return
                target = target.join(location)
            raise MoveError(outcomes.file_denied(shown(url), f"its server redirects more than {_MOST_REDIRECTS} times"))
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise MoveError(outcomes.file_unsupported(shown(url), str(error))) from error
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise MoveError(outcomes.file_unreachable(shown(url), reason)) from error

    @contextlib.contextmanager
    def _sent(self, method: str, target: httpx.URL, url: str) -> Iterator[httpx.Response]:
        """The answer of one server."""
        headers = {"accept-encoding": "identity"}
        with contextlib.ExitStack() as opened:
            if self._may_reach(str(target)):
                with self._lock:
                    self._client = self._client or _make_client()
                request = self._client.build_request(method, target, headers=headers)
                response = self._client.send(request, stream=True)
            elif target.scheme != "https":
                raise MoveError(outcomes.file_denied(shown(url), "only https:// is open to the task's submitter"))
            else:
                # A client of its own: connections to one address are not for other names.
                client = opened.enter_context(_make_client())
                headers["host"] = target.netloc.decode()
                address = target.copy_with(host=_public_address(target, url))
                names = {"sni_hostname": target.host}
                response = client.send(
                    client.build_request(method, address, headers=headers, extensions=names), stream=True
                )
            opened.callback(response.close)
            yield response


@functools.cache
def _trusted() -> ssl.SSLContext:
    """The certificates that this system trusts; to read them takes a while."""
    return ssl.create_default_context()


def _make_client() -> httpx.Client:
    return http_client(timeout=_TIMEOUT, certificates=_trusted, limits=_CONNECTIONS)


def _public_address(target: httpx.URL, url: str) -> str:
    """An address of a host; all of them must be public.

    :raises MoveError: if one is not, or there is none.
    """
    try:
        found = socket.getaddrinfo(target.host, target.port or 443, type=socket.SOCK_STREAM)
    except OSError as error:
        raise MoveError(outcomes.file_unreachable(shown(url), f"{target.host}: {error.strerror or error}")) from error
    addresses = [str(each[4][0]) for each in found]
    for address in addresses:
        if not _is_public(ipaddress.ip_address(address.partition("%")[0])):
            reason = f"{target.host} is not a public address, and only those are open to the task's submitter"
            raise MoveError(outcomes.file_denied(shown(url), reason))
    return addresses[0]


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address, and the IPv4 address to which a gateway translates it, is in no private network."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and any(address in each for each in _WITH_IPV4):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None and not _is_public(inner):
            return False
        if address.ipv4_mapped:
            return True
    return address.is_global and not any(address in each for each in _NOT_PUBLIC)


def _check(response: httpx.Response, url: str) -> None:
    """Refuse an answer that is not the file."""
    status = response.status_code
    if status in _GONE:
        raise MoveError(outcomes.file_not_found(shown(url)))
    if status in _DENIED:
        raise MoveError(outcomes.file_denied(shown(url), f"its server answers with HTTP status {status}"))
    if status == 429 or status >= 500:
        raise MoveError(outcomes.file_unreachable(shown(url), f"its server answers with HTTP status {status}"))
    if status != 200:
        raise MoveError(outcomes.file_unsupported(shown(url), f"its server answers with HTTP status {status}"))


def _found(response: httpx.Response) -> Found:
    headers = response.headers
    length = headers.get("content-length", "")
    size_bytes = int(length) if length.isdecimal() else None
    etag, modified = headers.get("etag", ""), headers.get("last-modified", "")
    if etag or not (modified and length):
        return Found(size_bytes, etag)
    changed_at = _time(modified)
    is_version = changed_at is not None and is_settled(changed_at, _time(headers.get("date", "")))
    return Found(size_bytes, f"{modified} {length}" if is_version else "")


def _time(text: str) -> datetime.datetime | None:
    """A time in a header; None if it is none."""
    try:
        found = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=datetime.UTC)
