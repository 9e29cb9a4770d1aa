"""The fingerprint of the environment: everything that bits depend on besides the request and the weights."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
from typing import Any

import jax

from detjax import backends, compilation
from detjax.contract import CONTRACT_VERSION
from detjax.version import __version__


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Everything that bits depend on besides the request and the weights. Equal fingerprints promise equal bits.

    Attributes:
        contract_version: `contract.CONTRACT_VERSION`.
        detjax: this package's version.
        backend: the backend that serves.
        device_kind: the kind of device; for a CPU, its processor and number of cores.
        driver: the first line of the NVIDIA driver's version, or "none".
        jax: JAX's version.
        jaxlib: jaxlib's version.
        plugin: the platform version of the device's client, such as the release of CUDA.
        flags: the environment variables that hold compiler flags, as JSON.
        compiler_options: the options that programs are compiled with, as JSON.
    """

    contract_version: int
    detjax: str
    backend: str
    device_kind: str
    driver: str
    jax: str
    jaxlib: str
    plugin: str
    flags: str
    compiler_options: str

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that stand for all fields."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(device: Any = None) -> Fingerprint:
    """Returns the fingerprint of a JAX device, by default of the first one, with the backend that would serve."""
    device = device or jax.devices()[0]
    flags = {name: os.environ[name] for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if os.environ.get(name)}
    return Fingerprint(
        contract_version=CONTRACT_VERSION,
        detjax=__version__,
        backend=backends.backend(),
        device_kind=backends.device_kind(device),
        driver=_driver(device.platform),
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
        plugin=device.client.platform_version.strip(),
        flags=json.dumps(flags, sort_keys=True),
        compiler_options=json.dumps(compilation.options_of(backends.backend(), device.platform), sort_keys=True),
    )


def _driver(device_platform: str) -> str:
    if device_platform == "gpu":
        with contextlib.suppress(OSError):
            return pathlib.Path("/proc/driver/nvidia/version").read_text().splitlines()[0].strip()
    return "none"
