"""An adapter to Tunix: detjax's decoder as the model of its learners, and detjax's engine as its rollout.

With both, the logprobs that Tunix trains on equal the sampler's bit for bit in GRPO, PPO and agentic GRPO, if one
update follows each batch of rollouts and the chat template reproduces the tokens of earlier turns. This holds at
temperature 1 without filters, in the learners' padded mode, and was observed on CPUs. Gradients still depend on
`train_micro_batch_size`, because Tunix averages microbatches in its own order.

It needs the extra `tunix` (`google-tunix` 0.1.7) and meshes with axes of type `Auto`.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree
from tunix.rl import common  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

from detjax import ops
from detjax.engine import Engine, SamplingParams
from detjax.models import Decoder, Tokenizer
from detjax.models.parts.parameters import FixedWeight
from detjax.rl.rollouts import rollouts, seed_of


class TunixModel(nnx.Module):
    """A decoder with the signature that Tunix' learners call."""

    def __init__(self, decoder: Decoder) -> None:
        """Wraps a decoder and shares its parameters."""
        self.decoder = decoder

    def __call__(
        self,
        input_tokens: Int32[Array, "B L"],
        positions: Int32[Array, "B L"] | None = None,
        cache: Any = None,
        attention_mask: Bool[Array, "B L L"] | None = None,
        segment_ids: Int32[Array, "B L"] | None = None,
        skip_lm_head: bool = False,
    ) -> tuple[Float[Array, "B L V"], None]:
        """Returns the logits of rows that are padded on the left and right, and None for the cache.

        Args:
            input_tokens: token ids; padding ids may lie outside of the vocabulary.
            positions: ignored, since they follow from the padding.
            cache: None.
            attention_mask: Tunix' causal mask, whose diagonal marks the columns with tokens.
            segment_ids: ignored.
            skip_lm_head: whether to return hidden states instead of logits; see `compute_final_logits`.

        Raises:
            NotImplementedError: a cache is given, or sequences are packed, that is, the mask is None.
        """
        del positions, segment_ids
        decoder = self.decoder

        def outputs(tokens: Array, counts: Array) -> Array:
            hidden, _ = decoder.hidden(tokens, None, counts)
            return hidden if skip_lm_head else decoder.logits(hidden)

        return _padded_rows("TunixModel", outputs, input_tokens, cache, attention_mask), None

    def compute_final_logits(self, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
        """Returns the logits of hidden states, which Tunix requests in chunks of `compute_logps_chunk_size`."""
        return self.decoder.logits(hidden)


class TunixCritic(nnx.Module):
    """A decoder with a value head, for Tunix' PPO learner. Its initial values are 0."""

    def __init__(self, decoder: Decoder) -> None:
        """Copies a decoder's weights."""
        graph, state = nnx.split(decoder)
        self.decoder = nnx.merge(graph, jax.tree.map(jnp.copy, state))
        self.value = nnx.Param(jnp.zeros((decoder.config.hidden_size, 1), decoder.dtype))

    def __call__(
        self,
        input_tokens: Int32[Array, "B L"],
        positions: Int32[Array, "B L"] | None = None,
        cache: Any = None,
        attention_mask: Bool[Array, "B L L"] | None = None,
        segment_ids: Int32[Array, "B L"] | None = None,
    ) -> tuple[Float32[Array, "B L 1"], None]:
        """Returns the values of a row's tokens, and None for the cache; see `TunixModel` for arguments and errors."""
        del positions, segment_ids

        def outputs(tokens: Array, counts: Array) -> Array:
            hidden, _ = self.decoder.hidden(tokens, None, counts)
            return ops.matmul(hidden, self.value[...], out_dtype=jnp.float32)

        return _padded_rows("TunixCritic", outputs, input_tokens, cache, attention_mask), None


def _padded_rows(
    name: str, outputs: Callable[[Array, Array], Array], input_tokens: Array, cache: Any, attention_mask: Array | None
) -> Array:
    """Applies a function of left-aligned rows and their lengths to Tunix' rows."""
    if cache is not None or attention_mask is None:
        unsupported = "a cache" if cache is not None else "packed sequences"
        raise NotImplementedError(f"{name}: {unsupported}; accepted: padded rows without a cache")
    is_token = jnp.diagonal(attention_mask, axis1=1, axis2=2)
    # The decoder expects rows without padding on the left: rotate the tokens there, and the outputs back.
    columns = jnp.arange(input_tokens.shape[1])[None]
    first = jnp.argmax(is_token, axis=1)[:, None]
    moved, back = ((columns + shift) % input_tokens.shape[1] for shift in (first, -first))
    tokens = jnp.take_along_axis(jnp.where(is_token, input_tokens, 0), moved, axis=1)
    rows = outputs(tokens, is_token.sum(axis=1, dtype=jnp.int32))
    return jnp.take_along_axis(rows, back[..., None], axis=1)


class TunixTokenizer:
    """A tokenizer with the methods that Tunix calls. Its padding id is outside of the vocabulary.

    Tunix treats the padding id as padding at any position, so no sampled token may have it.
    """

    def __init__(self, tokenizer: Tokenizer, decoder: Decoder) -> None:
        """Wraps a tokenizer for a decoder's vocabulary.

        Raises:
            ValueError: the decoder has no end-of-sequence token.
        """
        defaults = decoder.generation_defaults
        if defaults is None or not defaults.eos_token_ids:
            raise ValueError("TunixTokenizer: the model has no end-of-sequence token; accepted: a model with one")
        self._tokenizer, self._vocabulary, self._end = tokenizer, decoder.config.vocab_size, min(defaults.eos_token_ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        """Returns the ids of a text."""
        return list(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Returns the text of ids, ignoring padding."""
        return self._tokenizer.decode([int(token) for token in ids if token != self._vocabulary])

    def bos_id(self) -> int:
        """Returns the id that texts begin with: the end token, which separates texts."""
        return self._end

    def eos_id(self) -> int:
        """Returns the id that ends a text."""
        return self._end

    def pad_id(self) -> int:
        """Returns the padding id, the first id after the vocabulary."""
        return self._vocabulary


class TunixRollout(base_rollout.BaseRollout):
    """Rollouts by an engine, for `ClusterConfig(rollout_engine=TunixRollout)`, with a `TunixModel` as actor.

    Rollouts use the weights of the last synchronization, which follows each global step of a learner. A rollout's seed
    depends on the number of synchronizations, the prompt, and the prompt's previous occurrences since the last
    synchronization, but not on the order of calls or on `rollout_micro_batch_size`.

    Constructing one monkey-patches `tunix.rl.common.selective_log_softmax` with the engine's, in the whole process.
    """

    def __init__(
        self, rollout_actor: TunixModel, tokenizer: Any, mesh: Any, rollout_config: Any, *, seed: int = 0, **engine: Any
    ) -> None:
        """Starts an engine with the actor's weights. Tunix passes the positional arguments.

        Args:
            tokenizer: a `TunixTokenizer`, possibly wrapped by Tunix.
            mesh: ignored; the engine runs on the devices of the weights.
            rollout_config: the maximum lengths of prompts and completions.
            seed: the seed of all rollouts.
            engine: options of the engine; see `EngineConfig`.
        """
        del mesh
        self._actor, self._tokenizer, self._seed = rollout_actor, tokenizer, seed
        self._state: PyTree | None = None
        self._synchronizations, self._occurrences, self._lock = 0, Counter[tuple[int, ...]](), threading.Lock()
        length = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        self._engine = Engine(rollout_actor.decoder, **({"max_length": length} | engine))
        common.selective_log_softmax = selective_log_softmax

    def generate(self, prompts: list[str] | str, rollout_config: Any, **_: Any) -> base_rollout.RolloutOutput:
        """Returns a completion of each prompt. Thread-safe.

        Args:
            prompts: texts, or a single text from an agentic learner.
            rollout_config: the sampling parameters.

        Raises:
            ValueError: the temperature is not 1, filters are set, or a prompt is too long.
        """
        config = rollout_config
        if config.temperature != 1 or config.top_p not in (None, 1) or config.top_k not in (None, -1, 0):
            raise ValueError(
                f"TunixRollout: temperature {config.temperature}, top_p {config.top_p}, top_k {config.top_k}; "
                "accepted: temperature 1 and no filters, since Tunix trains on logprobs of the model's own distribution"
            )
        texts, tokens = [prompts] if isinstance(prompts, str) else prompts, config.max_tokens_to_generate
        ids = [self._tokenizer.encode(text) for text in texts]
        longest = max(map(len, ids))
        if longest + tokens > self._engine.max_length:
            raise ValueError(
                f"TunixRollout: a prompt has {longest} tokens; accepted: at most {self._engine.max_length - tokens}, "
                f"since the engine's max_length is {self._engine.max_length} and {tokens} tokens may follow"
            )
        self._synchronized()
        sampling = SamplingParams(tokens, 1.0, stop_token_ids=tuple(config.eos_tokens or (self.eos_id(),)))
        flat = [one for (one,) in rollouts(self._engine, ids, sampling, self._seeds(ids))]
        width = max(longest, config.max_prompt_length)
        padded = [[self.pad_id()] * (width - len(one)) + one for one in ids]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(one.completion.tolist()) for one in flat],
            logits=None,  # pyright: ignore[reportArgumentType]
            tokens=[one.completion for one in flat],
            left_padded_prompt_tokens=np.array(padded, np.int32),
            logprobs=[one.logprobs for one in flat],
        )

    def _seeds(self, prompts: list[list[int]]) -> list[int]:
        seeds = []
        with self._lock:
            for prompt in map(tuple, prompts):
                seeds.append(seed_of(self._seed, self._synchronizations, *prompt, self._occurrences[prompt]))
                self._occurrences[prompt] += 1
        return seeds

    def _synchronized(self) -> PyTree:
        """Returns the weights of rollouts: the actor's until Tunix updates them."""
        with self._lock:
            if self._state is None:
                # Tunix may have restored the actor from a checkpoint after constructing this rollout.
                self._synchronize(nnx.state(self._actor))
            return self._state

    def _synchronize(self, state: PyTree) -> None:
        # Updates change a module's variables in place, so hold on to their arrays only.
        state = jax.tree.map(lambda array: array, state)
        self._engine.update_weights(state["decoder"])
        self._state = state

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Returns the logprobs of completions `[B, C]` under the rollouts' weights, as Tunix' learners compute them."""
        graph, _ = nnx.split(self._actor)
        return common.compute_per_token_logps(
            graph, self._synchronized(), prompt_tokens, completion_tokens, pad_id=self.pad_id(), eos_id=self.eos_id()
        )

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Updates the engine's weights with all parameters of a `TunixModel`, without a copy.

        Frozen weights are not parameters, and stay the actor's.

        Raises:
            RuntimeError: rollouts are in flight.
        """
        del filter_types
        with self._lock:
            self._synchronize(nnx.merge_state(nnx.state(self._actor, FixedWeight), params))
            self._synchronizations += 1
            self._occurrences.clear()

    def pad_id(self) -> int:
        """Returns the padding id."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Returns the id that ends a text."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Returns None, since the engine holds the weights. Tunix then calls `update_params` after each update."""

    def close(self) -> None:
        """Closes the engine."""
        self._engine.close()


def selective_log_softmax(logits: Array, input_ids: Array) -> Array:
    """Returns the logprobs of ids for logits `[..., V]`, with the engine's bits; 0 for padding ids."""
    vocabulary = logits.shape[-1]
    ids = jnp.where(input_ids < vocabulary, input_ids, 0)
    logprobs = jnp.take_along_axis(ops.log_softmax(logits.astype(jnp.float32)), ids[..., None], axis=-1)[..., 0]
    return jnp.where(input_ids < vocabulary, logprobs, 0.0)
