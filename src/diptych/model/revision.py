"""Where weights lie and which they are: a source in; a folder, a commit, a digest out.

Weights are in a local folder, or in the cache of the Hugging Face hub, which is asked for JSON and
safetensors alone. Nothing here reads a weight for its value, and torch is unknown.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_PATTERNS = ["*.safetensors", "*.json"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_BLOCK_BYTES = 4096
_MAX_JSON_BYTES = 100_000_000
"""Of an index or a header; safetensors itself reads no longer header."""


class Source(Protocol):
    """Weights as the settings name them: a whole model's (`ModelSpec`), or a tower's."""

    @property
    def weights(self) -> str | None:
        """A folder or a hub id."""
        ...

    @property
    def revision(self) -> str | None:
        """A hub id's branch, tag or commit."""
        ...

    @property
    def weights_sha256(self) -> str | None:
        """The digest that they must have."""
        ...

    @property
    def allow_missing(self) -> tuple[str, ...]:
        """Globs over names that they may lack."""
        ...

    @property
    def allow_extra(self) -> tuple[str, ...]:
        """Globs over names that they may have besides."""
        ...

    @property
    def resize_embeddings(self) -> bool:
        """Whether embeddings may have fewer rows than the model."""
        ...

    @property
    def setting(self) -> str:
        """Where in the parameters they are named."""
        ...


@dataclass(frozen=True)
class TowerSource:
    """A tower's weights as a `Source`; the fields are that one's."""

    weights: str
    revision: str | None
    weights_sha256: str | None
    allow_missing: tuple[str, ...]
    allow_extra: tuple[str, ...]
    resize_embeddings: bool
    setting: str


def tower_sources(spec: ModelSpec) -> dict[str, TowerSource]:
    """List the towers that begin with weights of their own: `vision`, `language`, or both."""
    towers = {} if spec.towers is None else dict(spec.towers)
    return {
        tower: TowerSource(
            **dict(given),
            resize_embeddings=spec.resize_embeddings and tower == "language",
            setting=f"{spec.setting}.towers.{tower}",
        )
        for tower, given in towers.items()
        if given is not None
    }


def is_local(spec: Source) -> bool:
    """Whether the weights are a folder of this machine, not a hub id.

    Raises:
        ConfigError: there is no such folder and it is no hub id, or a folder is given a revision.
    """
    weights = _named(spec)
    if Path(weights).is_dir():
        if spec.revision is not None:
            raise ConfigError(
                f"{spec.setting}.revision is '{spec.revision}', and '{weights}' is a local folder",
                allowed="A revision is a branch, tag or commit of a hub id",
                cure=f"Set {spec.setting}.revision to null; a run records the folder's digest",
            )
        return True
    if Path(weights).exists() or not _HUB_ID.fullmatch(weights):
        raise ConfigError(
            f"{spec.setting}.weights is '{weights}', which is no folder and no hub id",
            allowed=f"A folder that holds {CONFIG} and *.safetensors, or a hub id (owner/name)",
            cure="Correct the path (relative to the project's folder)",
        )
    return False


def find_config(spec: Source) -> Path:
    """Return the path of config.json, fetching that file alone from the hub.

    Raises:
        ConfigError: there is none, or the hub cannot be reached.
    """
    if is_local(spec):
        path = Path(_named(spec)) / CONFIG
        if not path.is_file():
            raise ConfigError(
                f"{spec.setting}.weights is '{spec.weights}', a folder without {CONFIG}",
                cure="Name a folder that transformers' save_pretrained has written",
            )
        return path
    from huggingface_hub import hf_hub_download

    return Path(_fetch(hf_hub_download, spec=spec, filename=CONFIG))


def find_folder(spec: Source) -> Path:
    """Return the folder of the weights; from the hub, once all of them are in its cache.

    Raises:
        ConfigError: there are no safetensors, or the hub cannot be reached.
    """
    if is_local(spec):
        folder = Path(_named(spec))
    else:
        from huggingface_hub import snapshot_download

        folder = Path(_fetch(snapshot_download, spec=spec, allow_patterns=_PATTERNS))
    list_files(folder)
    return folder


def list_files(folder: Path) -> list[Path]:
    """List the safetensors files of a folder, as its index names them.

    Raises:
        ConfigError: there are none, one of them is missing, or the index cannot be used.
    """
    index = folder / INDEX
    if not index.is_file():
        if (folder / WHOLE).is_file():
            return [folder / WHOLE]
        _refuse_folder(folder)
    names = _read_index(index)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{INDEX} of '{folder}' names {len(names)} files, of which {len(missing)} are not "
            f"there: {', '.join(missing[:3])}",
            cure="Copy or download the weights again",
        )
    return [folder / name for name in names]


def pin(model: ModelSpec) -> ModelSpec:
    """Find the weights, and say which they are, so that a run's identity names them.

    Returns:
        The spec with the digests of its weights and, of hub ids, the commits as their revisions;
        unchanged where weights are drawn.

    Raises:
        ConfigError: they cannot be found or read, or their digest is not the one asked for.
    """
    if model.towers is not None:
        pinned = {
            tower: getattr(model.towers, tower).model_copy(update=_pinned(source))
            for tower, source in tower_sources(model).items()
        }
        return model.model_copy(update={"towers": model.towers.model_copy(update=pinned)})
    return model if model.weights is None else model.model_copy(update=_pinned(model))


