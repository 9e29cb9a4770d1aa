"""The devices that the processes of a study see."""

import os
import re


def environment(number: int) -> dict[str, str]:
    """Returns the environment of a process that sees one device: of the GPUs that this process sees, its own.

    Args:
        number: the device's place among them.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = visible.split(",")[number] if visible else str(number)
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")).strip()
    return {**os.environ, "CUDA_VISIBLE_DEVICES": device, "XLA_FLAGS": flags}
