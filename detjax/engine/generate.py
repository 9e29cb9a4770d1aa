"""`generate`: a batch of prompts of any lengths, each with its own sampling parameters."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32
from rich.console import Console
from rich.progress import Progress

from detjax import compilation
from detjax.contract import PORTABLE_ROWS
from detjax.engine.device import Found, Network, Weights, chosen, split
from detjax.engine.inputs import Choice
from detjax.engine.request import Generation, encoded, end_tokens
from detjax.engine.sample import Sample
from detjax.engine.sampling import SamplingParams
from detjax.models import Decoder, KVCache, Tokenizer
from detjax.ops.quantized_kv import check_kind
from detjax.options import KVQuantization

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
        Sample(prompt, index, params, end_tokens(model.generation_defaults, params), tokenizer)
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


def _run(
    model: Decoder,
    samples: list[Sample],
    prefill_chunk: int,
    kv_cache_dtype: KVQuantization | None,
    progress: bool,
) -> None:
    """Generates until every sample has ended. Shapes are rounded up, so that few programs are compiled."""
    network, weights = split(model)
    batch = _power_of_two(len(samples))
    capacity = max(len(sample.prompt) + sample.params.max_tokens for sample in samples)
    cache = KVCache.empty(model.config, batch, capacity, model.dtype, kv_cache_dtype)
    hidden = jnp.zeros((batch, model.config.hidden_size), model.dtype)
    filtered = any(sample.params.filtered for sample in samples)
    top = max(sample.params.top_logprobs for sample in samples)
    rows = [*samples, *samples[-1:] * (batch - len(samples))]  # what fills the batch is whoever is last
    choice = Choice.of([sample.params for sample in rows], [sample.index for sample in rows])
    choice = jax.tree.map(jnp.asarray, choice)  # once, not at every step

    longest = max(len(sample.prompt) for sample in samples)
    chunk = min(prefill_chunk, max(_power_of_two(longest), PORTABLE_ROWS))
    steps = -(-longest // chunk) + max(sample.params.max_tokens for sample in samples) - 1
    with Progress(console=Console(stderr=True), disable=not progress) as bars:
        bar = bars.add_task(f"generating {len(samples)} samples", total=steps)
        for start in range(0, longest, chunk):
            pieces = [sample.prompt[start : start + chunk] for sample in samples]
            tokens, counts = _padded(pieces, batch, chunk)
            cache, hidden = _advance(network, weights, tokens, counts, cache, hidden)
            bars.advance(bar)
        while True:
            found = _choose(network, weights, hidden, cache.lengths, choice, filtered=filtered, top=top).read()
            for row, sample in enumerate(samples):
                if sample.finish_reason is None:
                    sample.add(*found.at(row, sample.params.top_logprobs), batch=batch)
            going = [sample.tokens[-1:] if sample.finish_reason is None else [] for sample in samples]
            if not any(going):
                break
            tokens, counts = _padded(going, batch, 1)
            cache, hidden = _advance(network, weights, tokens, counts, cache, hidden)
            bars.advance(bar)
        bars.update(bar, completed=steps)


@compilation.jit(static_argnums=0, donate_argnums=(4, 5))
def _advance(
    network: Network,
    weights: Weights,
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, "B"],
    cache: KVCache,
    hidden: Float[Array, "B D"],
) -> tuple[KVCache, Float[Array, "B D"]]:
    """The cache with the tokens in it, and the hidden state of each row's last token so far."""
    new, cache = network.with_weights(weights).hidden(tokens, cache, counts)
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    new = jnp.take_along_axis(new, last, axis=1)[:, 0]
    return cache, jnp.where((counts > 0)[:, None], new, hidden)


@compilation.jit(static_argnums=0, static_argnames=("filtered", "top"))
def _choose(
    network: Network,
    weights: Weights,
    hidden: Float[Array, "B D"],
    position: Int32[Array, "B"],
    choice: Choice,
    *,
    filtered: bool,
    top: int,
) -> Found:
    """Each row's next token with its logprob, and the `top` likeliest with theirs."""
    return chosen(network.with_weights(weights), hidden, choice._replace(position=position), filtered=filtered, top=top)


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