def _pinned(spec: Source) -> dict[str, Any]:
    folder = find_folder(spec)
    found: dict[str, Any] = {"weights_sha256": check_digest(folder, spec=spec)}
    if not is_local(spec):
        # The hub's cache keeps each commit in a folder of that name.
        found["revision"] = folder.name
    return found


def check_digest(folder: Path, *, spec: Source) -> str:
    """Return the weights' digest.

    Raises:
        ConfigError: the spec asks for another one.
    """
    found = digest(folder)
    if spec.weights_sha256 not in (None, found):
        raise ConfigError(
            f"The weights '{spec.weights}' have the digest {found}, not {spec.weights_sha256}",
            allowed=f"The weights that {spec.setting}.weights_sha256, or the run's identity, names",
            cure=f"Restore those weights, or set {spec.setting}.weights_sha256 to null and train "
            "anew",
        )
    return found


def digest(folder: Path) -> str:
    """Hash what weights are, in seconds whatever their size; 64 hexadecimal digits.

    It covers config.json, every safetensors file's name, size and header, and of every tensor the
    first, the middle and the last 4 KiB. Training changes every block of what it trains; an edit
    of a few numbers elsewhere in a tensor is not seen.

    Raises:
        ConfigError: a file is damaged.
    """
    hashed = hashlib.sha256((folder / CONFIG).read_bytes())
    for path in list_files(folder):
        with path.open("rb") as file:
            header = _read_header(file, path=path)
            hashed.update(f"{path.name} {path.stat().st_size} {len(header)} ".encode())
            hashed.update(header)
            for block in _sampled(file, header=header, path=path):
                hashed.update(block)
    return hashed.hexdigest()


def _named(spec: Source) -> str:
    assert spec.weights is not None, "a spec without weights has none to find"
    return spec.weights


def _fetch(download: Any, *, spec: Source, **options: Any) -> str:
    """Call one of the hub's downloads; its errors say what was asked for and what to do."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    asked = f"'{spec.weights}'" + (f" at revision '{spec.revision}'" if spec.revision else "")
    try:
        return download(_named(spec), revision=spec.revision, **options)
    except Exception as error:
        # The first kind is in some releases one of the second: the cache lacks it, and nobody
        # could be asked.
        answered = isinstance(error, HfHubHTTPError) and not isinstance(
            error, LocalEntryNotFoundError
        )
        if answered:
            raise ConfigError(
                f"The hub has no {asked} that can be read: {str(error).splitlines()[0]}",
                cure=f"Correct {spec.setting}.weights or .revision; for gated weights log in "
                "(hf auth login) or set HF_TOKEN",
            ) from error
        if isinstance(error, OSError | ValueError):
            raise ConfigError(
                f"{spec.setting}.weights is {asked}, which is no local folder, and the hub cannot "
                f"give it: {type(error).__name__}: {str(error).splitlines()[0]}",
                allowed="A hub id that is in the cache already, or a hub that can be reached",
                cure="Run it once where the hub can be reached, or copy the weights into a folder "
                f"and name that in {spec.setting}.weights",
            ) from error
        raise


def _refuse_folder(folder: Path) -> None:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        found = f"{', '.join(others[:3])}, but neither {WHOLE} nor {INDEX}"
        cure = "Save the weights with transformers' save_pretrained"
    elif pickles:
        found = f"no safetensors, but {', '.join(pickles[:3])}, which would run code when read"
        cure = (
            "Convert them once: kedro import-weights <folder> <new folder>, or choose a revision "
            "with *.safetensors"
        )
    else:
        found, cure = "no safetensors", "Name a folder that save_pretrained has written"
    raise ConfigError(
        f"The weights '{folder}' have {found}",
        allowed=f"{WHOLE}, or {INDEX} and the files that it names",
        cure=cure,
    )


def _read_index(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _damaged(path, why=f"{type(error).__name__}: {error}") from None
    for name in names:
        # A file of the hub's cache is a link out of its folder, so only the name is looked at.
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise _damaged(path, why=f"it names '{name}', which is no safetensors file beside it")
    return names


def _read_header(file: BinaryIO, *, path: Path) -> bytes:
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= min(_MAX_JSON_BYTES, path.stat().st_size - 8):
        raise _damaged(path, why=f"its header has {size} bytes")
    return file.read(size)


def _sampled(file: BinaryIO, *, header: bytes, path: Path) -> Iterator[bytes]:
    """Yield blocks of every tensor, in the order in which they lie."""
    begin, end = 8 + len(header), path.stat().st_size
    try:
        entries = [
            entry["data_offsets"]
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        ]
        spans = sorted((begin + int(first), begin + int(last)) for first, last in entries)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _damaged(path, why=f"{type(error).__name__}: {error}") from None
    for first, last in spans:
        if not begin <= first <= last <= end:
            raise _damaged(path, why=f"a tensor at {first} to {last} is outside of the file")
        middle = (first + last) // 2
        for start in dict.fromkeys((first, max(first, middle), max(first, last - _BLOCK_BYTES))):
            file.seek(start)
            yield file.read(min(_BLOCK_BYTES, last - start))


def _damaged(path: Path, *, why: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be used: {why}",
        cure="Copy or download the weights again",
    )
