"""The sigmoid contrastive loss of images and words, from what the language tower takes in.

In: a model, and a packed micro-batch. Out: the summed loss of its rows. A sample's image is the
mean of its image tokens, its text the mean of the tokens that it has to say, both as the language
tower's first block takes them in: nothing has mixed samples yet. A row's samples are each other's
negatives; which they are the schedule says, so no rank has to know another one's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig

from diptych.core.axes import IGNORED_LABEL
from diptych.core.errors import ConfigError
from diptych.core.records import ContrastSpec
from diptych.model.families import family_name, towers
from diptych.shape.families import family

_PULLED = ("vision", "connector")
_HALVES = (torch.bfloat16, torch.float16)


class Contrast:
    """Looks at what a model's first decoder block takes in while it trains, and makes the loss.

    The hook is around the block's call: recompute and compile replace its forward, within. What it
    sees is kept until the loss is made of it, and no longer.

    Raises:
        ConfigError: nothing trains that an image passes through.
    """

    def __init__(self, model: nn.Module, *, spec: ContrastSpec) -> None:
        _check_trains(model)
        assert isinstance(model.config, PreTrainedConfig), "a model of transformers"
        self.weight = spec.weight
        self._spec = spec
        self._image_token_id = int(model.config.image_token_id)  # pyright: ignore[reportAttributeAccessIssue]
        self._seen_BSD: torch.Tensor | None = None
        blocks = family(family_name(model)).anatomy.decoder_blocks
        model.get_submodule(f"{blocks}.0").register_forward_pre_hook(self._see, with_kwargs=True)

    def loss(
        self,
        *,
        input_ids_BS: torch.Tensor,
        labels_BS: torch.Tensor,
        segment_ids_BS: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sum the loss over the micro-batch that the model has just run; see `sum_of_pairs`."""
        seen_BSD, self._seen_BSD = self._seen_BSD, None
        assert seen_BSD is not None, "the model runs before its contrastive loss is made"
        assert segment_ids_BS is not None, "a row of one sample has no negatives"
        return sum_of_pairs(
            seen_BSD,
            is_image_BS=input_ids_BS == self._image_token_id,
            is_label_BS=labels_BS != IGNORED_LABEL,
            segment_ids_BS=segment_ids_BS,
            scale=self._spec.scale,
            bias=self._spec.bias,
        )

    def _see(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if block.training:
            self._seen_BSD = args[0] if args else kwargs["hidden_states"]


def sum_of_pairs(
    inputs_BSD: torch.Tensor,
    *,
    is_image_BS: torch.Tensor,
    is_label_BS: torch.Tensor,
    segment_ids_BS: torch.Tensor,
    scale: float,
    bias: float,
) -> torch.Tensor:
    """Sum the sigmoid loss over all pairs of an image and words within a row.

    A sample takes part where it has both. Images are pulled and pushed, words stay: they get no
    gradient.

    Args:
        inputs_BSD: [B, S, D] what the first block takes in.
        is_image_BS: [B, S] bool, image tokens; those of segment 0 are no sample's.
        is_label_BS: [B, S] bool, tokens that carry a label.
        segment_ids_BS: [B, S] int32, which sample of its row a token is in, from 1; 0 is padding.
        scale: of cosines.
        bias: of logits.

    Returns:
        [] fp32, or the inputs' dtype if that is wider; in nats.

    Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training (2023), section 3.2.
    Differs: negatives are a row's, not a batch's; scale and bias do not learn; a sum, not a mean.
    """
    segments_K = torch.arange(1, int(segment_ids_BS.max()) + 1, device=segment_ids_BS.device)
    own_BKS = segment_ids_BS[:, None, :] == segments_K[:, None]
    images_BKS, words_BKS = own_BKS & is_image_BS[:, None, :], own_BKS & is_label_BS[:, None, :]
    is_paired_BK = images_BKS.any(dim=2) & words_BKS.any(dim=2)
    with torch.autocast(inputs_BSD.device.type, enabled=False):
        wide_BSD = inputs_BSD.float() if inputs_BSD.dtype in _HALVES else inputs_BSD
        cosines_BKK = _directions(wide_BSD, of_BKS=images_BKS) @ _directions(
            wide_BSD.detach(), of_BKS=words_BKS
        ).transpose(1, 2)
        logits_BKK = scale * cosines_BKK + bias
        own_KK = torch.eye(len(segments_K), dtype=torch.bool, device=logits_BKK.device)
        losses_BKK = -functional.logsigmoid(torch.where(own_KK, logits_BKK, -logits_BKK))
        return (losses_BKK * (is_paired_BK[:, :, None] & is_paired_BK[:, None, :])).sum()


def _directions(inputs_BSD: torch.Tensor, *, of_BKS: torch.Tensor) -> torch.Tensor:
    """Return the direction of the mean of each sample's tokens, [B, K, D], length 1."""
    # A sum has its mean's direction. A product instead of a scatter: atomic additions on a GPU
    # have no fixed order.
    return functional.normalize(of_BKS.to(inputs_BSD.dtype) @ inputs_BSD, dim=2)


def _check_trains(model: nn.Module) -> None:
    tower_of = towers(model)
    if not any(
        each.requires_grad and tower_of[name] in _PULLED for name, each in model.named_parameters()
    ):
        raise ConfigError(
            "train.contrast is set, and nothing trains that an image passes through",
            allowed="The vision tower, or the connector, or adapters in them train",
            cure="Set train.contrast to null, or take entries out of plan.model.freeze",
        )
