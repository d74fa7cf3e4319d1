"""Kedro's session and context, with checks before anything runs and unchanged nodes skipped.

In: what `kedro run` was asked for. Out: the same run by `SkippingRunner`, from the project's
folder; or a `ConfigError` that names the nearest pipeline, environment, tag, node or parameter.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from kedro.config import AbstractConfigLoader, MissingConfigException
from kedro.framework.context import KedroContext
from kedro.framework.project import pipelines
from kedro.framework.session import KedroSession
from kedro.io import CatalogProtocol, MemoryDataset
from kedro.runner import AbstractRunner, SequentialRunner

from diptych.core.errors import ConfigError, nearest
from diptych.guards import check_catalog, check_links, places
from diptych.launch.process import end_with_dvc
from diptych.parameters import check
from diptych.pipeline_registry import use_stages
from diptych.runner import SkippingRunner
from diptych.staging import stage_names


class Context(KedroContext):
    """Kedro's context with the parameters as checked sections; the stages make the pipelines."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stages = read_stages(self.config_loader)
        self._sections: dict[str, Any] | None = None
        use_stages(self._stages)

    def _get_catalog(self, *args: Any, **options: Any) -> CatalogProtocol:
        """Make the catalog of entries that run no code and lie where they seem to.

        Raises:
            ConfigError: an entry names other code than ours, or a link leads away from `data`.
        """
        entries = self.config_loader["catalog"]
        check_catalog(entries)
        folders = self.params["folders"].model_dump().values()
        check_links(places(entries, folders), project=self.project_path)
        return super()._get_catalog(*args, **options)

    def _get_parameters(self) -> dict[str, Any]:
        """Return parameters as datasets that say how they are copied.

        To find that out for itself, Kedro imports pandas in every run.
        """
        return {
            name: MemoryDataset(value, copy_mode="deepcopy")
            for name, value in super()._get_parameters().items()
        }

    @property
    def params(self) -> dict[str, Any]:
        """The parameters by top-level key, each a frozen section.

        Raises:
            ConfigError: a parameter is unknown or ill-typed.
        """
        if self._sections is None:
            checked = check(
                self.config_loader["parameters"],
                runtime=self._runtime_params or {},
                stages=self._stages,
            )
            self._sections = {name: getattr(checked, name) for name in type(checked).model_fields}
        return dict(self._sections)


class Session(KedroSession):
    """Kedro's session, which skips what is unchanged and refuses what it doesn't know."""

    def load_context(self) -> KedroContext:
        """Load the context.

        Raises:
            ConfigError: `--env` names no folder of `conf`.
        """
        _refuse_unknown_env(self.store.get("env"), conf=Path(self._conf_source))
        return super().load_context()

    def run(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Run pipelines; the arguments are those of Kedro's session.

        Raises:
            ConfigError: a pipeline, environment, tag, node or parameter is unknown.
        """
        asked = inspect.signature(super().run).bind(*args, **options).arguments
        use_stages(read_stages(self._get_config_loader()))
        names = asked.get("pipeline_names") or [asked.get("pipeline_name") or "__default__"]
        _refuse_unknown(names, what="pipeline", allowed=pipelines)
        nodes = [node for name in names for node in pipelines[name].nodes]
        tags = [tag for node in nodes for tag in node.tags]
        _refuse_unknown(asked.get("tags"), what="tag", allowed=tags)
        for option in ("node_names", "from_nodes", "to_nodes"):
            _refuse_unknown(asked.get(option), what="node", allowed=[node.name for node in nodes])
        asked["runner"] = choose_runner(asked.get("runner"), root=self._project_path)
        end_with_dvc()
        with contextlib.chdir(self._project_path):
            return super().run(**asked)


def read_stages(loader: AbstractConfigLoader) -> tuple[str, ...]:
    """List the stages in the files' order; Kedro would put those first that --params names.

    Raises:
        ConfigError: a parameter file cannot be read, or names something twice.
    """
    files = copy.copy(loader)
    files.runtime_params = {}
    try:
        return stage_names(files["parameters"])
    except MissingConfigException:
        return ()
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"The parameter files cannot be read: {' '.join(str(error).split())}",
            allowed="Every name once in a file: two stages cannot have one name",
            cure="Correct the file in conf/base/ or conf/<--env>/",
        ) from error


def choose_runner(runner: AbstractRunner | None, *, root: Path) -> AbstractRunner:
    """Put our runner in place of Kedro's default; any other was asked for and is left alone."""
    if runner is not None and type(runner) is not SequentialRunner:
        return runner
    is_async = bool(getattr(runner, "_is_async", False))
    return SkippingRunner(is_async=is_async, folder=root / "data" / ".fingerprints")


def _refuse_unknown(names: Iterable[str] | None, *, what: str, allowed: Iterable[str]) -> None:
    allowed = sorted(set(allowed))
    for name in names or ():
        if name not in allowed:
            raise ConfigError(
                f"There is no {what} '{name}'", allowed=nearest(name, allowed=allowed)
            )


def _refuse_unknown_env(env: str | None, *, conf: Path) -> None:
    if env is None or not conf.is_dir():
        return
    allowed = [folder.name for folder in conf.iterdir() if folder.is_dir()]
    if env not in allowed:
        raise ConfigError(
            f"There is no recipe '{env}' (--env) in '{conf.name}/'",
            allowed=nearest(env, allowed=allowed),
            cure="A recipe is a folder there that holds only what differs from conf/base",
        )
