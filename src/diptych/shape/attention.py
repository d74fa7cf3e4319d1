"""Which kernel computes a decoder's attention: a situation in, a kernel and the reasons out.

What is known of device, dtypes, packages, rows and family flows in; nothing is imported or started
to find out. The planner asks with what it knows before a run, a rank with all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from diptych.core.errors import LayoutError
from diptych.core.records import Dtype, Kernel, Layout
from diptych.shape.families import family
from diptych.shape.widths import Sizes

_FLASH: tuple[Kernel, ...] = ("flash_2", "flash_3", "flash_4")

_PACKED: tuple[Kernel, ...] = ("flash_3", "flash_4", "flash_2", "flex", "sdpa")
"""What `auto` tries where rows need more than a causal mask: sdpa would read a number for every
pair of tokens, and compute all of them."""

_CAUSAL: tuple[Kernel, ...] = ("flash_3", "flash_4", "sdpa")
"""What it tries where causal is all: on GPUs torch's sdpa is then Flash Attention 2 itself."""

_FIRST_CAPABILITY: dict[Kernel, tuple[int, int]] = {
    "flex": (8, 0),
    "flash_2": (8, 0),
    "flash_3": (9, 0),
    "flash_4": (9, 0),
}
"""The compute capability from which a kernel runs: Ampere 8.0, Hopper 9.0."""

_FIRST_TOO_NEW: dict[Kernel, tuple[int, int]] = {"flash_3": (10, 0)}
"""Flash Attention 3 is written for Hopper alone."""

_MAX_HEAD_WIDTH: dict[Kernel, int] = {"flash_2": 256, "flash_3": 256, "flash_4": 128}
_HEAD_MULTIPLE = 8

_NO_DROPOUT: tuple[Kernel, ...] = ("flex", "flash_3", "flash_4")


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What decides which kernel can run.

    Attributes:
        device: of the ranks.
        dtype: that the decoder computes in.
        holds_fp32: whether attention is held in fp32 whatever the dtype.
        keeps_operators: whether recomputing keeps the results of single operators.
        sees_ahead: whether an image's tokens see each other, as no kernel of Flash Attention does.
        is_packed: whether rows hold several samples.
        head_width: of the decoder's heads.
        has_dropout: whether attention drops some of its weights.
        capability: the GPU's compute capability; None: not known.
        missing: why a kernel's package cannot be used, by kernel; None: nobody looked.
    """

    device: Literal["cpu", "cuda"]
    dtype: Dtype
    holds_fp32: bool = False
    keeps_operators: bool = False
    sees_ahead: bool = False
    is_packed: bool = False
    head_width: int = 128
    has_dropout: bool = False
    capability: tuple[int, int] | None = None
    missing: Mapping[Kernel, str] | None = None


@dataclass(frozen=True)
class Choice:
    """What computes attention.

    Attributes:
        kernel: its name in the settings.
        why: it, in a phrase.
        passed_over: why not what would have come first, by kernel.
    """

    kernel: Kernel
    why: str
    passed_over: dict[Kernel, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Say it in a line."""
        others = [f"not {kernel}: {reason}" for kernel, reason in self.passed_over.items()]
        return "; ".join([f"{self.kernel}, {self.why}", *others])


@dataclass(frozen=True)
class Objection:
    """Why a kernel cannot run, and what to do for it to run."""

    reason: str
    cure: str


def situation_of(
    layout: Layout,
    *,
    model_family: str,
    sizes: Sizes,
    is_packed: bool,
    capability: tuple[int, int] | None,
    missing: Mapping[Kernel, str] | None,
) -> Situation:
    """Gather what decides from a layout, a model's sizes and what is known of the machine.

    Args:
        layout: what is to run.
        model_family: the model's.
        sizes: complete ones, whose group `text` is the decoder's.
        is_packed: whether rows hold several samples.
        capability: the GPU's; None where it is not known.
        missing: why packages cannot be used; None where nobody looked.
    """
    text = sizes["text"]
    return Situation(
        device=layout.device,
        dtype=layout.mixed_precision.towers.get("language", layout.precision),
        holds_fp32="attention" in layout.mixed_precision.keep_fp32,
        keeps_operators=layout.memory.recompute == "operators",
        sees_ahead=family(model_family).sees_ahead,
        is_packed=is_packed,
        head_width=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        has_dropout=bool(text.get("attention_dropout")),
        capability=capability,
        missing=missing,
    )


def objection(kernel: Kernel, situation: Situation) -> Objection | None:
    """Say why a kernel cannot run, as far as that is known; None where nothing does."""
    if kernel == "sdpa":
        return None
    return next((found for check in _CHECKS if (found := check(kernel, situation))), None)


