"""Read the `manifest` where Kedro does not: in the ranks, and in a person's own loop.

In: the manifest's JSON file. Out: the record, and the tars of a split as webdataset wants them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from diptych.core.errors import FormatError
from diptych.core.records import FORMAT_VERSION, Manifest


def load_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        FormatError: It is missing, damaged, or of another version.
    """
    cure = "Make the shards again: kedro run --pipelines=prepare"
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise FormatError(f"There is no manifest at '{path}'", cure=cure) from error
    except ValidationError as error:
        raise FormatError(f"The manifest '{path}' is damaged: {error}", cure=cure) from error
    if manifest.version != FORMAT_VERSION:
        raise FormatError(
            f"The manifest '{path}' is of version {manifest.version}",
            allowed=f"Allowed: {FORMAT_VERSION}",
            cure=cure,
        )
    return manifest


def shard_urls(
    manifest: Manifest, *, folder: Path | str, split: Literal["train", "heldout"]
) -> list[str]:
    """List the tars of a split, for a `webdataset.WebDataset` over them.

    Args:
        manifest: The shards.
        folder: Their folder, or the URL that they were copied to.
        split: Which.
    """
    root = str(folder).rstrip("/")
    return [f"{root}/{shard.path}" for shard in manifest.shards if shard.split == split]
