"""The fingerprint of the environment: everything that bits depend on except the request and the weights."""

import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Mapping
from typing import Any, Final

import jax
from jaxlib import xla_client

from detjax.contract import CONTRACT_VERSION
from detjax.runtime import backends, compilation, environment, fusions, jax_options
from detjax.version import __version__

_NOT_RECORDED: Final = "not recorded"
"""The value of fields that did not exist when a fingerprint was taken, as in older result files."""

_LIBRARIES: Final = ("jinja2", "ml_dtypes", "numpy", "tokenizers")
"""Libraries that tokenize or compute on all devices."""

_OPTIONAL_LIBRARIES: Final = ("llguidance",)
"""Libraries that bits depend on if they are installed: llguidance computes the masks of constraints."""

_LIBRARIES_OF_DEVICES: Final[Mapping[str, tuple[str, ...]]] = {
    "gpu": ("jax-cuda*", "nvidia-*"),
    "tpu": ("libtpu*",),
}
"""Patterns of further libraries by platform. The version of cuBLAS, for example, is in no other field."""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Everything that bits depend on except the request and the weights. Equal fingerprints promise equal bits.

    Attributes:
        contract_version: `contract.CONTRACT_VERSION`.
        detjax: this package's version.
        backend: the backend.
        device_kind: the kind of device; for a CPU, its processor and number of cores.
        driver: the first line of the NVIDIA driver's version, or "none".
        jax: JAX's version.
        jaxlib: jaxlib's version.
        plugin: the platform version of the device's client, such as the release of CUDA.
        flags: environment variables that bits may depend on, such as compiler flags, as JSON.
        compiler_options: the compiler options of programs, as JSON.
        jax_options: JAX options that bits may depend on and that differ from JAX's defaults, as JSON.
        xla_options: a digest of XLA's own options in this process, however they were set.
        libraries: the versions of Python and of further libraries that bits depend on, as JSON.
        separated_fusions: fusions that are switched off in a way that may change bits, as JSON.
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
    jax_options: str = _NOT_RECORDED
    xla_options: str = _NOT_RECORDED
    libraries: str = _NOT_RECORDED
    separated_fusions: str = _NOT_RECORDED

    @property
    def digest(self) -> str:
        """A hash of all fields as sixteen hexadecimal digits."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(device: Any = None) -> Fingerprint:
    """Returns the fingerprint of a JAX device, by default of the first one, with the current backend.

    It holds for programs called in the same contexts of `use_backend`, `without_fusions` and JAX options, such as
    `jax.enable_x64`.

    Raises:
        EnvironmentContradiction: `XLA_FLAGS` names a file that cannot be read.

    Example:
        >>> detjax.fingerprint().contract_version == detjax.CONTRACT_VERSION
        True
    """
    device = device or jax.devices()[0]
    return Fingerprint(
        contract_version=CONTRACT_VERSION,
        detjax=__version__,
        backend=backends.backend(),
        device_kind=backends.device_kind(device),
        driver=_driver(device.platform),
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
        plugin=device.client.platform_version.strip(),
        flags=json.dumps(environment.variables(device.platform), sort_keys=True),
        compiler_options=json.dumps(compilation.options_of(backends.backend(), device.platform), sort_keys=True),
        jax_options=json.dumps(jax_options.values(), sort_keys=True),
        # All XLA options, as read when the process began.
        xla_options=hashlib.sha256(xla_client.CompileOptions().SerializeAsString()).hexdigest()[:16],
        libraries=json.dumps(_libraries(device.platform), sort_keys=True),
        separated_fusions=json.dumps(fusions.unfused_with_other_bits()),
    )


@functools.cache
def _libraries(device_platform: str) -> Mapping[str, str]:
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    for name in _OPTIONAL_LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if patterns := _LIBRARIES_OF_DEVICES.get(device_platform, ()):
        installed = {one.name.lower(): one.version for one in importlib.metadata.distributions()}
        versions |= {
            name: version
            for name, version in installed.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        }
    return {"python": platform.python_version(), **versions}


def _driver(device_platform: str) -> str:
    if device_platform == "gpu":
        with contextlib.suppress(OSError):
            return pathlib.Path("/proc/driver/nvidia/version").read_text().splitlines()[0].strip()
    return "none"
