"""Read the `manifest` where Kedro does not: in the ranks.

In: the manifest's JSON file. Out: the record.
"""

from __future__ import annotations

from pathlib import Path

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
