"""`kedro dashboard`: folders of runs in, a page served until Ctrl-C out.

Says where the page is, and what it means where others than this machine reach it.
"""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import click

from diptych.core.errors import ConfigError


def serve(
    folders: Sequence[Path],
    *,
    evaluation: Mapping[str, Path] | None,
    host: str,
    port: int,
    opens_browser: bool,
) -> None:
    """Serve a page over folders of runs until it is interrupted.

    Args:
        folders: each holds a folder per run.
        evaluation: where `parity`, `scores`, `predictions` and `examples` lie; None has none.
        host: the address; others than this machine's own loopback are warned about.
        port: 0 takes one that is free.
        opens_browser: whether a browser is opened, where there is a screen.

    Raises:
        ConfigError: the packages are not installed, or the address cannot be served.
    """
    _check_packages()
    from diptych.dashboard.answers import Evaluation
    from diptych.dashboard.cache import Cache, default_folder
    from diptych.dashboard.logs import Logs
    from diptych.dashboard.runs import Runs
    from diptych.dashboard.server import is_loopback, listen, make_app, own_names
    from diptych.dashboard.view import Desk

    logs = Logs(cache=Cache(default_folder()))
    desk = Desk(Runs(folders, logs=logs), Evaluation(**evaluation) if evaluation else None)
    server = listen(make_app(desk, hosts=own_names(host)), host=host, port=port)
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/"
    if not is_loopback(host):
        click.secho(
            f"WARNING: {host} is reached from other machines. Whoever can connect sees all runs, "
            "without a password and unencrypted; better is 127.0.0.1 and a tunnel: "
            f"ssh -L {server.server_port}:127.0.0.1:{server.server_port} THIS_MACHINE",
            fg="yellow",
            err=True,
        )
    click.echo(f"{url} shows {', '.join(map(str, folders))}; Ctrl-C ends it")
    if opens_browser and _has_screen():
        webbrowser.open(url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        click.echo("")
    finally:
        server.server_close()
        logs.close()


def _check_packages() -> None:
    if find_spec("dash") is None:
        raise ConfigError(
            "kedro dashboard needs dash, which is not installed",
            allowed="The extra 'dashboard' has it",
            cure="Run: pip install -c constraints.txt -e '.[dashboard]'",
        )


def _has_screen() -> bool:
    """Say whether a browser would be one with windows, not one in this terminal."""
    screens = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return bool(screens) or sys.platform in ("darwin", "win32")
