"""The settings of an engine, and what it says of itself."""

import dataclasses
from typing import Any, Final, NamedTuple

import jax

from detjax.contract import KV_BLOCK
from detjax.engine.batch import BatchShapes
from detjax.engine.model_runner import bytes_of_page, bytes_of_slot, bytes_of_snapshot
from detjax.engine.snapshots import SLOTS_IN_TRANSIT
from detjax.engine.step_loop import StepLoopConfig
from detjax.engine.step_programs import SamplingVariant
from detjax.models import Decoder
from detjax.models.mesh import spans_processes
from detjax.operands.options import KVQuantization
from detjax.runtime import backends

_DECODES_IN_RUNS: Final = 64
"""With more decodes the device takes longer for a step than the host, which need not be waited for then."""
_SHARE_OF_FREE_MEMORY: Final = 0.9
_CACHE_WITHOUT_A_GPU: Final = 1 << 30
"""Bytes of the cache at most, where the device does not say how much memory it has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of an `Engine`. Among them `kv_cache_dtype` alone changes the bits of a request.

    A request that asks for more tokens than `max_length` allows is refused, not cut. Where a client leaves it to the
    server how many tokens it gets, as in chats, answers depend on `max_length` too.

    Attributes:
        max_samples: samples that are computed at the same time; further ones wait.
        token_budget: tokens of a step at most, prompts and decodes together.
        max_length: tokens of a sample at most, its prompt included. Default: the model's limit.
        num_pages: pages of the KV cache, of 128 tokens each. Default: what all samples could need, as far as it fits
            into 90% of the device's free memory. Where devices of several processes share the model,
            each process must give the same number.
        prefix_cache: keep pages for prompts that begin with the same tokens.
        snapshot_bytes: bytes of the host's memory at most for snapshots, which models with linear attention need for
            prompts that begin alike. A snapshot is such a state at the end of
            a page. It is taken at the end of a prompt, and where a prompt leaves the pages of another one. A request
            goes on from the last one that it has in common with others. 0: such models have no prefix cache. Other
            models need no snapshots. Where devices of several processes share the model, there are none.
        snapshot_tokens: how many tokens a snapshot must save the requests that go on from it, over the snapshot before
            it; fewer are sooner computed again than such a state is copied to the host and back.
        kv_cache_dtype: quantize the KV cache. Quantized keys and values (`ops.quantize_kv`) give different numbers, as
            independent of everything else. Default: the model's dtype.
        top_logprobs: the most of the likeliest tokens that a request may ask for.
        runs_of: samples at most for which the device computes four tokens at a time while no request waits; 0: one at
            a time. It then need not wait for the host. Tokens then come four at a time, and a new request
            waits for the runs that the device has been given, two at most. Default: 64 on GPUs, 0 elsewhere.

    Example:
        >>> detjax.EngineConfig(max_samples=8, token_budget=128).prefix_cache
        True
    """

    max_samples: int = 64
    token_budget: int = 512
    max_length: int | None = None
    num_pages: int | None = None
    prefix_cache: bool = True
    snapshot_bytes: int = 4 << 30
    snapshot_tokens: int = 512
    kv_cache_dtype: KVQuantization | None = None
    top_logprobs: int = 20
    runs_of: int | None = None

    def resolved(self, model: Decoder) -> "EngineConfig":
        """Returns these settings with every default filled in for a model.

        Raises:
            ValueError: a setting is out of range, the model's keys and values cannot be quantized like this, or the
                pages do not hold one request of `max_length` tokens.
        """
        positions, vocabulary = model.config.max_positions, model.config.vocab_size
        length = positions if self.max_length is None else self.max_length
        accepted = {
            "max_samples": (self.max_samples, self.max_samples >= 1, "at least 1"),
            "token_budget": (self.token_budget, self.token_budget >= 1, "at least 1"),
            "max_length": (length, 2 <= length <= positions, f"2 to {positions}, the model's"),
            "snapshot_bytes": (self.snapshot_bytes, self.snapshot_bytes >= 0, "0 and more"),
            "snapshot_tokens": (self.snapshot_tokens, self.snapshot_tokens >= 1, "at least 1"),
            "top_logprobs": (self.top_logprobs, 0 <= self.top_logprobs <= vocabulary, f"0 to {vocabulary}"),
            "runs_of": (self.runs_of, self.runs_of is None or self.runs_of >= 0, "0 and more, or None"),
        }
        for name, (value, is_accepted, description) in accepted.items():
            if not is_accepted:
                raise ValueError(f"Engine: {name} is {value}; accepted: {description}")
        try:
            page = bytes_of_page(model, self.kv_cache_dtype)
        except ValueError as error:
            raise ValueError(f"Engine: {error}") from error
        slot, takes_snapshots = bytes_of_slot(model), model.has_slots and self.prefix_cache and self.snapshot_bytes > 0
        snapshot = bytes_of_snapshot(model)
        if takes_snapshots and self.snapshot_bytes < snapshot:
            raise ValueError(
                f"Engine: snapshot_bytes is {self.snapshot_bytes}; accepted: at least {snapshot}, for one snapshot of "
                "this model, or 0, which leaves it without a prefix cache"
            )
        # The last token of a sample is not computed.
        needed = -(-(length - 1) // KV_BLOCK)
        num_pages = self.num_pages
        if num_pages is None and spans_processes(model.mesh):
            raise ValueError(
                "Engine: num_pages is None, and devices of several processes share the model; accepted: a number, the "
                "same in every process, because what is free of their memory differs"
            )
        if num_pages is None:
            free = _free_memory() - (self.max_samples + takes_snapshots * SLOTS_IN_TRANSIT) * slot
            num_pages = max(needed, min(self.max_samples * needed, max(1, free // max(1, page))))
        if num_pages < needed:
            raise ValueError(
                f"Engine: num_pages is {num_pages}; accepted: at least {needed}, for one request of {length} tokens. "
                "Give more pages, or a lower max_length."
            )
        # The host of one process cannot hold a copy of what lies on the devices of another one.
        snapshot_bytes = 0 if spans_processes(model.mesh) else self.snapshot_bytes
        runs_of = self.runs_of
        if runs_of is None:
            runs_of = _DECODES_IN_RUNS if backends.target() == "gpu" else 0
        sizes: dict[str, Any] = {"max_length": length, "num_pages": num_pages, "snapshot_bytes": snapshot_bytes}
        return dataclasses.replace(self, runs_of=runs_of, **sizes)

    def step_loop(self) -> StepLoopConfig:
        """Returns the sizes of the engine's step loop. The settings must be resolved."""
        assert self.max_length is not None
        assert self.num_pages is not None
        assert self.runs_of is not None
        return StepLoopConfig(
            shapes=BatchShapes.for_serving(self.max_samples, self.token_budget),
            num_pages=self.num_pages,
            pages_per_sequence=-(-(self.max_length - 1) // KV_BLOCK),
            variants=SamplingVariant.for_serving(self.top_logprobs),
            prefix_cache=self.prefix_cache,
            snapshot_bytes=self.snapshot_bytes,
            snapshot_tokens=self.snapshot_tokens,
            kv_cache_dtype=self.kv_cache_dtype,
            runs_of=self.runs_of,
        )


class EngineStats(NamedTuple):
    """What an engine is doing.

    Attributes:
        running: samples that have a slot.
        waiting: samples that wait for a slot.
        num_pages: pages of the KV cache.
        pages_in_use: pages that requests in flight refer to.
        preemptions: how often a sample has lost its pages to another one since the engine was made.
        snapshots: snapshots in the host's memory; see `EngineConfig.snapshot_bytes`.
        snapshot_bytes: their bytes.
        snapshot_hits: how often a sample has gone on from one since the engine was made.
    """

    running: int
    waiting: int
    num_pages: int
    pages_in_use: int
    preemptions: int
    snapshots: int = 0
    snapshot_bytes: int = 0
    snapshot_hits: int = 0


def _free_memory() -> int:
    """Returns the bytes that a cache may take."""
    memory = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in memory:
        return _CACHE_WITHOUT_A_GPU
    return int((memory["bytes_limit"] - memory["bytes_in_use"]) * _SHARE_OF_FREE_MEMORY)
