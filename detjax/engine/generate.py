"""`generate`: a batch of prompts of any lengths, each with its own sampling parameters."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, PyTree
from rich.console import Console
from rich.progress import Progress

from detjax import ops, platform
from detjax.contract import PORTABLE_ROWS, KVQuantization
from detjax.engine.request import Completion, Generation, encoded, end_tokens
from detjax.engine.sampling import SamplingParams
from detjax.models import Decoder, KVCache, Tokenizer
from detjax.ops.quantized_kv import check_kind

PREFILL_CHUNK = 128
"""Tokens of a prompt that enter the cache in one step, by default. A schedule: any number gives the same bits."""


def generate(
    model: Decoder,
    prompts: Sequence[str | Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    kv_cache_dtype: KVQuantization | None = None,
    progress: bool = False,
) -> list[Generation]:
    """Returns a generation per prompt, each the same in every bit as if it were alone.

    Args:
        model: the decoder.
        prompts: texts, or lists of token ids; of any lengths.
        sampling: for all prompts, or one for each; default: greedy.
        tokenizer: needed for texts and stop strings.
        prefill_chunk: tokens of a prompt that are processed at a time. It changes no bits.
        kv_cache_dtype: "int8", "fp8_e4m3" or "q4_0" quantize keys and values in the cache (`ops.quantize_kv`). The
            numbers are others than without, and as independent of everything else; default: the model's dtype.
        progress: shows a bar on stderr.

    Raises:
        ValueError: a prompt is empty, holds ids outside the vocabulary, is too long for the model with what is to be
            generated, or is text without a tokenizer; the numbers of prompts and parameters differ; logprobs of
            prompts are asked for; or the cache's dtype is none of these, or does not take the model's head size.
    """
    if isinstance(prompts, str):
        raise ValueError("generate: prompts is one string; accepted: a list of prompts. Put it in a list.")
    if prefill_chunk < 1:
        raise ValueError(f"generate: prefill_chunk is {prefill_chunk}; accepted: at least 1")
    if kv_cache_dtype is not None:
        check_kind("generate", kv_cache_dtype, model.config.head_dim)
    sampling = SamplingParams() if sampling is None else sampling
    per_prompt = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    if any(params.prompt_logprobs for params in per_prompt):
        raise ValueError("generate: prompt_logprobs is True; accepted: False. An Engine reports them.")
    if len(per_prompt) != len(prompts):
        raise ValueError(
            f"generate: {len(prompts)} prompts and {len(per_prompt)} sampling parameters; accepted: one, or as many"
        )
    tokens = [
        encoded(f"generate: prompt {index}", model.config, prompt, params, tokenizer)
        for index, (prompt, params) in enumerate(zip(prompts, per_prompt, strict=True))
    ]
    samples = [
        _Sample(prompt, index, params, end_tokens(model.generation_defaults, params), tokenizer)
        for prompt, params in zip(tokens, per_prompt, strict=True)
        for index in range(params.n)
    ]
    if samples:
        _run(model, samples, prefill_chunk, kv_cache_dtype, progress)
    finished = iter(sample.completion() for sample in samples)
    return [
        Generation(prompt, tuple(next(finished) for _ in range(params.n)))
        for prompt, params in zip(tokens, per_prompt, strict=True)
    ]


class _Sample:
    """A row of the batch: its prompt, what it has generated, and whether it goes on."""

    def __init__(
        self,
        prompt: tuple[int, ...],
        index: int,
        params: SamplingParams,
        end_tokens: frozenset[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.prompt = prompt
        self.index = index
        self.params = params
        self.end_tokens = end_tokens
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self.text: str | None = None
        self.finish_reason: str | None = None

    def add(self, token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> None:
        """Takes the next token, and sees whether it ends the sample."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.top_logprobs.append(top[: self.params.top_logprobs])
        if token in self.end_tokens:
            self.finish_reason = "stop"
        elif self.params.stop and self.tokenizer is not None:
            text = self.tokenizer.decode(self.tokens)
            found = [at for stop in self.params.stop if (at := text.find(stop)) >= 0]
            if found:
                self.text, self.finish_reason = text[: min(found)], "stop"
        if self.finish_reason is None and len(self.tokens) == self.params.max_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        """What came of it."""
        assert self.finish_reason is not None
        text = self.text
        if text is None and self.tokenizer is not None:
            text = self.tokenizer.decode(self.tokens)
        return Completion(tuple(self.tokens), tuple(self.logprobs), tuple(self.top_logprobs), text, self.finish_reason)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Choice:
    """Arguments of `ops.sample` that stay the same from step to step, a row per sample."""

    seed: Array
    sample_index: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array


