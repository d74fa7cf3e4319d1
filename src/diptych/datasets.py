"""The catalog's kinds of entries: records, tables, pages, figures and folders, all on local disk.

A save writes a temporary file and renames it: a killed run leaves the old file or the new one,
and a file that DVC hard-linked into its cache is never written to. `digest` says what a run's
fingerprint should notice about an entry. Nothing here knows what the entries mean.
"""

from __future__ import annotations

import fnmatch
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.io import AbstractDataset
from kedro_datasets._typing import HTMLPreview, JSONPreview, PlotlyPreview, TablePreview
from pydantic import BaseModel, ValidationError

from diptych.core import records
from diptych.core.errors import ConfigError, DataError, FormatError, nearest
from diptych.core.files import replacing, write_text
from diptych.core.hashing import sha256_json

if TYPE_CHECKING:
    import pyarrow as pa
    from plotly.graph_objects import Figure

_PREVIEW_ITEMS = 20
_CELL_CHARS = 200


class Artifact(AbstractDataset[Any, Any]):
    """A file or folder of the project; what the other kinds have in common."""

    def __init__(self, *, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        self.path = Path(filepath)
        self.metadata = metadata

    @abstractmethod
    def load(self) -> Any:
        """Read the entry."""

    @abstractmethod
    def save(self, data: Any) -> None:
        """Write the entry."""

    def digest(self, *, hash_file: Callable[[Path], str]) -> str:
        """Return what changes when the entry's content does."""
        return hash_file(self.path)

    def read_text(self) -> str:
        """Read the file as UTF-8.

        Raises:
            DataError: the entry has not been made yet.
        """
        return self.made().read_text(encoding="utf-8")

    def made(self) -> Path:
        """Return the path of an entry that has been made.

        Raises:
            DataError: it has not.
        """
        if not self.path.exists():
            raise DataError(
                f"'{_relative(self.path)}' has not been made yet",
                cure="Run what makes it: `kedro run`, without --tags or --nodes",
            )
        return self.path

    def _exists(self) -> bool:
        return self.path.is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": _relative(self.path).as_posix()}


class RecordDataset(Artifact):
    """A record of `core/records/`, as JSON.

    `paths` names fields of the record that hold the path of a file or folder; the entry exists
    only while they do.
    """

    def __init__(
        self,
        *,
        filepath: str,
        record: str,
        paths: Sequence[str] = (),
        metadata: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(filepath=filepath, metadata=metadata)
        self.record = _record_class(record)
        self.paths = tuple(paths)

    def load(self) -> BaseModel:
        """Read and check the record.

        Raises:
            FormatError: the file is not that record (damaged, or of another version).
        """
        try:
            return self.record.model_validate_json(self.read_text())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise FormatError(
                f"'{_relative(self.path)}' is not a {self.record.__name__}: {where}: "
                f"{first['msg']} ({error.error_count()} problems)",
                cure="Delete the file and run again: the node that makes it will run",
            ) from error

    def save(self, data: BaseModel) -> None:
        """Write the record, two spaces of indent."""
        if not isinstance(data, self.record):
            raise TypeError(f"{self.record.__name__} expected, got {type(data).__name__}")
        write_text(self.path, text=data.model_dump_json(indent=2) + "\n")

    def preview(self) -> JSONPreview:
        """Show the record in kedro-viz, long lists cut."""
        return JSONPreview(json.dumps(_shorten(json.loads(self.read_text()))))

    def _exists(self) -> bool:
        if not self.path.is_file():
            return False
        if not self.paths:
            return True
        record = self.load()
        return all(Path(getattr(record, field)).exists() for field in self.paths)


class TableDataset(Artifact):
    """An Arrow table, as Parquet."""

    def load(self) -> pa.Table:
        """Read the whole table."""
        import pyarrow.parquet as pq

        return pq.read_table(self.made())

    def save(self, data: pa.Table) -> None:
        """Write the table, compressed with zstd."""
        import pyarrow.parquet as pq

        with replacing(self.path) as partial:
            pq.write_table(data, partial, compression="zstd")

    def preview(self, nrows: int = _PREVIEW_ITEMS) -> TablePreview:
        """Show the first rows in kedro-viz."""
        return _preview_rows(self.made(), nrows=nrows)


class PageDataset(Artifact):
    """A self-contained HTML page."""

    def load(self) -> str:
        """Read the page."""
        return self.read_text()

    def save(self, data: str) -> None:
        """Write the page."""
        write_text(self.path, text=data)

    def preview(self) -> HTMLPreview:
        """Show the page in kedro-viz."""
        return HTMLPreview(self.read_text())


class FigureDataset(Artifact):
    """A plotly figure, as JSON."""

    def load(self) -> Figure:
        """Read the figure."""
        import plotly.io

        return plotly.io.from_json(self.read_text())

    def save(self, data: Figure) -> None:
        """Write the figure."""
        write_text(self.path, text=str(data.to_json()))

    def preview(self) -> PlotlyPreview:
        """Show the figure in kedro-viz."""
        return PlotlyPreview(json.loads(self.read_text()))


class FolderDataset(Artifact):
    """A folder that its node fills; what is loaded and saved is its path.

    For the digest, files count by their bytes if a pattern of `hashed` (relative to the folder)
    names them, the others by name and size, so that terabytes are never hashed again; without
    `hashed` every file counts by its bytes. Files that a pattern of `ignored` names don't count.
    """

    def __init__(
        self,
        *,
        filepath: str,
        hashed: Sequence[str] = ("*",),
        ignored: Sequence[str] = (),
        metadata: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(filepath=filepath, metadata=metadata)
        self.hashed = tuple(hashed)
        self.ignored = tuple(ignored)

    def load(self) -> Path:
        """Return the folder, relative to the working folder where it lies inside it."""
        return _relative(self.made())

    def save(self, data: Path) -> None:
        """Check that the node filled this folder.

        Raises:
            ConfigError: the node filled another folder than the catalog names.
        """
        if data.resolve() != self.path.resolve():
            raise ConfigError(
                f"The node filled '{data}', the catalog says '{_relative(self.path)}'",
                cure="Make `folders` in conf/base/parameters.yml and conf/base/catalog.yml agree",
            )
        if not self._exists():
            raise DataError(f"The node left the folder '{data}' missing or empty")

    def digest(self, *, hash_file: Callable[[Path], str]) -> str:
        """Hash the folder's listing, with the bytes of the files that `hashed` names."""
        return sha256_json(
            {
                name: hash_file(path) if _named(name, by=self.hashed) else path.stat().st_size
                for name, path in _files(self.path)
                if not _named(name, by=self.ignored)
            }
        )

    def preview(self) -> TablePreview:
        """List the first files in kedro-viz; of a folder of tables show the first rows."""
        files = _files(self.path)[:_PREVIEW_ITEMS]
        if files and all(path.suffix == ".parquet" for _, path in files):
            return _preview_rows(files[0][1], nrows=_PREVIEW_ITEMS)
        return TablePreview(
            {
                "index": list(range(len(files))),
                "columns": ["file", "bytes"],
                "data": [[name, path.stat().st_size] for name, path in files],
            }
        )

    def _exists(self) -> bool:
        return self.path.is_dir() and any(path.is_file() for path in self.path.rglob("*"))


def _record_class(name: str) -> type[BaseModel]:
    allowed = {
        key: value
        for key, value in vars(records).items()
        if isinstance(value, type) and issubclass(value, records.Record | records.Section)
    }
    if name not in allowed:
        raise ConfigError(
            f"The catalog names an unknown record '{name}'", allowed=nearest(name, allowed=allowed)
        )
    return allowed[name]


def _relative(path: Path) -> Path:
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _named(name: str, *, by: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in by)


def _files(folder: Path) -> list[tuple[str, Path]]:
    return sorted(
        (path.relative_to(folder).as_posix(), path)
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".partial"
    )


def _preview_rows(path: Path, *, nrows: int) -> TablePreview:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        batch = next(file.iter_batches(batch_size=nrows), None)
        columns = file.schema_arrow.names
    rows = batch.to_pylist() if batch is not None else []
    return TablePreview(
        {
            "index": list(range(len(rows))),
            "columns": columns,
            "data": [[_cell(row[column]) for column in columns] for row in rows],
        }
    )


def _shorten(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shorten(item) for key, item in value.items()}
    if isinstance(value, list):
        rest = len(value) - _PREVIEW_ITEMS
        short = [_shorten(item) for item in value[:_PREVIEW_ITEMS]]
        return [*short, f"... and {rest} more"] if rest > 0 else short
    return value


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    return str(value)[:_CELL_CHARS]