def choose(
    wanted: Literal["auto"] | Kernel,
    *,
    situation: Situation,
    elsewhere: Mapping[Kernel, str] | None = None,
) -> Choice:
    """Choose a kernel.

    Args:
        wanted: the setting.
        situation: on this rank.
        elsewhere: why a kernel cannot run on another rank; all run the same.

    Raises:
        LayoutError: the one that is wanted cannot run.
    """

    def against(kernel: Kernel) -> Objection | None:
        found = objection(kernel, situation)
        if found is None and elsewhere and kernel in elsewhere:
            return Objection(elsewhere[kernel], "make the nodes alike")
        return found

    if wanted != "auto":
        if found := against(wanted):
            raise LayoutError(
                f"plan.layout.attention is {wanted}, and {found.reason}",
                cure=f"{found.cure[0].upper()}{found.cure[1:]}, or set plan.layout.attention to "
                "auto",
            )
        return Choice(wanted, "as plan.layout.attention says")
    passed_over: dict[Kernel, str] = {}
    for kernel in _order(situation):
        found = against(kernel)
        if found is None:
            return Choice(kernel, _why(situation), passed_over)
        passed_over[kernel] = found.reason
    raise AssertionError("sdpa runs everywhere")


def _order(situation: Situation) -> tuple[Kernel, ...]:
    """List what `auto` tries, best first."""
    if situation.device == "cpu":
        return ("sdpa",)
    if situation.sees_ahead:
        return ("flex", "sdpa")
    return _PACKED if situation.is_packed else _CAUSAL


def _why(situation: Situation) -> str:
    if situation.device == "cpu":
        return "on a CPU"
    if situation.sees_ahead:
        return "for masks that let an image's tokens see each other"
    if situation.is_packed:
        return "for rows that hold several samples"
    return "for rows of one sample"


def _device(kernel: Kernel, situation: Situation) -> Objection | None:
    if situation.device == "cuda":
        return None
    reason = "it has no backward pass on a CPU" if kernel == "flex" else "it runs on GPUs alone"
    return Objection(reason, "train on a GPU")


def _family(kernel: Kernel, situation: Situation) -> Objection | None:
    if kernel in _FLASH and situation.sees_ahead:
        return Objection(
            "an image's tokens see each other in this family, which Flash Attention cannot",
            "set it to flex or sdpa",
        )
    return None


def _fp32(kernel: Kernel, situation: Situation) -> Objection | None:
    if situation.holds_fp32:
        return Objection(
            "mixed_precision.keep_fp32 holds attention in fp32, which sdpa alone does here",
            "take attention out of keep_fp32",
        )
    if kernel in _FLASH and situation.dtype == "fp32":
        return Objection(
            "Flash Attention computes in bf16 and fp16, and the decoder in fp32",
            "set plan.layout.precision to bf16",
        )
    return None


def _operators(kernel: Kernel, situation: Situation) -> Objection | None:
    if kernel == "flex" and situation.keeps_operators:
        return Objection(
            "memory.recompute operators keeps results of single operators, and flex runs as one "
            "compiled piece",
            "set memory.recompute to blocks",
        )
    return None


def _dropout(kernel: Kernel, situation: Situation) -> Objection | None:
    if kernel in _NO_DROPOUT and situation.has_dropout:
        return Objection(
            "the decoder's attention_dropout is above 0, which it leaves out",
            "set plan.model.sizes.text.attention_dropout to 0",
        )
    return None


def _capability(kernel: Kernel, situation: Situation) -> Objection | None:
    found, first = situation.capability, _FIRST_CAPABILITY[kernel]
    if found is None:
        return None
    too_new = _FIRST_TOO_NEW.get(kernel)
    if found < first or (too_new and found >= too_new):
        return Objection(
            f"the GPU's compute capability is {found[0]}.{found[1]}, it takes "
            + (f"{first[0]}.x alone" if too_new else f"{first[0]}.{first[1]} or later"),
            "use such a GPU",
        )
    return None


def _heads(kernel: Kernel, situation: Situation) -> Objection | None:
    most, width = _MAX_HEAD_WIDTH.get(kernel), situation.head_width
    if most is None or (width <= most and width % _HEAD_MULTIPLE == 0):
        return None
    return Objection(
        f"the decoder's heads are {width} wide, it takes multiples of {_HEAD_MULTIPLE} up to "
        f"{most}",
        "use a decoder of such heads",
    )


def _package(kernel: Kernel, situation: Situation) -> Objection | None:
    if situation.missing and kernel in situation.missing:
        return Objection(situation.missing[kernel], "install its package for your CUDA and torch")
    return None


_CHECKS: tuple[Callable[[Kernel, Situation], Objection | None], ...] = (
    _device,
    _family,
    _fp32,
    _operators,
    _dropout,
    _capability,
    _heads,
    _package,
)
