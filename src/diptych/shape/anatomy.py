"""Where a family's parts live, by the names of its parameters.

A full name flows in; its tower and its block flow out. What the parts compute is unknown here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tower = Literal["vision", "connector", "language", "head"]


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Names of modules, full ones from the model's root.

    Attributes:
        vision: the vision tower.
        vision_blocks: the list of its layers.
        connectors: the connector's modules, or lists of them, or single parameters.
        decoder: the decoder.
        decoder_blocks: the list of its layers.
    """

    vision: str
    vision_blocks: str
    connectors: tuple[str, ...]
    decoder: str
    decoder_blocks: str

    @property
    def block_lists(self) -> tuple[str, ...]:
        """Name the lists of modules whose items are the sharding units."""
        return (self.vision_blocks, self.decoder_blocks)

    @property
    def embedding(self) -> str:
        """Name the weight in which tokens are looked up."""
        return f"{self.decoder}.embed_tokens.weight"

    def tower(self, name: str) -> Tower:
        """Say which tower a parameter is in, by its full name."""
        if any(_is_in(name, part) for part in self.connectors):
            return "connector"
        if _is_in(name, self.vision):
            return "vision"
        if _is_in(name, self.decoder):
            return "language"
        assert name.startswith("lm_head."), f"a parameter '{name}' of no tower"
        return "head"

    def block(self, name: str) -> str:
        """Name the sharding unit that a parameter is in, '' for the root."""
        for prefix in self.block_lists:
            if name.startswith(prefix + "."):
                return f"{prefix}.{name[len(prefix) + 1 :].split('.', 1)[0]}"
        return ""


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")
