"""Settings and statistics of an engine."""

import dataclasses
import math
from typing import Any, Final, NamedTuple

import jax

from detjax.contract import KV_BLOCK
from detjax.engine.batch import BatchShapes
from detjax.engine.drafts.loading import Guesser
from detjax.engine.drafts.speculative_config import SpeculativeConfig
from detjax.engine.model_runner import bytes_of_page, bytes_of_slot, bytes_of_snapshot
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.snapshots import SLOTS_IN_TRANSIT
from detjax.engine.step_loop import StepLoopConfig
from detjax.models import Decoder
from detjax.models.cache import declarations
from detjax.models.mesh import spans_processes
from detjax.models.parts.state import StateSize
from detjax.operands.numerics import ceil_div
from detjax.operands.options import KVQuantization
from detjax.runtime import backends

_DECODES_IN_RUNS: Final = 64
"""With more decodes a step takes longer on the device than on the host, so runs gain nothing."""
_SECONDS_ON_A_MESH: Final = 30.0
"""A lost device makes the others wait for it without end. The longest step takes less than a second."""
_SHARE_OF_FREE_MEMORY: Final = 0.9
_CACHE_WITHOUT_A_GPU: Final = 1 << 30
"""Maximum bytes of the cache where the device does not report its memory."""
_LAYERS_AT_ONCE: Final = 16
"""Maximum number of layers in a program that computes a block of them. On an H100, a step with guesses of 36 layers of
Qwen3-8B's shape takes 7.6 ms in blocks of 12 layers if the device is idle before, and 8.6 to 10 ms in one program; the
device computes for 6.3 ms in both cases. Blocks of 4 or 6 layers save up to 0.4 ms more, but the host launches for up
to 2 ms more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an `Engine`. Only `kv_cache_dtype` changes the bits of a request.

    The engine refuses a request that asks for more tokens than `max_length` allows; it does not truncate the answer.
    Clients that do not set a length, as in chats, get answers that depend on `max_length` too.

    Attributes:
        max_samples: maximum number of samples computed at the same time; others wait.
        token_budget: maximum tokens of a step, prompts and decodes together.
        max_length: maximum tokens of a sample, including its prompt. Default: the model's limit.
        num_pages: pages of the KV cache, 128 tokens each. Default: enough for all samples, limited to 90% of the
            device's free memory. If devices of several processes share the model, all processes must give the same
            number.
        prefix_cache: keep pages for prompts that begin with the same tokens.
        snapshot_bytes: maximum host memory in bytes for snapshots, which models with linear attention need for their
            prefix cache; 0: no prefix cache for such models. A snapshot is a copy of the model's state at the end of a
            page. The engine takes one at the end of a prompt and where a prompt diverges from cached pages, and a
            request resumes from the last one that matches its prompt. Models that devices of several processes share
            cannot have snapshots.
        snapshot_tokens: minimum number of tokens that a snapshot must save over the previous one; below it,
            recomputing is faster than copying the state to the host and back.
        kv_cache_dtype: quantize the KV cache, which changes the numbers (`ops.quantize_kv`). They still depend on
            nothing but the request. Default: the model's dtype.
        top_logprobs: maximum number of likeliest tokens that a request may ask for.
        runs_of: maximum batch size for decode runs, in which the device computes four tokens per sample without
            waiting for the host; 0: no runs. Tokens then arrive four at a time. There are no runs while requests
            wait, but a new request waits for up to two runs in flight. Default: 64 on GPUs, 0 elsewhere.
        speculative: guess tokens and verify several of them in one step; see `SpeculativeConfig`. Default: no guesses.
        max_loras: maximum number of adapters in one step; 0: no request may have an adapter. More of them may be
            loaded: the least recently used ones leave the device, and come back when a request needs them.
        max_lora_rank: the largest rank of an adapter.
        step_seconds: maximum seconds that the engine waits for the devices to finish a step. Then it fails, rather than
            hang when a device or another process that shares the model is lost. Default: 30 if GPUs share the model,
            else no limit.

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
    step_seconds: float | None = None
    speculative: SpeculativeConfig | None = None
    max_loras: int = 0
    max_lora_rank: int = 16

    def resolved(self, model: Decoder, guesser: Guesser = None) -> "EngineConfig":
        """Returns these settings with all defaults filled in for a model.

        Args:
            model: the model.
            guesser: the smaller model or head that guesses tokens, and has pages of its own.

        Raises:
            ValueError: a setting is out of range, the model does not support this quantization of keys and values, or
                the pages cannot hold one request of `max_length` tokens.
        """
        positions, vocabulary = model.config.max_positions, model.config.vocab_size
        length = positions if self.max_length is None else self.max_length
        accepted = {
            "max_samples": (self.max_samples, self.max_samples >= 1, "at least 1"),
            "token_budget": (self.token_budget, self.token_budget >= 1, "at least 1"),
            "max_length": (length, 2 <= length <= positions, f"2 to {positions}, the model's"),
            "snapshot_bytes": (self.snapshot_bytes, self.snapshot_bytes >= 0, "0 and more"),
            "snapshot_tokens": (self.snapshot_tokens, self.snapshot_tokens >= 1, "at least 1"),
            "max_loras": (self.max_loras, self.max_loras >= 0, "0 and more"),
            "max_lora_rank": (self.max_lora_rank, 1 <= self.max_lora_rank <= 512, "1 to 512"),
            "top_logprobs": (self.top_logprobs, 0 <= self.top_logprobs <= vocabulary, f"0 to {vocabulary}"),
            "runs_of": (self.runs_of, self.runs_of is None or self.runs_of >= 0, "0 and more, or None"),
            "step_seconds": (
                self.step_seconds,
                self.step_seconds is None or self.step_seconds > 0,
                "more than 0, or None",
            ),
        }
        for name, (value, is_accepted, description) in accepted.items():
            if not is_accepted:
                raise ValueError(f"Engine: {name} is {value}; accepted: {description}")
        try:
            page = bytes_of_page(model, self.kv_cache_dtype)
        except ValueError as error:
            raise ValueError(f"Engine: {error}") from error
        page += _bytes_of_guessers_page(guesser)
        slot, takes_snapshots = bytes_of_slot(model), model.has_slots and self.prefix_cache and self.snapshot_bytes > 0
        snapshot = bytes_of_snapshot(model)
        if takes_snapshots and self.snapshot_bytes < snapshot:
            raise ValueError(
                f"Engine: snapshot_bytes is {self.snapshot_bytes}; accepted: at least {snapshot}, for one snapshot of "
                "this model, or 0, which turns off its prefix cache"
            )
        if self.max_loras and model.config.pooling is not None:
            raise ValueError(
                f"Engine: max_loras is {self.max_loras}, and the model pools; accepted: 0 for models that do not "
                "generate"
            )
        if self.speculative is not None and model.config.pooling is not None:
            raise ValueError(
                f"Engine: speculative is {self.speculative}, and the model pools; accepted: None for models that "
                "do not generate"
            )
        needed = _pages(length, pools=model.config.pooling is not None)
        num_pages = self.num_pages
        if num_pages is None and spans_processes(model.mesh):
            raise ValueError(
                "Engine: num_pages is None, and devices of several processes share the model; accepted: a number, the "
                "same in every process, because their free memory differs"
            )
        if num_pages is None:
            free = _free_memory() - (self.max_samples + takes_snapshots * SLOTS_IN_TRANSIT) * slot
            num_pages = max(needed, min(self.max_samples * needed, max(1, free // max(1, page))))
        if num_pages < needed:
            raise ValueError(
                f"Engine: num_pages is {num_pages}; accepted: at least {needed}, for one request of {length} tokens. "
                "Give more pages, or a lower max_length."
            )
        # The host of one process cannot copy the state from the devices of another process.
        snapshot_bytes = 0 if spans_processes(model.mesh) else self.snapshot_bytes
        runs_of, step_seconds, is_gpu = self.runs_of, self.step_seconds, backends.target() == "gpu"
        if runs_of is None:
            runs_of = _DECODES_IN_RUNS if is_gpu else 0
        if step_seconds is None:
            step_seconds = _SECONDS_ON_A_MESH if is_gpu and model.mesh is not None else math.inf
        sizes: dict[str, Any] = {"max_length": length, "num_pages": num_pages, "snapshot_bytes": snapshot_bytes}
        return dataclasses.replace(self, runs_of=runs_of, step_seconds=step_seconds, **sizes)

    def pooling_loop(self) -> StepLoopConfig:
        """Returns the sizes of the step loop of a model that pools. Call it on resolved settings."""
        assert self.max_length is not None
        pages = _pages(self.max_length, pools=True)
        return dataclasses.replace(self.step_loop(), pages_per_sequence=pages, variants=())

    def step_loop(self, *, decodes_guesses: bool = False) -> StepLoopConfig:
        """Returns the sizes of the engine's step loop. Call it on resolved settings.

        For `decodes_guesses` see `StepLimits`.
        """
        assert self.max_length is not None
        assert self.num_pages is not None
        assert self.runs_of is not None
        drafts = 0 if self.speculative is None else self.speculative.num_speculative_tokens
        return StepLoopConfig(
            shapes=BatchShapes.for_serving(
                self.max_samples, self.token_budget, drafts, decodes_guesses=decodes_guesses
            ),
            num_pages=self.num_pages,
            pages_per_sequence=_pages(self.max_length, pools=False),
            variants=SamplingVariant.for_serving(self.top_logprobs),
            prefix_cache=self.prefix_cache,
            snapshot_bytes=self.snapshot_bytes,
            snapshot_tokens=self.snapshot_tokens,
            kv_cache_dtype=self.kv_cache_dtype,
            runs_of=self.runs_of,
            speculative=self.speculative,
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            layers_at_once=_LAYERS_AT_ONCE,
        )


class EngineStats(NamedTuple):
    """The current load of an engine.

    Attributes:
        running: samples that have a slot.
        waiting: samples that wait for a slot.
        num_pages: pages of the KV cache.
        pages_in_use: pages that requests in flight refer to.
        preemptions: number of times a sample lost its pages to another one, since the engine was made.
        snapshots: snapshots in host memory; see `EngineConfig.snapshot_bytes`.
        snapshot_bytes: their bytes.
        snapshot_hits: number of times a sample resumed from a snapshot, since the engine was made.
        drafts_proposed: number of guessed tokens that steps verified, since the engine was made.
        drafts_accepted: number of them that were right.
        drafts_accepted_at: this number for each position of a draft.
    """

    running: int
    waiting: int
    num_pages: int
    pages_in_use: int
    preemptions: int
    snapshots: int = 0
    snapshot_bytes: int = 0
    snapshot_hits: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    drafts_accepted_at: tuple[int, ...] = ()


def _bytes_of_guessers_page(guesser: Guesser) -> int:
    """Returns the bytes that a smaller model or head adds to a page on each device, at most."""
    if isinstance(guesser, Decoder):
        return bytes_of_page(guesser, None)
    if guesser is None:
        return 0
    size = StateSize(1, guesser.target.dtype)
    pages = jax.eval_shape(lambda: [declared.empty(size) for declared in declarations(guesser.head.config)])
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))


def _pages(length: int, *, pools: bool) -> int:
    """Returns the pages of a sequence of `length` tokens. The last token of a sample is not computed."""
    return ceil_div(length if pools else length - 1, KV_BLOCK)


def _free_memory() -> int:
    """Returns the bytes available to the cache."""
    memory = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in memory:
        return _CACHE_WITHOUT_A_GPU
    return int((memory["bytes_limit"] - memory["bytes_in_use"]) * _SHARE_OF_FREE_MEMORY)
