"""The peak rates of chips from their makers' data sheets. Measured speeds are reported as shares of them."""

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak rates of one JAX device.

    Attributes:
        chip: the device's name in tables.
        flops: dense bfloat16 operations per second of the matrix units.
        bytes: memory bandwidth in bytes per second.
        source: the maker and the document with the figures.
    """

    chip: str
    flops: float
    bytes: float
    source: str

    def roofline_seconds(self, flops: float, size: float) -> float:
        """Returns the minimum time for operations and bytes of traffic (the roofline, Williams et al. 2009)."""
        return max(flops / self.flops, size / self.bytes)


_NVIDIA: Final = "NVIDIA, data sheets"
_GOOGLE: Final = "Google, docs.cloud.google.com/tpu/docs"

PEAKS: Final = {
    "NVIDIA A100-SXM4-40GB": Peak("A100 40GB", 312e12, 1555e9, _NVIDIA),
    "NVIDIA A100-SXM4-80GB": Peak("A100 80GB", 312e12, 2039e9, _NVIDIA),
    "NVIDIA H100 80GB HBM3": Peak("H100 SXM", 989.4e12, 3350e9, _NVIDIA),
    "NVIDIA H100 PCIe": Peak("H100 PCIe", 756e12, 2000e9, _NVIDIA),
    "NVIDIA H200": Peak("H200", 989.4e12, 4800e9, _NVIDIA),
    "NVIDIA B200": Peak("B200", 2250e12, 8000e9, _NVIDIA),
    "TPU v4": Peak("TPU v4", 275e12, 1228e9, _GOOGLE),
    "TPU v5 lite": Peak("TPU v5e", 197e12, 819e9, _GOOGLE),
    "TPU v5": Peak("TPU v5p", 459e12, 2765e9, _GOOGLE),
    "TPU v6 lite": Peak("TPU v6e", 918e12, 1638e9, _GOOGLE),
    # Each of a chip's two chiplets is a JAX device, with half of the chip's figures.
    "TPU7x": Peak("TPU7x", 2307e12 / 2, 7380e9 / 2, _GOOGLE),
}
"""Peaks by JAX's device kind. Other devices have no known peak."""
