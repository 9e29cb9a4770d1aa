"""A plain Flax model whose rows do not depend on the batch.

python examples/flax_model.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import detjax

BATCHES = (1, 2, 3, 8, 17)


class Classifier(nnx.Module):
    """A plain MLP with a norm."""

    def __init__(self, width: int, classes: int, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.norm = nnx.LayerNorm(4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(self.down(jax.nn.gelu(self.norm(self.up(x)))))


def main() -> None:
    """Counts the different results of the first row over batch sizes."""
    model = Classifier(256, 10, rngs=nnx.Rngs(0))
    rows = jax.random.normal(jax.random.key(1), (max(BATCHES), 256))
    invariant = detjax.batch_invariant(model)
    functions = {"stock": jax.jit(lambda x: model(x)), "batch_invariant": detjax.jit(lambda x: invariant(x))}
    for name, function in functions.items():
        firsts = {np.asarray(function(rows[:size]))[0].tobytes() for size in BATCHES}
        print(f"{name}: {len(firsts)} different results of one row in batches of {BATCHES}")
    try:
        jax.eval_shape(detjax.batch_invariant(lambda x: x - jnp.mean(x, axis=0)), rows)
    except detjax.UnsafeFunction as error:
        print("refused:", str(error).splitlines()[0])


if __name__ == "__main__":
    main()
