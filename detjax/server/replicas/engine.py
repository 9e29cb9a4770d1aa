"""A replica's engine, and the facts about it that a front needs."""

import contextlib
import dataclasses
import datetime
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detjax import models
from detjax.audit import Origin
from detjax.engine import Engine, EngineConfig, prepare_cache
from detjax.engine.commands import EngineCommands
from detjax.models import ModelMetadata, Tokenizer
from detjax.models.checkpoint.quantization_schemes import Quantized
from detjax.models.checkpoint.weight_updates import UpdatableWeights
from detjax.runtime import backends, fingerprints
from detjax.server.app import fingerprint_of


@dataclasses.dataclass(frozen=True)
class ReplicaOptions:
    """The options of all replicas.

    Attributes:
        model: the checkpoint's directory.
        dtype: the dtype of the weights; see `detjax.models.load`.
        backend: see `detjax.use_backend`.
        tensor_parallel: devices of each replica that the model is sharded over; see `detjax.models.mesh_of`.
        expert_parallel: groups of `tensor_parallel` devices that the experts are sharded over.
        chat_template: replaces the checkpoint's chat template.
        template_date: today's date for chat templates.
        overrides: keys of `config.json` with the values to read instead; see `detjax.models.load`.
        quantized: the reading of quantized weights; see `detjax.models.load`.
        config: the engine's settings.
        cache: directory of compiled programs, which makes replicas start faster; see `Engine.warm_up`.
        adapters: folders of adapters by name; see `detjax.models.load`.
    """

    model: Path
    dtype: str | None = None
    backend: str | None = None
    tensor_parallel: int = 1
    expert_parallel: int = 1
    chat_template: str | None = None
    template_date: datetime.date | None = None
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    quantized: Quantized = "computed"
    config: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    cache: Path | None = None
    adapters: dict[str, Path] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ReplicaFacts:
    """Facts that the front needs about the replicas, equal for all of them.

    Attributes:
        metadata: the model's configuration and other facts.
        tokenizer_files: the files of the tokenizer; see `Tokenizer.files`.
        config: the engine's resolved settings.
        origin: everything that answers depend on, except requests and adapters.
        adapters: the digest of each adapter, by name.
    """

    metadata: ModelMetadata
    tokenizer_files: dict[str, bytes]
    config: EngineConfig
    origin: Origin
    adapters: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """The replica's `system_fingerprint`."""
        return fingerprint_of(self.origin, self.config, self.metadata)

    def with_digest(self, digest: str) -> "ReplicaFacts":
        """Returns the facts after an update of the weights to a model of this digest."""
        return dataclasses.replace(self, origin=dataclasses.replace(self.origin, model=digest))

    def tokenizer(self) -> Tokenizer:
        """Creates the replica's tokenizer in this process."""
        return Tokenizer(self.tokenizer_files, "the checkpoint")


def started_engine(options: ReplicaOptions) -> tuple[Engine, ReplicaFacts, EngineCommands]:
    """Loads the model, and returns its warmed-up engine, the facts, and the commands to it.

    Raises:
        ValueError: an option is out of range, the device is not supported, or the checkpoint has no tokenizer.
        OSError: the checkpoint is not readable, or the cache is not writable.
    """
    with backends.use_backend(options.backend):
        backends.check_device()
        mesh = models.mesh_of(options.tensor_parallel, options.expert_parallel)
        given = {"dtype": options.dtype, "mesh": mesh, "overrides": options.overrides, "quantized": options.quantized}
        model, tokenizer = models.load(options.model, progress=False, adapters=options.adapters, **given)
        if tokenizer is None:
            raise ValueError(f"{options.model} has no tokenizer.json; accepted: a checkpoint with a tokenizer")
        if options.template_date is not None:
            tokenizer = tokenizer.with_template_date(options.template_date)
        if options.chat_template is not None:
            tokenizer = tokenizer.with_chat_template(options.chat_template)
        engine = Engine(model, tokenizer, options.config)
        with _compile_lock(options.cache):
            engine.warm_up(cache=options.cache, in_background=True)
        # Not with the number of pages: it depends on the machine's free memory, and no bit depends on it.
        weights = UpdatableWeights(model, tokenizer)
        origin = Origin(fingerprints.fingerprint().digest, weights.digest.value, options.config.kv_cache_dtype)
        adapters = {name: adapter.digest.hex() for name, adapter in engine.adapters.items()}
        facts = ReplicaFacts(ModelMetadata.from_model(model), tokenizer.files, engine.config, origin, adapters)
        return engine, facts, EngineCommands(engine, weights)


@contextlib.contextmanager
def _compile_lock(cache: Path | None) -> Iterator[None]:
    """Excludes other replicas of this machine from compiling for the same cache.

    Replicas that start together need the same programs: the first one compiles them, and the others find them.
    """
    if cache is None:
        yield
        return
    prepare_cache(cache)
    directory = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # if the file system cannot lock directories, each replica compiles
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)
