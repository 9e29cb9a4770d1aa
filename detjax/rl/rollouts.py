"""Rollouts: completions that an engine samples with the trainer's weights.

A rollout is a function of weights, prompt, seed and sampling parameters. It need not be saved, since it can be computed
again to the same bits.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float32, Int32

from detjax.audit.verification.transcripts import Transcript
from detjax.engine import Engine, Request, SamplingParams
from detjax.models import Decoder, adapter_of
from detjax.models.network import Network, Weights
from detjax.rl.trainer.microbatches import Sample
from detjax.rl.trainer.trained_weights import has_adapter

_POLICY: Final = "policy"
"""The name of the adapter that an engine samples with."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rollout:
    """A sampled completion of a prompt.

    Attributes:
        prompt: the prompt's tokens.
        completion: the sampled tokens, the end token included if the sample has one.
        text: the completion's text without the end token.
        logprobs: the logprob of each token of the completion under the model.
        sampling_logprobs: its logprob under the distribution that it was sampled from, after temperature and filters;
            empty unless the sampling parameters request it.
        sampling: the sampling parameters; None: unknown.
    """

    prompt: Int32[np.ndarray, "P"]
    completion: Int32[np.ndarray, "C"]
    text: str
    logprobs: Float32[np.ndarray, "C"]
    sampling_logprobs: Float32[np.ndarray, "S"]
    sampling: SamplingParams | None = None

    @classmethod
    def from_transcript(cls, transcript: Transcript) -> "Rollout":
        """Returns the rollout that a transcript holds, such as the receipt of a server's answer.

        `detjax.audit.transcripts_in` reads the transcripts of a response, `detjax.verify` compares them with a model.

        Raises:
            ValueError: the transcript has no logprobs, its digest is of another content, or the response that held it
                contradicts it.
        """
        problem = transcript.contradiction
        if problem is None and transcript.digest not in (None, transcript.computed_digest()):
            problem = "its digest is of another content"
        if transcript.logprobs is None:
            problem = "it has no logprobs"
        if problem is not None:
            raise ValueError(f"Rollout: the transcript cannot be used: {problem}; accepted: an unaltered receipt")
        return cls(
            np.asarray(transcript.prompt, np.int32),
            np.asarray(transcript.tokens, np.int32),
            transcript.text or "",
            np.asarray(transcript.logprobs, np.float32),
            np.asarray(transcript.sampling_logprobs or (), np.float32),
            transcript.sampling,
        )

    @property
    def tokens(self) -> Int32[np.ndarray, "T"]:
        """The prompt's tokens and the completion's."""
        return np.concatenate([self.prompt, self.completion])

    def sample(self, weights: Float32[np.ndarray, "C"], old_logprobs: Float32[np.ndarray, "C"] | None = None) -> Sample:
        """Returns the rollout as a sample of a training step. Trainers refuse samples of another distribution.

        Args:
            weights: see `Sample`.
            old_logprobs: the logprobs that the loss compares with. Default: the sampling logprobs, if any.
        """
        if old_logprobs is None and len(self.sampling_logprobs):
            old_logprobs = self.sampling_logprobs
        return Sample(self.tokens, weights, old_logprobs, sampling=self.sampling)


def rollouts(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    sampling: SamplingParams,
    seeds: Sequence[int],
    *,
    adapter: str | None = None,
) -> list[list[Rollout]]:
    """Returns `sampling.n` rollouts of each prompt.

    Args:
        engine: an engine with the policy's weights; see `Engine.update_weights`.
        prompts: texts or tokens.
        sampling: the sampling parameters. Their seed is ignored.
        seeds: a seed for each prompt; see `prompt_seeds`.
        adapter: the name of an adapter of the engine that is the policy; None: its model is.
    """
    pairs = zip(prompts, seeds, strict=True)
    requests = [Request(prompt, dataclasses.replace(sampling, seed=seed), adapter=adapter) for prompt, seed in pairs]
    return [
        [
            Rollout(
                np.asarray(generation.prompt_tokens, np.int32),
                np.asarray(completion.tokens, np.int32),
                completion.text or "",
                np.asarray(completion.logprobs, np.float32),
                np.asarray(completion.sampling_logprobs, np.float32),
                sampling,
            )
            for completion in generation.completions
        ]
        for generation in engine.generate(requests)
    ]


def give_policy(engine: Engine, network: Network[Decoder], weights: Weights) -> str | None:
    """Gives an engine a policy's weights, and returns the name of the adapter to sample with, if the policy has one.

    Then the engine has the base model's weights, and gets the adapter alone, in slots that other adapters may share.
    """
    if not has_adapter(weights):
        engine.update_weights(network.state(weights))
        return None
    engine.load_adapter(_POLICY, adapter_of(network.with_weights(weights)), replaces=True)
    return _POLICY


def prompt_seeds(seed: int, prompts: int) -> list[int]:
    """Returns a seed for each of `prompts` prompts that are sampled together. Prompts may be equal."""
    return [seed_of(seed, index) for index in range(prompts)]


def seed_of(run_seed: int, *place: int) -> int:
    """Returns the seed of a place in a run, such as a step: a 64-bit hash."""
    digest = hashlib.sha256("/".join(map(str, (run_seed, *place))).encode()).digest()
    return int.from_bytes(digest[:8], "little")
