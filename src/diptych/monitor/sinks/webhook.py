"""A webhook: alerts in, one POST of JSON each out, to an address that stays in the environment."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

from diptych.core.errors import ConfigError
from diptych.core.records import Alert
from diptych.monitor.sinks.queued import Metrics

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 10.0


class Webhook:
    """Posts alerts as {"text": ...}.

    Args:
        variable: the environment's variable that holds the address: a secret.
        prefix: what every text begins with, such as the run's name.
    """

    name = "the webhook"

    def __init__(
        self,
        variable: str,
        *,
        prefix: str,
        getenv: Callable[[str], str | None] = os.environ.get,
    ) -> None:
        self._variable = variable
        self._prefix = prefix
        self._getenv = getenv
        self._address = ""
        self._open = urllib.request.build_opener(_NoRedirect).open
        self._failed = False

    def open(self) -> None:
        """Take the address.

        Raises:
            ConfigError: there is none, or it is neither https nor this machine's own.
        """
        self._address = check_address(self._getenv(self._variable), variable=self._variable)
        if urlsplit(self._address).scheme == "http":
            direct = urllib.request.ProxyHandler({})
            self._open = urllib.request.build_opener(_NoRedirect, direct).open

    def write(self, metrics: Metrics) -> None:
        """Send no metrics."""

    def alert(self, alert: Alert) -> None:
        """Post an alert; one that does not arrive is said once, and the next one is tried."""
        over = "over: " if alert.over else ""
        body = {"text": f"{self._prefix} step {alert.step}: {over}{alert.kind}: {alert.text}"}
        request = urllib.request.Request(
            self._address,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "diptych"},
            method="POST",
        )
        try:
            with self._open(request, timeout=_TIMEOUT_S):
                self._failed = False
        except Exception as error:  # its text may hold the address
            if not self._failed:
                code = getattr(error, "code", None)
                told = f"HTTP {code}" if code is not None else type(error).__name__
                _LOG.warning("an alert did not reach the webhook: %s", told)
            self._failed = True

    def close(self) -> None:
        """Nothing is kept back."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nobody to another address, which could be anything's."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """Refuse."""
        return


def check_address(address: str | None, *, variable: str) -> str:
    """Return a webhook's address if it may be used.

    Raises:
        ConfigError: names the variable, never what it holds.
    """
    if not address:
        raise ConfigError(
            f"observe.alerts.webhook names {variable}, which the first rank's environment lacks",
            cure="Set it where the ranks start, or set webhook to null",
        )
    parts = urlsplit(address)
    if parts.scheme == "https" and parts.hostname:
        return address
    if parts.scheme == "http" and _is_this_machine(parts.hostname):
        return address
    raise ConfigError(
        f"The address in {variable} cannot be used",
        allowed="https://..., or http:// to this machine itself",
        cure=f"Put such an address into {variable}",
    )


def _is_this_machine(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
