"""What every record is: frozen, strict, kept as JSON."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

FORMAT_VERSION = 1


class Record(BaseModel):
    """A frozen value that crosses folders; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Section(BaseModel):
    """A frozen part of the YAML parameters; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
