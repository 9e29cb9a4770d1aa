"""An adapter to Tunix: detjax's decoder as the model of its learners, and detjax's engine as its rollout.

With both, the logprobs that Tunix trains on are the ones that the engine sampled by, bit for bit. That holds at
temperature 1 without filters, in the learners' padded mode, and has been seen on CPUs. It does not make gradients
independent of `train_micro_batch_size`: Tunix averages microbatches in an order of its own.

It needs `google-tunix` 0.1.7, in an environment whose jax is detjax's, and meshes whose axes are of the type `Auto`.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int32
from tunix.rl import common  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

from detjax import ops
from detjax.engine import Engine, SamplingParams
from detjax.models import Decoder, Tokenizer
from detjax.rl.rollouts import prompt_seeds, rollouts, seed_of


class TunixModel(nnx.Module):
    """A decoder with the signature that Tunix' learners call."""

    def __init__(self, decoder: Decoder) -> None:
        """A wrapper whose parameters are the decoder's.

        Args:
            decoder: the decoder, which is not copied.
        """
        self.decoder = decoder

    def __call__(
        self,
        input_tokens: Int32[Array, "B L"],
        positions: Int32[Array, "B L"] | None = None,
        cache: Any = None,
        attention_mask: Bool[Array, "B L L"] | None = None,
        segment_ids: Int32[Array, "B L"] | None = None,
    ) -> tuple[Float32[Array, "B L V"], None]:
        """Returns the logits of rows with padding on the left and on the right, and no cache.

        Args:
            input_tokens: ids; those of padding may lie outside of the vocabulary.
            positions: not used, as they follow from the padding.
            cache: None.
            attention_mask: Tunix' causal mask, whose diagonal says which columns are tokens.
            segment_ids: not used.

        Raises:
            NotImplementedError: there is a cache, or sequences are packed, which Tunix says by a missing mask.
        """
        del positions, segment_ids
        if cache is not None or attention_mask is None:
            given = "a cache" if cache is not None else "packed sequences"
            raise NotImplementedError(f"TunixModel: {given}; accepted: padded rows without a cache")
        is_token = jnp.diagonal(attention_mask, axis1=1, axis2=2)
        # The decoder's rows begin with their first token. A row's tokens are moved there, and its logits back.
        columns = jnp.arange(input_tokens.shape[1])[None]
        first = jnp.argmax(is_token, axis=1)[:, None]
        moved, back = ((columns + shift) % input_tokens.shape[1] for shift in (first, -first))
        tokens = jnp.take_along_axis(jnp.where(is_token, input_tokens, 0), moved, axis=1)
        counts: Any = is_token.sum(axis=1, dtype=jnp.int32)
        logits: Any = self.decoder(tokens, None, counts)  # pyright: ignore
        return jnp.take_along_axis(logits, back[..., None], axis=1), None


