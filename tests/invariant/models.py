"""Small models written with Flax and JAX as others write them: no operation of detjax is in them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import Array, lax

WIDTH, VOCABULARY, LENGTH = 64, 96, 13


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A function of weights and of inputs with rows along axis 0.

    Attributes:
        fn: the function.
        weights: its first argument.
        inputs: gives its other arguments, by the number of rows and a seed.
    """

    fn: Callable[..., Array]
    weights: Any
    inputs: Callable[[int, int], tuple[Array, ...]]

    @property
    def axes(self) -> tuple[int | None, ...]:
        """The axes of the rows, for `batch_invariant`."""
        return (None, *[0] * len(self.inputs(1, 0)))

    def among(self, rows: int, position: int) -> tuple[Array, ...]:
        """Returns inputs whose row at this position is the row of `inputs(1, 0)`."""
        alone, others = self.inputs(1, 0), self.inputs(rows, 1 + rows)
        return tuple(y.at[position].set(x[0]) for x, y in zip(alone, others, strict=True))


def in_dtype(tree: Any, dtype: Any) -> Any:
    """Returns a tree with all its floating-point arrays in one dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


class Block(nnx.Module):
    """A layer of a transformer."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        kinds: Any = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.norm = nnx.LayerNorm(WIDTH, **kinds)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, **kinds)
        self.second_norm = nnx.RMSNorm(WIDTH, **kinds)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, **kinds)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, **kinds)

    def __call__(self, x: Array, mask: Array) -> Array:
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.second_norm(x))))


class Transformer(nnx.Module):
    """Logits of the next token."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.block = Block(dtype, rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        mask = nnx.make_causal_mask(jnp.ones(tokens.shape))
        return self.head(self.block(self.embed(tokens), mask))


class Network(nn.Module):
    """A convolution, a norm by running averages, and a dense layer."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kinds: Any = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = nn.Conv(16, (3, 3), **kinds)(x.astype(self.dtype))
        x = nn.relu(nn.BatchNorm(use_running_average=True, **kinds)(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(10, **kinds)(x.reshape(x.shape[0], -1))


def _tokens(rows: int, seed: int) -> tuple[Array]:
    return (jnp.asarray(np.random.default_rng(seed).integers(0, VOCABULARY, (rows, LENGTH)), jnp.int32),)


def _images(rows: int, seed: int) -> tuple[Array]:
    return (jnp.asarray(np.random.default_rng(seed).standard_normal((rows, 10, 10, 3)), jnp.float32),)


def _vectors(rows: int, seed: int) -> tuple[Array]:
    return (jnp.asarray(np.random.default_rng(seed).standard_normal((rows, LENGTH, WIDTH)), jnp.float32),)


def _weight(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * shape[-2] ** -0.5, jnp.float32)


def _scanned(weights: dict[str, Array], x: Array) -> Array:
    """Layers in a scan, checkpointed, with a recurrence over tokens in each."""

    @jax.checkpoint
    def layer(x: Array, weights: dict[str, Array]) -> tuple[Array, None]:
        def token(state: Array, x: Array) -> tuple[Array, Array]:
            state = state * jnp.asarray(0.5, x.dtype) + x
            return state, jnp.tanh(state)

        states = lax.scan(token, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))[1]
        h = jax.nn.silu(jnp.einsum("bti,io->bto", jnp.swapaxes(states, 0, 1), weights["in"]))
        return x + jnp.einsum("bto,oi->bti", h, weights["out"]), None

    x = lax.scan(layer, x.astype(weights["in"].dtype), weights)[0]
    return jax.nn.log_softmax(jnp.cumsum(x, axis=1))


def _mixture(weights: dict[str, Array], x: Array) -> Array:
    """Experts with the tokens of all rows sorted together."""
    x = x.astype(weights["router"].dtype)
    flat = x.reshape(-1, x.shape[-1])
    scores = jax.nn.softmax(flat @ weights["router"])
    expert = jnp.argmax(scores, axis=1)
    order = jnp.argsort(expert)
    made = lax.ragged_dot(flat[order], weights["experts"], jnp.bincount(expert, length=4).astype(jnp.int32))
    made = jnp.zeros_like(made).at[order].set(made, unique_indices=True) * jnp.max(scores, axis=1, keepdims=True)
    return x + made.reshape(x.shape)


def load(name: str, dtype: Any = jnp.float32) -> Case:
    """Returns the case of this name."""
    if name == "nnx transformer":
        return Case(lambda model, tokens: model(tokens), Transformer(dtype, nnx.Rngs(0)), _tokens)
    if name == "linen convolution":
        model = Network(dtype)
        return Case(model.apply, in_dtype(model.init(jax.random.key(0), *_images(1, 0)), dtype), _images)
    if name == "scanned layers":
        weights = {"in": _weight(1, 2, WIDTH, 2 * WIDTH), "out": _weight(2, 2, 2 * WIDTH, WIDTH)}
        return Case(_scanned, in_dtype(weights, dtype), _vectors)
    assert name == "mixture"
    weights = {"router": _weight(3, WIDTH, 4), "experts": _weight(4, 4, WIDTH, WIDTH)}
    return Case(_mixture, in_dtype(weights, dtype), _vectors)


NAMES = ("nnx transformer", "linen convolution", "scanned layers", "mixture")
