"""The contrastive loss beside the language loss: `train.contrast`, part of a run's identity."""

from __future__ import annotations

from pydantic import Field

from diptych.core.records.base import Section


class ContrastSpec(Section):
    """A sigmoid loss that pulls a sample's image to its own words, away from its neighbours'.

    `weight` is what the loss counts beside the language loss. A pair's logit is `scale` times the
    cosine of image and words, plus `bias`; both stay as they are. The lower the bias, the less a
    pair that does not belong together counts at first.
    """

    weight: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    scale: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    bias: float = Field(default=-5.0, allow_inf_nan=False)
