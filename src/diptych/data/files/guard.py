"""Where a connection may lead: checked at the address that is dialled, whatever a name said before.

In: the host that a person named, or none where data named it. Out: an aiohttp session that dials no
other machine of this network, and follows no redirect to one or to another scheme. A name that is
public at first and private later (DNS rebinding) is refused: the check is the socket's.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver

from diptych.core.errors import DataError

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SHARED = ipaddress.ip_network("100.64.0.0/10")


class PrivateAddress(DataError):
    """A connection that would lead into this machine's own network."""


def is_public(address: str) -> bool:
    """Tell whether an IP address belongs to the internet; wrapped IPv4 counts as what it wraps."""
    found = _unwrapped(ipaddress.ip_address(address.partition("%")[0]))
    return found.is_global and not found.is_multicast and found not in _SHARED


def is_link_local(address: str) -> bool:
    """Tell whether an IP address is the link's own, where clouds hand out their credentials."""
    return _unwrapped(ipaddress.ip_address(address.partition("%")[0])).is_link_local


def _unwrapped(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    if isinstance(address, ipaddress.IPv4Address):
        return address
    wrapped = address.ipv4_mapped or address.sixtofour
    if address.teredo is not None:
        wrapped = address.teredo[1]
    if address in _NAT64:
        wrapped = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return wrapped or address


def open_session(
    *, named: str | None, schemes: Sequence[str], **options: Any
) -> aiohttp.ClientSession:
    """Open a guarded session; call it inside of an event loop.

    Args:
        named: a host that a person named, which may lie in this network; None: there is none.
        schemes: kinds of URL that a redirect may lead to.
        options: of aiohttp's session.
    """
    guard = _Guard(named)
    connector = aiohttp.TCPConnector(
        resolver=guard, socket_factory=guard.open_socket, use_dns_cache=False
    )
    tracing = aiohttp.TraceConfig()

    async def check(_session: Any, _context: Any, redirect: Any) -> None:
        check_redirect(redirect.url, target=redirect.response.headers, schemes=schemes)

    tracing.on_request_redirect.append(check)
    return aiohttp.ClientSession(connector=connector, trace_configs=[tracing], **options)


def check_redirect(url: Any, *, target: Any, schemes: Sequence[str]) -> None:
    """Refuse a redirect to another kind of URL.

    Raises:
        PrivateAddress: It leads to one that is not among `schemes`.
    """
    place = urljoin(str(url), target.get("Location") or target.get("URI") or "")
    if urlsplit(place).scheme not in schemes:
        raise PrivateAddress(
            f"A server redirects from {urlsplit(str(url)).scheme}:// to "
            f"{urlsplit(place).scheme}://",
            allowed=f"Allowed: {', '.join(schemes)}",
            cure="Name the address where the files are",
        )


class _Guard(AbstractResolver):
    """Resolves names, and opens sockets only to addresses that are public or were named."""

    def __init__(self, named: str | None) -> None:
        self._named = named
        self._resolver = aiohttp.ThreadedResolver()
        self._is_private: bool | None = None
        self._allowed: set[str] = set()
        if named is not None and _is_address(named):
            self._allowed.add(named)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[Any]:
        """Look a name up, and remember where the named one lies."""
        found = await self._resolver.resolve(host, port, family)
        if host == self._named:
            addresses = {each["host"] for each in found}
            if self._is_private is None:
                self._is_private = not all(is_public(address) for address in addresses)
            if self._is_private:
                self._allowed |= addresses
        return found

    async def close(self) -> None:
        """Close the resolver."""
        await self._resolver.close()

    def open_socket(self, address: tuple[Any, ...]) -> socket.socket:
        """Make the socket that dials an address.

        Raises:
            PrivateAddress: It is neither public nor the named host's.
        """
        family, kind, protocol, _, place = address
        host = str(place[0])
        if is_link_local(host) or not (is_public(host) or host in self._allowed):
            raise PrivateAddress(
                f"An address leads to {host}, in this machine's own network",
                allowed="Public addresses, and the host that the parameters name",
                cure="Copy the files to a folder, or name that host itself in the parameters",
            )
        return socket.socket(family=family, type=kind, proto=protocol)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
