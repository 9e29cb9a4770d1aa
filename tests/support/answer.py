"""A program that prints the fingerprint of its process and the bits of an answer: `python -m tests.support.answer`.

It reads JSON from standard input: a list of dictionaries of JAX options. For each it sets the options, compiles all
programs again, computes the answer, and prints a line of JSON.
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Answer:
    """A process's description of itself, and its answer.

    Attributes:
        digest: the fingerprint's digest; None if the environment was refused.
        bits: a digest of the answer's bits; None if there was no answer.
        error: why there was no answer.
    """

    digest: str | None
    bits: str | None
    error: str | None = None


def answers(
    changes: Sequence[Mapping[str, Any]] = ({},), environment: Mapping[str, str | None] | None = None
) -> list[Answer]:
    """Returns what a new process answers, for each set of JAX options.

    Args:
        changes: values of JAX options by name.
        environment: variables that differ from this process's; None: the variable is not set. The compiler's full
            optimization is on unless a variable says otherwise.
    """
    variables: dict[str, str | None] = {**os.environ, "XLA_FLAGS": None, "PYTHONPATH": str(ROOT)} | dict(
        environment or {}
    )
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.answer"],
        input=json.dumps(list(changes)),
        env={name: value for name, value in variables.items() if value is not None},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return [Answer(**json.loads(line)) for line in process.stdout.splitlines() if line.startswith("{")]


def digest_after_flags_were_removed(flags: str) -> str:
    """Returns the fingerprint's digest in a new process that removes its XLA_FLAGS once XLA has read them."""
    remove = "import os, jax; jax.devices(); os.environ.pop('XLA_FLAGS', None)"
    code = f"{remove}; import detjax; print(detjax.fingerprint().digest)"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Answers under each set of options."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import Array

    import detjax
    from detjax import ops
    from detjax.models.network import split
    from tests.support.one_layer import one_layer

    drawn, tokenizer = one_layer(ROOT / "tests" / "fixtures" / "qwen3", seed=1)
    # Float32 hides no bit, and numpy's weights are the same under every option of JAX.
    numbers = np.random.default_rng(1)
    network, weights = split(drawn)
    model = network.with_weights(
        tuple(jnp.asarray((numbers.standard_normal(x.shape) * x.shape[-1] ** -0.5).astype(np.float32)) for x in weights)
    )
    tokens = jnp.asarray([tokenizer.encode("KING RICHARD III: my kingdom for a horse")])
    keys = jnp.asarray([ops.noise_key(5, ops.prompt_digest(tokens[0].tolist()))], jnp.uint32)

    @detjax.jit
    def answer(tokens: Array) -> tuple[Array, Array, Array]:
        """Logprobs of every position, with the random numbers of the last one and the token that they choose."""
        logprobs = ops.log_softmax(model(tokens)[0])
        ids = jnp.arange(logprobs.shape[1], dtype=jnp.int32)
        noise = ops.sampling_noise(keys, jnp.asarray(tokens.shape[1:], jnp.int32), ids)[0]
        chosen = jnp.argmax(logprobs[-1] / jnp.float32(0.7) + noise)
        return logprobs, noise, chosen.astype(jnp.int32)

    for options in json.load(sys.stdin):
        before = {name: jax.config.values[name] for name in options}
        digest = bits = error = None
        try:
            for name, value in options.items():
                jax.config.update(name, value)
            jax.clear_caches()
            digest = detjax.fingerprint().digest
            bits = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in answer(tokens))).hexdigest()[:16]
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
        print(json.dumps({"digest": digest, "bits": bits, "error": error}), flush=True)


if __name__ == "__main__":
    main()
