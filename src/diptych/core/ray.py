"""A connection to Ray: a running cluster, or one of this machine that ends with the block.

In: an address. Out: this process is a driver of that cluster. Knows nothing of what is run there.
Ray is imported here and in what runs under Ray, nowhere else; importing this module does not.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import diptych
from diptych.core.errors import RunError
from diptych.core.host import usable_cores

_MOST_FOLDER_CHARS = 43
"""Of a local cluster's folder: a socket's path has 107, of which Ray's session takes up to 64."""
_OBJECT_STORE_BYTES = 80 * 1024**2
"""Nearly the least that Ray takes: what runs here exchanges files, not objects."""
_DIAL_S = 10.0


def check_ray(address: str | None) -> None:
    """Refuse what cannot be reached before Ray waits for it: it does so for over five minutes.

    Raises:
        RunError: Ray is not installed, or nothing listens at the address.
    """
    if importlib.util.find_spec("ray") is None:
        raise RunError("Ray is not installed", cure="pip install 'diptych[ray]'")
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise RunError(
            f"'{address}' is no address of a Ray cluster that can be used",
            allowed="auto, or host:port of the cluster's GCS, such as 10.0.0.1:6379",
            cure="With ray:// or http:// start the command itself on the cluster: "
            "ray job submit --address ... -- kedro run ..., with address: auto",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_DIAL_S).close()
    except OSError as error:
        raise RunError(
            f"No Ray cluster answers at {address} ({error})",
            cure="Check the address (`ray status` on the cluster's head names it), and that this "
            "machine is one of the cluster's nodes",
        ) from error


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Yield a folder for a local cluster's sockets and logs; it is removed at the end."""
    parent = tempfile.gettempdir()
    # What is added: a slash, the prefix and eight letters.
    if len(parent) + 17 > _MOST_FOLDER_CHARS:
        parent = "/tmp"
    with tempfile.TemporaryDirectory(
        prefix="diptych-", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


@contextmanager
def connected(
    address: str | None,
    *,
    folder: Path | None = None,
    num_cpus: int | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Be a driver of a Ray cluster until the block ends.

    Args:
        address: of a running cluster; None starts one of this machine, whose processes end with the
            block, and with this process however that ends.
        folder: of the local cluster's files, a new one if None.
        num_cpus: what the local cluster has; None takes the cores that this process may use.
        runtime_env: handed to Ray, with the path of this package's sources.

    Raises:
        RunError: Ray is not installed, or does not answer.
    """
    check_ray(address)
    with ExitStack() as stack:
        options: dict[str, Any] = {"address": address}
        stack.enter_context(_variables({"RAY_USAGE_STATS_ENABLED": "0"}))
        if address is None:
            stack.enter_context(_variables(local_variables()))
            options = {
                "address": "local",
                "num_cpus": num_cpus or usable_cores(),
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "_temp_dir": str(folder or stack.enter_context(ray_folder())),
            }
        import ray

        try:
            ray.init(
                runtime_env=_with_sources(runtime_env or {}),
                logging_level=logging.WARNING,
                log_to_driver=False,
                **options,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"at {address}" if address else "of this machine"
            raise RunError(
                f"No Ray cluster {where} can be used: {error}",
                cure="Check `ray status` there; its Ray must be the version installed here",
            ) from error
        stack.callback(ray.shutdown)
        yield


def _with_sources(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """Have the cluster's processes find this package where it is found here."""
    paths = [str(Path(diptych.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {**runtime_env, "env_vars": {**variables, **runtime_env.get("env_vars", {})}}


def local_variables() -> dict[str, str]:
    """Return what keeps a local cluster to this machine and this user.

    Ray's servers run what they are sent. So they listen on loopback, and ask for a token that only
    this process and its children know.
    """
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # By this name: without clusters of several machines, nodes listen on loopback alone.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _token(),
    }


@cache
def _token() -> str:
    """Make one token for all clusters of this process: Ray's library reads it once."""
    return secrets.token_hex(32)


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables that are not set yet, for Ray and for what it starts."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
