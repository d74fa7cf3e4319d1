"""GPUs whose makers publish their rates, as numbers.

Floating-point rates are dense (without sparsity) and peak. `fp32` is that of the plain units, as
torch computes fp32 products by default; `bf16` that of the tensor cores, which is fp16's too;
`fp16` where they have no bf16.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """A GPU's peak rates per second, and where they are published."""

    flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    link_bytes_per_s: float | None
    """To another GPU of the node, one direction; None where it depends on the board."""
    source: str


# The first entry whose words are all in the device's name is taken: narrow names come first.
_KNOWN: tuple[tuple[tuple[str, ...], Rates], ...] = (
    (
        ("B200",),
        Rates({"bf16": 2.25e15, "fp32": 75e12}, 8.0e12, 900e9, "NVIDIA HGX B200 datasheet"),
    ),
    (
        ("H200", "NVL"),
        Rates({"bf16": 835e12, "fp32": 60e12}, 4.8e12, 450e9, "NVIDIA H200 datasheet"),
    ),
    (("H200",), Rates({"bf16": 989e12, "fp32": 67e12}, 4.8e12, 450e9, "NVIDIA H200 datasheet")),
    (
        ("H100", "NVL"),
        Rates({"bf16": 835e12, "fp32": 60e12}, 3.9e12, 300e9, "NVIDIA H100 datasheet"),
    ),
    (
        ("H100", "PCIe"),
        Rates({"bf16": 756e12, "fp32": 51e12}, 2.0e12, None, "NVIDIA H100 datasheet"),
    ),
    (("H100",), Rates({"bf16": 989e12, "fp32": 67e12}, 3.35e12, 450e9, "NVIDIA H100 datasheet")),
    (
        ("A100", "80GB", "PCIe"),
        Rates({"bf16": 312e12, "fp32": 19.5e12}, 1.935e12, None, "NVIDIA A100 datasheet"),
    ),
    (
        ("A100", "80GB"),
        Rates({"bf16": 312e12, "fp32": 19.5e12}, 2.039e12, 300e9, "NVIDIA A100 datasheet"),
    ),
    (
        ("A100", "PCIE"),
        Rates({"bf16": 312e12, "fp32": 19.5e12}, 1.555e12, None, "NVIDIA A100 datasheet"),
    ),
    (
        ("A100",),
        Rates({"bf16": 312e12, "fp32": 19.5e12}, 1.555e12, 300e9, "NVIDIA A100 datasheet"),
    ),
    (("L40S",), Rates({"bf16": 362e12, "fp32": 91.6e12}, 864e9, None, "NVIDIA L40S datasheet")),
    (("L4",), Rates({"bf16": 121e12, "fp32": 30.3e12}, 300e9, None, "NVIDIA L4 datasheet")),
    (("A10",), Rates({"bf16": 125e12, "fp32": 31.2e12}, 600e9, None, "NVIDIA A10 datasheet")),
    (
        ("RTX", "4090"),
        Rates({"bf16": 165.2e12, "fp32": 82.6e12}, 1.008e12, None, "NVIDIA Ada whitepaper"),
    ),
    (("V100",), Rates({"fp16": 125e12, "fp32": 15.7e12}, 900e9, None, "NVIDIA V100 datasheet")),
    (("T4",), Rates({"fp16": 65e12, "fp32": 8.1e12}, 320e9, None, "NVIDIA T4 datasheet")),
)


_CAPABILITIES: dict[str, tuple[int, int]] = {
    "B200": (10, 0),
    "GB200": (10, 0),
    "H100": (9, 0),
    "H200": (9, 0),
    "GH200": (9, 0),
    "L4": (8, 9),
    "L40": (8, 9),
    "L40S": (8, 9),
    "4090": (8, 9),
    "A10": (8, 6),
    "A40": (8, 6),
    "A6000": (8, 6),
    "A30": (8, 0),
    "A100": (8, 0),
    "T4": (7, 5),
    "V100": (7, 0),
}
"""Compute capabilities by a word of the name. Source: NVIDIA, "CUDA GPUs"."""


def capability_of(name: str) -> tuple[int, int] | None:
    """Look up a device's compute capability by its name; None where it is not known."""
    found = {
        _CAPABILITIES[word] for word in name.replace("-", " ").split() if word in _CAPABILITIES
    }
    return found.pop() if len(found) == 1 else None


def rates_of(name: str) -> Rates | None:
    """Look up a device by the name that NVML gives it; None where it is not known.

    Words match whole, so that `L4` is not found in `L40`.
    """
    words = {word.casefold() for word in name.replace("-", " ").split()}
    for wanted, rates in _KNOWN:
        if {word.casefold() for word in wanted} <= words:
            return rates
    return None
