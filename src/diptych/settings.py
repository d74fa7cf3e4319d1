"""Kedro's settings of this project."""

import os

# Nobody who clones this is tracked; and a tracker is asked for, never assumed.
for _name, _value in {
    "DO_NOT_TRACK": "1",
    "KEDRO_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
}.items():
    os.environ.setdefault(_name, _value)

from diptych.hooks import ProjectHooks  # noqa: E402
from diptych.session import Context, Session  # noqa: E402

HOOKS = (ProjectHooks(),)
SESSION_CLASS = Session
CONTEXT_CLASS = Context
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    # A recipe overrides single fields, not whole sections.
    "merge_strategy": {"parameters": "soft"},
}
# kedro-viz's hooks import pandas on every run (2 s) to measure tables that we don't have.
DISABLE_HOOKS_FOR_PLUGINS = ("kedro-viz", "kedro-telemetry")
