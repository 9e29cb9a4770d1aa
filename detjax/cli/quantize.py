"""Write a copy of a checkpoint whose weights are rounded to numbers of 8 or 4 bits, without calibration.

The new directory appears only if the command succeeds.
"""

from pathlib import Path

from detjax.cli.options import command
from detjax.models.checkpoint import quantized_export
from detjax.models.checkpoint.quantized_export import ExportFormat


@command
def quantize(
    model: Path,
    out: Path,
    /,
    *,
    to: ExportFormat,
    group_size: int = 128,
) -> None:
    """Quantizes a checkpoint.

    Args:
        model: directory of a Hugging Face checkpoint with plain weights.
        out: the new directory; nothing may exist there.
        to: format of the weights: fp8-block, fp8-channel or int4.
        group_size: columns of a group of int4, which share a scale.
    """
    names = quantized_export.quantize(model, out, to, group_size=group_size)
    print(f"{out}: {len(names)} weights in {to}, all others as before")
