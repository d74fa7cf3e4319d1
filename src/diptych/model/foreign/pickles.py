"""Read pickles of tensors, and no others: a path in; tensors and plain values out.

What else a pickle asks for by name is refused before anything is called.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals

from diptych.core.errors import ConfigError, FormatError

_MAX_METADATA_BYTES = 2**30
_GLOBAL = re.compile(r"GLOBAL\s+'?([\w.]+)")
_OF_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""What its optimizers put beside tensors; each becomes a `Kept`."""

_CHECKPOINT = "torch.distributed.checkpoint"
_OF_METADATA = {
    *(
        (f"{_CHECKPOINT}.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class Kept:
    """Stands for an object of a class that is not needed: what it was made of, and its state."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Kept:
        """Keep the arguments and do nothing."""
        kept = super().__new__(cls)
        kept.args = args
        return kept


def read_tensors(path: Path) -> Any:
    """Read a file of `torch.save`; tensors of a zip archive stay on the disk until they are used.

    Raises:
        FormatError: it asks for something by name that is no tensor, or is damaged.
    """
    with safe_globals([(Kept, name) for name in _OF_DEEPSPEED]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _guarded(
            path,
            lambda: torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            ),
        )


def read_blob(data: bytes, *, path: Path) -> torch.Tensor:
    """Read one tensor that `torch.save` has written into a larger file.

    Raises:
        FormatError: see `read_tensors`; or it is no tensor.
    """
    found = _guarded(
        path, lambda: torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    )
    if not isinstance(found, torch.Tensor):
        raise damaged(path, why=f"a {type(found).__name__} is where a tensor should be")
    return found


def read_metadata(path: Path) -> Any:
    """Read the `.metadata` of torch's distributed checkpoint.

    Raises:
        FormatError: it names a class that is none of its own, or is damaged.
    """
    if path.stat().st_size > _MAX_METADATA_BYTES:
        raise damaged(path, why=f"it has {path.stat().st_size} bytes")

    def read() -> Any:
        with path.open("rb") as file:
            return _Metadata(file).load()

    return _guarded(path, read)


def damaged(path: Path, *, why: str) -> FormatError:
    """Return the error of a file that is not what its name says."""
    return FormatError(f"'{path.name}' cannot be read: {why}", cure="Copy the checkpoint again")


class _Metadata(pickle.Unpickler):
    """Makes the classes of a distributed checkpoint's metadata, and finds no others."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        is_dtype = module_name == "torch" and isinstance(
            getattr(torch, global_name, None), torch.dtype
        )
        if is_dtype or (module_name, global_name) in _OF_METADATA:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"GLOBAL {module_name}.{global_name}")


def _guarded(path: Path, read: Any) -> Any:
    try:
        return read()
    except pickle.UnpicklingError as error:
        found = _GLOBAL.search(str(error))
        name = found[1] if found else _foreign_name(path)
        if name is None:
            raise damaged(path, why=str(error).splitlines()[0]) from None
        raise FormatError(
            f"'{path.name}' asks for {name} when it is read, which is no tensor and could run "
            "code; it was not called",
            allowed="Tensors, numbers, text, lists and dictionaries",
            cure="Where you trust the file, load it with the trainer that wrote it, and save the "
            "model's state dict alone",
        ) from None
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        # A pickle can break its reader in any way.
        lines = str(error).splitlines() or [""]
        raise damaged(path, why=f"{type(error).__name__}: {lines[0]}") from None


def _foreign_name(path: Path) -> str | None:
    """Find what a pickle asks for beside torch's own, without reading it as one.

    Torch's reader stops at the first word of a younger protocol, before it has met any name.
    """
    texts: list[str] = []
    try:
        for word, value, _ in pickletools.genops(_pickled(path)):
            name = str(value).replace(" ", ".") if word.name == "GLOBAL" else None
            if word.name == "STACK_GLOBAL":
                name = ".".join(texts[-2:])
            if name is not None and not name.startswith(("torch.", "collections.")):
                return name
            if isinstance(value, str):
                texts.append(value)
    except (ValueError, OSError, zipfile.BadZipFile):
        return None
    return None


def _pickled(path: Path) -> bytes:
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(each for each in archive.namelist() if each.endswith("data.pkl")))
