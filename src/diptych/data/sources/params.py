"""One source of raw samples, as the parameters of `prepare` describe it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from diptych.core.errors import nearest
from diptych.core.records import Section
from diptych.data.files.places import check_address

COLUMNS = (
    "id",
    "image",
    "images",
    "conversations",
    "messages",
    "texts",
    "question",
    "answer",
    "caption",
)
"""What a column of a table, or a member of a tar, can hold."""

DEFAULT_PROMPT = "Describe the image."

_ONE_PATH = ("starter", "internvl", "energon")
_BROUGHT = {
    "starter": ("images", "split", "heldout_fraction", "columns", "prompt"),
    "llava": ("columns", "prompt"),
    "internvl": ("images", "columns", "prompt"),
    "webdataset": ("images",),
    "energon": ("images", "split"),
}
"""What the data of a kind bring themselves, or have no use for."""

Kind = Literal["starter", "llava", "internvl", "parquet", "csv", "webdataset", "energon"]


class SourceParams(Section):
    """One source of raw samples.

    `path` is what holds the samples: a file, a folder, a glob, a brace pattern, a URL, or a list of
    these (for `starter`, the folder to build in; for `energon`, the prepared folder). `images` is
    the folder or URL that image paths are relative to, by default the one that `path` is in.
    `image_urls` says what happens to an image that a row names by its https address; 'fetch' dials
    public addresses only.
    `split` puts every sample into one split; without it `heldout_fraction` of the samples are held
    out, chosen by the content of their images, so that no image is in both splits. `repeat` is how
    often an epoch takes each sample; a fraction takes that share of them. `columns` says which
    column or tar member holds what (ours to theirs); `prompt` is what the user asks where a sample
    has only a caption.
    """

    kind: Kind = "starter"
    path: str | list[str] = "data/01_raw/starter"
    images: str | None = None
    image_urls: Literal["refuse", "fetch"] = "refuse"
    split: Literal["train", "heldout"] | None = None
    heldout_fraction: float = Field(default=0.0, ge=0, lt=1)
    repeat: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    columns: dict[str, str] = Field(default_factory=dict)
    prompt: str | None = Field(default=None, min_length=1)

    @property
    def paths(self) -> tuple[str, ...]:
        """`path` as a list."""
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)

    @field_validator("path", "images")
    @classmethod
    def _safe_address(cls, value: str | list[str] | None) -> str | list[str] | None:
        for path in [value] if isinstance(value, str) else value or []:
            check_address(path)
        if isinstance(value, list) and not value:
            raise ValueError("the list of paths is empty: name at least one")
        return value

    @field_validator("columns")
    @classmethod
    def _known_columns(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name not in COLUMNS:
                raise ValueError(f"'{name}' is no column. {nearest(name, allowed=COLUMNS)}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> SourceParams:
        if self.kind != "starter" and "path" not in self.model_fields_set:
            raise ValueError(f"a source of kind '{self.kind}' needs 'path'")
        if self.kind in _ONE_PATH and not isinstance(self.path, str):
            raise ValueError(f"a source of kind '{self.kind}' has one 'path'")
        if self.split is not None and self.heldout_fraction:
            raise ValueError("'split' and 'heldout_fraction' exclude each other: give one")
        for field in _BROUGHT.get(self.kind, ()):
            if getattr(self, field):
                raise ValueError(f"a source of kind '{self.kind}' takes no '{field}': drop it")
        return self
