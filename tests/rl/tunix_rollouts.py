"""A script for Tunix' environment, which prints what `TunixRollout` gives for the same prompts in several ways.

Each line has a name and a digest of tokens and logprobs, or of the trainer's logprobs.
"""

import concurrent.futures
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl import common  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout.base_rollout import RolloutConfig  # pyright: ignore[reportMissingImports]

from detjax import models
from detjax.rl.runs.policy import CHECKPOINT
from detjax.rl.tunix import TunixModel, TunixRollout, TunixTokenizer

PROMPTS = ["12+34=", "7*8=", "12+34=", "31,2:", "7*8=", "12+34="]
CONFIG = RolloutConfig(max_tokens_to_generate=8, max_prompt_length=12, temperature=1.0)


def digest(*arrays: Any) -> str:
    """Returns a digest of arrays."""
    return hashlib.sha256(b"/".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()[:16]


def samples(calls: Sequence[tuple[Sequence[str], Any]]) -> str:
    """Returns a digest of the samples of each prompt, whose order does not count."""
    rows = [
        (prompt, digest(tokens, logprobs))
        for prompts, output in calls
        for prompt, tokens, logprobs in zip(prompts, output.tokens, output.logprobs, strict=True)
    ]
    return digest(np.frombuffer(repr(sorted(rows)).encode(), np.uint8))


def main() -> None:
    """Prints the digests."""
    decoder, tokenizer = models.load(CHECKPOINT, dtype="bfloat16", progress=False)
    assert tokenizer is not None
    model, wrapped = TunixModel(decoder), TunixTokenizer(tokenizer, decoder)
    outputs: list[Any] = []

    def new_rollout() -> TunixRollout:
        return TunixRollout(model, wrapped, None, CONFIG)

    def together(rollout: TunixRollout) -> str:
        outputs.append(rollout.generate(PROMPTS, CONFIG))
        return samples([(PROMPTS, outputs[-1])])

    def in_threads(rollout: TunixRollout) -> str:
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
            single = list(pool.map(lambda prompt: rollout.generate(prompt, CONFIG), reversed(PROMPTS)))
        return samples([([prompt], output) for prompt, output in zip(reversed(PROMPTS), single, strict=True)])

    def after_synchronization(rollout: TunixRollout) -> str:
        rollout.update_params(nnx.state(model, nnx.Param), (nnx.Param,))
        return together(rollout)

    ways: dict[str, Callable[[TunixRollout], str]] = {
        "together": together,
        "in_threads": in_threads,
        "after_synchronization": after_synchronization,
    }
    for name, way in ways.items():
        rollout = new_rollout()
        print(name, way(rollout))
        rollout.close()
    if "chunk_size" in inspect.signature(common.compute_per_token_logps).parameters:
        graph, state = nnx.split(model)
        completions = np.full((len(PROMPTS), 8), wrapped.pad_id(), np.int32)
        for row, tokens in zip(completions, outputs[0].tokens, strict=True):
            row[: len(tokens)] = tokens
        rows = jnp.asarray(outputs[0].left_padded_prompt_tokens), jnp.asarray(completions)
        for chunk in (0, 3):
            logprobs = common.compute_per_token_logps(
                graph, state, *rows, wrapped.pad_id(), wrapped.eos_id(), chunk_size=chunk
            )
            print(f"chunks_of_{chunk}", digest(jax.device_get(logprobs)))


if __name__ == "__main__":
    main()
