"""An adapter as peft stores it: `read_adapter` reads a folder, `save_adapter` writes one that peft loads."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import safetensors.numpy

from detjax.models.adapters.adapter_config import CONFIG, AdapterConfig, read_adapter_config
from detjax.models.checkpoint.weight_files import StoredTensor, open_file
from detjax.models.configuration.json_object import CheckpointError
from detjax.runtime.threads import in_threads

WEIGHTS: Final = "adapter_model.safetensors"
_PICKLES: Final = ("adapter_model.bin", "adapter_model.pt")
_PREFIX: Final = "base_model.model."
_FACTOR: Final = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


class Factors(NamedTuple):
    """The factors of a module: its product is `scale * B A x`.

    Attributes:
        a: `[rank, inputs]`.
        b: `[outputs, rank]`.
        scale: a float32 number.
    """

    a: np.ndarray
    b: np.ndarray
    scale: np.float32


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter, in the dtypes of its file.

    Attributes:
        config: its options.
        factors: the factors of each module, by the module's name in the base model.
        replaced: tensors that replace tensors of the base model, by their names there.
    """

    config: AdapterConfig
    factors: Mapping[str, Factors]
    replaced: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def digest(self) -> bytes:
        """A SHA-256 of its content: of all numbers that results depend on, and of no name."""
        content = hashlib.sha256()
        modules = sorted(self.factors)
        hashed = iter(list(in_threads(_content, [x for module in modules for x in self.factors[module][:2]])))
        for module in modules:
            for part in (module.encode(), self.factors[module].scale.tobytes(), next(hashed), next(hashed)):
                content.update(len(part).to_bytes(8, "little") + part)
        for name in sorted(self.replaced):
            for part in (name.encode(), _content(self.replaced[name])):
                content.update(len(part).to_bytes(8, "little") + part)
        return content.digest()

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max((len(factors.a) for factors in self.factors.values()), default=0)


def adapted_digest(model: str, adapter: bytes) -> str:
    """Returns the digest of a model with an adapter, given the digests of both: to a verifier it is another model."""
    return hashlib.sha256(f"{model} {adapter.hex()}".encode()).hexdigest()


def _content(x: np.ndarray) -> bytes:
    x = np.ascontiguousarray(x)
    return f"{x.dtype} {x.shape} ".encode() + hashlib.sha256(x.view(np.uint8).data).digest()


def read_adapter(folder: str | os.PathLike[str]) -> Adapter:
    """Returns the adapter in a folder of peft's.

    The tensors decide which modules have factors; the configuration must agree with them.

    Raises:
        CheckpointError: a file is missing or damaged, it is a pickle, an option is not supported, or the tensors and
            the configuration disagree.
    """
    directory = Path(folder)
    if not directory.is_dir():
        raise CheckpointError(f"{os.fspath(folder)!r} is not a directory; accepted: one with {CONFIG} and {WEIGHTS}")
    path = directory / WEIGHTS
    pickles = [name for name in _PICKLES if (directory / name).exists()]
    if not path.exists(follow_symlinks=False) and pickles:
        raise CheckpointError(
            f"{directory} holds {pickles[0]}, a pickle, which is not read, since it may run any code; accepted: "
            f"{WEIGHTS}. Load the adapter with peft and save it with save_pretrained"
        )
    return read_weights(path, read_adapter_config(directory))