def _run(
    model: Decoder,
    samples: list[_Sample],
    prefill_chunk: int,
    kv_cache_dtype: KVQuantization | None,
    progress: bool,
) -> None:
    """Generates until every sample has ended. Shapes are rounded up, so that few programs are compiled."""
    graphdef, state = nnx.split(model)
    batch = _power_of_two(len(samples))
    capacity = max(len(sample.prompt) + sample.params.max_tokens for sample in samples)
    cache = KVCache.empty(model.config, batch, capacity, model.dtype, kv_cache_dtype)
    hidden = jnp.zeros((batch, model.config.hidden_size), model.dtype)
    filtered = any(sample.params.filtered for sample in samples)
    top = max(sample.params.top_logprobs for sample in samples)
    choice = _choice([sample.params for sample in samples], [sample.index for sample in samples], batch)

    longest = max(len(sample.prompt) for sample in samples)
    chunk = min(prefill_chunk, max(_power_of_two(longest), PORTABLE_ROWS))
    steps = -(-longest // chunk) + max(sample.params.max_tokens for sample in samples) - 1
    with Progress(console=Console(stderr=True), disable=not progress) as bars:
        bar = bars.add_task(f"generating {len(samples)} samples", total=steps)
        for start in range(0, longest, chunk):
            pieces = [sample.prompt[start : start + chunk] for sample in samples]
            tokens, counts = _padded(pieces, batch, chunk)
            cache, hidden = _advance(graphdef, state, tokens, counts, cache, hidden)
            bars.advance(bar)
        while True:
            chosen = _choose(graphdef, state, hidden, cache.lengths, choice, filtered=filtered, top=top)
            for sample, token, logprob, ids, logprobs in zip(samples, *jax.device_get(chosen), strict=False):
                if sample.finish_reason is None:
                    sample.add(int(token), float(logprob), tuple(zip(ids.tolist(), logprobs.tolist(), strict=True)))
            going = [sample.tokens[-1:] if sample.finish_reason is None else [] for sample in samples]
            if not any(going):
                break
            tokens, counts = _padded(going, batch, 1)
            cache, hidden = _advance(graphdef, state, tokens, counts, cache, hidden)
            bars.advance(bar)
        bars.update(bar, completed=steps)


@platform.jit(static_argnums=0, donate_argnums=(4, 5))
def _advance(
    graphdef: nnx.GraphDef[Decoder],
    state: PyTree[Array],
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, "B"],
    cache: KVCache,
    hidden: Float[Array, "B D"],
) -> tuple[KVCache, Float[Array, "B D"]]:
    """The cache with the tokens in it, and the hidden state of each row's last token so far."""
    new, cache = nnx.merge(graphdef, state).hidden(tokens, cache, counts)
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    new = jnp.take_along_axis(new, last, axis=1)[:, 0]
    return cache, jnp.where((counts > 0)[:, None], new, hidden)


@platform.jit(static_argnums=0, static_argnames=("filtered", "top"))
def _choose(
    graphdef: nnx.GraphDef[Decoder],
    state: PyTree[Array],
    hidden: Float[Array, "B D"],
    position: Int32[Array, "B"],
    choice: _Choice,
    *,
    filtered: bool,
    top: int,
) -> tuple[Int32[Array, "B"], Float32[Array, "B"], Int32[Array, "B top"], Float32[Array, "B top"]]:
    """Each row's next token with its logprob, and the `top` likeliest with theirs."""
    logits = nnx.merge(graphdef, state).logits(hidden)
    token, logprob = ops.sample(logits, position=position, **vars(choice), filtered=filtered)
    if not top:
        none = jnp.zeros((logits.shape[0], 0))
        return token, logprob, none.astype(jnp.int32), none
    return token, logprob, *ops.top_logprobs(logits, top)


def _choice(params: list[SamplingParams], indices: list[int], batch: int) -> _Choice:
    rows = [params[min(row, len(params) - 1)] for row in range(batch)]
    return _Choice(
        seed=jnp.asarray([ops.seed_words(row.seed) for row in rows], jnp.uint32),
        sample_index=jnp.asarray(indices + [0] * (batch - len(indices)), jnp.int32),
        temperature=jnp.asarray([row.temperature for row in rows], jnp.float32),
        top_k=jnp.asarray([row.top_k for row in rows], jnp.int32),
        top_p=jnp.asarray([row.top_p for row in rows], jnp.float32),
        min_p=jnp.asarray([row.min_p for row in rows], jnp.float32),
    )


def _padded(pieces: Iterable[Sequence[int]], batch: int, width: int) -> tuple[Int32[Array, "B T"], Int32[Array, "B"]]:
    """The pieces, zeros on their right, and their lengths; empty rows up to `batch`."""
    tokens = np.zeros((batch, width), np.int32)
    counts = np.zeros(batch, np.int32)
    for row, piece in enumerate(pieces):
        tokens[row, : len(piece)] = piece
        counts[row] = len(piece)
    return jnp.asarray(tokens), jnp.asarray(counts)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