class TunixTokenizer:
    """A tokenizer as Tunix calls it, with an id for padding that no token has.

    Tunix takes every id that equals the one of padding for padding, wherever it is. So no sampled token may have it.
    """

    def __init__(self, tokenizer: Tokenizer, decoder: Decoder) -> None:
        """A tokenizer for a decoder's vocabulary.

        Args:
            tokenizer: the model's tokenizer.
            decoder: the decoder.

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
        """Returns the text of ids, of which those of padding are left out."""
        return self._tokenizer.decode([int(token) for token in ids if token != self._vocabulary])

    def bos_id(self) -> int:
        """Returns the id that texts begin with: that of the end, which separates texts."""
        return self._end

    def eos_id(self) -> int:
        """Returns the id that ends a text."""
        return self._end

    def pad_id(self) -> int:
        """Returns the id of padding, the first one behind the vocabulary."""
        return self._vocabulary


class TunixRollout(base_rollout.BaseRollout):
    """Rollouts by an engine, for `ClusterConfig(rollout_engine=TunixRollout)`, with a `TunixModel` as actor.

    To construct one replaces the formula by which Tunix computes logprobs, `tunix.rl.common.selective_log_softmax`,
    by the engine's, in the whole process.
    """

    def __init__(
        self, rollout_actor: TunixModel, tokenizer: Any, mesh: Any, rollout_config: Any, *, seed: int = 0, **engine: Any
    ) -> None:
        """An engine with the actor's weights. Tunix gives all but the last arguments.

        Args:
            rollout_actor: the model.
            tokenizer: a `TunixTokenizer`, which Tunix may have wrapped.
            mesh: not used: the engine is where the weights are.
            rollout_config: says how long prompts and completions are.
            seed: the seed of all rollouts.
            engine: options of the engine; see `EngineConfig`.
        """
        del mesh
        self._actor, self._tokenizer, self._seed, self._calls = rollout_actor, tokenizer, seed, itertools.count()
        length = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        self._engine = Engine(rollout_actor.decoder, **({"max_length": length} | engine))
        common.selective_log_softmax = selective_log_softmax

    def generate(self, prompts: list[str], rollout_config: Any, **_: Any) -> base_rollout.RolloutOutput:
        """Returns a completion of each prompt, by the actor's weights as they are now.

        Raises:
            ValueError: the temperature is not 1, there are filters, or a prompt is too long.
        """
        config = rollout_config
        if config.temperature != 1 or config.top_p not in (None, 1) or config.top_k not in (None, -1, 0):
            raise ValueError(
                f"TunixRollout: temperature {config.temperature}, top_p {config.top_p}, top_k {config.top_k}; "
                "accepted: temperature 1 and no filters, since Tunix trains on logprobs of the model's own distribution"
            )
        # Where the trainer shares its weights, Tunix announces no update.
        self._engine.update_weights(nnx.state(self._actor.decoder))
        ids, longest = [self._tokenizer.encode(prompt) for prompt in prompts], config.max_prompt_length
        if max(map(len, ids)) > longest:
            raise ValueError(f"TunixRollout: a prompt has {max(map(len, ids))} tokens; accepted: {longest}")
        seeds = prompt_seeds(seed_of(self._seed, next(self._calls)), len(prompts))
        sampling = SamplingParams(
            config.max_tokens_to_generate, 1.0, stop_token_ids=tuple(config.eos_tokens or (self.eos_id(),))
        )
        flat = [one for (one,) in rollouts(self._engine, ids, sampling, seeds)]
        padded = [[self.pad_id()] * (longest - len(one)) + one for one in ids]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(one.completion.tolist()) for one in flat],
            logits=None,  # pyright: ignore[reportArgumentType]
            tokens=[one.completion for one in flat],
            left_padded_prompt_tokens=np.array(padded, np.int32),
            logprobs=[one.logprobs for one in flat],
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Returns the logprobs of completions `[B, C]`, as Tunix' learners compute them."""
        graph, state = nnx.split(self._actor)
        return common.compute_per_token_logps(
            graph, state, prompt_tokens, completion_tokens, pad_id=self.pad_id(), eos_id=self.eos_id()
        )

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Gives the actor other weights."""
        del filter_types
        nnx.update(self._actor, params)

    def pad_id(self) -> int:
        """Returns the id of padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Returns the id that ends a text."""
        return self._tokenizer.eos_id()

    def model(self) -> TunixModel:
        """Returns the actor."""
        return self._actor

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()


def selective_log_softmax(logits: Array, input_ids: Array) -> Array:
    """Returns the logprobs of ids given logits `[..., V]`, in the engine's bits; 0 where an id is that of padding."""
    vocabulary = logits.shape[-1]
    ids = jnp.where(input_ids < vocabulary, input_ids, 0)
    logprobs = jnp.take_along_axis(ops.log_softmax(logits.astype(jnp.float32)), ids[..., None], axis=-1)[..., 0]
    return jnp.where(input_ids < vocabulary, logprobs, 0.0)