def read_weights(path: Path, config: AdapterConfig) -> Adapter:
    """Returns an adapter with the tensors of a safetensors file, which must agree with a configuration.

    Raises:
        CheckpointError: the file is missing or damaged, or the tensors and the configuration disagree.
    """
    with contextlib.ExitStack() as files:
        stored = open_file(path, files)
        pairs: dict[str, dict[str, StoredTensor]] = {}
        replaced: dict[str, np.ndarray] = {}
        for name, tensor in stored.items():
            if not name.startswith(_PREFIX):
                raise _tensor_error(tensor, f"names that begin with {_PREFIX!r}")
            inner = name.removeprefix(_PREFIX)
            if match := _FACTOR.fullmatch(inner):
                pairs.setdefault(match["module"], {})[match["factor"]] = tensor
            elif "lora_" in inner:
                raise _tensor_error(tensor, "lora_A.weight and lora_B.weight of linear layers")
            else:
                replaced[_checked_name(inner.replace(".modules_to_save.", "."), tensor, config)] = tensor.read()
        read = in_threads(lambda one: _read_factors(*one, config), pairs.items())
        factors = dict(zip(pairs, read, strict=True))
    if not factors and not replaced:
        raise CheckpointError(f"{path} has no tensors; accepted: at least one module with factors")
    return Adapter(config, factors, replaced)


def _tensor_error(tensor: StoredTensor, accepted: str) -> CheckpointError:
    return CheckpointError(f"{tensor.file}: tensor {tensor.name!r}; accepted: {accepted}")


def _checked_name(name: str, tensor: StoredTensor, config: AdapterConfig) -> str:
    """Returns the name of a replaced tensor, if the configuration lets it be replaced."""
    module, kind = name.rsplit(".", 1)
    is_saved = any(module.endswith(ending) for ending in config.replaced)
    # peft saves the tables of tokens with an adapter if the vocabulary might have grown.
    is_table = module.rsplit(".", 1)[-1] in ("embed_tokens", "lm_head")
    if is_saved or is_table or (kind == "bias" and config.replaces_biases):
        return name
    accepted = "a tensor of a module in modules_to_save" + (", or a bias" if config.replaces_biases else "")
    raise _tensor_error(tensor, f"{accepted}; modules_to_save in {CONFIG} is {list(config.replaced)}")


def _read_factors(module: str, pair: Mapping[str, StoredTensor], config: AdapterConfig) -> Factors:
    """Returns a module's factors, and checks their ranks against the configuration."""
    for factor, other in ("AB", "BA"):
        if factor not in pair:
            raise _tensor_error(pair[other], f"also the module's lora_{factor}.weight")
    a, b = pair["A"], pair["B"]
    if not config.has_target(module):
        raise _tensor_error(a, f"modules that target_modules in {CONFIG} names, {config.targets!r}")
    if len(a.shape) != 2 or len(b.shape) != 2 or b.shape[1] != a.shape[0]:
        raise _tensor_error(a, f"[rank, inputs] and [outputs, rank]; the two have shapes {a.shape} and {b.shape}")
    if a.shape[0] != config.rank_of(module):
        raise _tensor_error(a, f"{config.rank_of(module)} rows, the rank in {CONFIG}; it has shape {a.shape}")
    return Factors(a.read(), b.read(), np.float32(config.scale_of(module)))


def save_adapter(adapter: Adapter, path: str | os.PathLike[str]) -> None:
    """Writes a folder that `read_adapter` and peft load. It appears as a whole or not at all.

    Raises:
        FileExistsError: `path` exists and is not an empty directory.
    """
    target = Path(path).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(
            f"save_adapter: {target} exists; accepted: a path that does not exist, or an empty directory"
        )
    tensors: dict[str, np.ndarray] = {}
    for module, (a, b, _) in adapter.factors.items():
        tensors |= {f"{_PREFIX}{module}.lora_A.weight": a, f"{_PREFIX}{module}.lora_B.weight": b}
    tensors |= {f"{_PREFIX}{name}": value for name, value in adapter.replaced.items()}
    with _new_folder(target) as folder:
        text = json.dumps(adapter.config.to_json(), indent=2, sort_keys=True)
        (folder / CONFIG).write_text(f"{text}\n", encoding="utf-8")
        contiguous = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
        safetensors.numpy.save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})
        # safetensors makes the files that it writes readable only by the owner.
        (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode & 0o666)


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yields a folder that becomes `target` at the end, or is deleted after an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        folder = Path(temporary) / target.name
        folder.mkdir()
        yield folder
        if target.exists():
            target.rmdir()
        folder.rename(target)
