"""Functions of a weight `[24, 24]` and of rows `[B, 5, 24]` with loops, branches and derivatives of their own."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

W = jnp.asarray(np.random.default_rng(1).standard_normal((24, 24)) / 5, jnp.float32)


def inputs(rows: int) -> Array:
    """Returns `rows` rows; fewer rows are a prefix of more."""
    return jnp.asarray(np.random.default_rng(2).standard_normal((rows, 5, 24)), jnp.float32)


def own_trips(w: Array, x: Array) -> Array:
    """Each row has its own number of trips, and a product with a weight in each trip."""

    def row(x: Array) -> Array:
        goes_on = lambda state: (state[0] < 9) & (jnp.max(jnp.abs(state[1])) > 0.5)  # noqa: E731
        return lax.while_loop(goes_on, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w) * jnp.float32(0.8)), (0, x))[1]

    return jnp.stack([row(x[k]) for k in range(x.shape[0])])


def shared_trips(w: Array, x: Array) -> Array:
    body = lambda state: (state[0] + 1, jnp.tanh(state[1] @ w))  # noqa: E731
    return lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]


def backwards(w: Array, x: Array) -> Array:
    """A recurrence from the last position to the first, with a product with a weight in each step."""
    step = lambda state, x: ((y := jnp.tanh(state @ w + x)), y - state)  # noqa: E731
    state, seen = lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1), reverse=True)
    return jnp.swapaxes(seen, 0, 1) + state[:, None]


def layers_by_number(w: Array, x: Array) -> Array:
    """A loop that takes its weight by the loop's counter, which no row may change."""
    stack = jnp.stack([w, w * 2])
    return lax.fori_loop(0, 2, lambda k, x: jnp.tanh(x @ lax.dynamic_index_in_dim(stack, k, keepdims=False)), x)


def shared_branch(w: Array, x: Array) -> Array:
    return lax.cond(w[0, 0] > 0, lambda x: x @ w, lambda x: x - jnp.float32(1), x)


def own_branch(w: Array, x: Array) -> Array:
    rows = [lax.cond(x[k, 0, 0] > 0, lambda y: y @ w, lambda y: jnp.sin(y), x[k]) for k in range(x.shape[0])]
    return jnp.stack(rows)


@jax.custom_vjp
def straight_through(x: Array) -> Array:
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g * 3,))


def own_gradient(w: Array, x: Array) -> Array:
    return straight_through(x @ w)


@jax.custom_vjp
def product_and_gradient(x: Array, w: Array) -> Array:
    return jnp.exp(x @ w)


product_and_gradient.defvjp(
    lambda x, w: ((y := jnp.exp(x @ w)), (x, w, y)),
    lambda saved, g: ((g * saved[2]) @ saved[1].T, jnp.einsum("...ti,...to->io", saved[0], g * saved[2])),
)


def own_gradient_of_a_product(w: Array, x: Array) -> Array:
    return product_and_gradient(x, w)


def transposed(w: Array, x: Array) -> Array:
    """Weights on the left, with several contracted axes, and with paired ones."""
    heads = w.reshape(24, 6, 4)
    y = jnp.einsum("io,bti->obt", w, x)
    z = jnp.einsum("obt,ohk->bthk", y, heads)
    z = jnp.einsum("bthk,hkj->bthj", z, w.reshape(6, 4, 24))
    return jnp.einsum("bthj,jhk->btk", z, heads)


def transposed_weights(w: Array, x: Array) -> Array:
    """Products with transposed weights; the second one's outputs would be in another order."""
    heads = w.reshape(24, 6, 4)
    y = jnp.tanh(x @ w.T)
    z = lax.dot_general(y, heads.transpose(0, 2, 1), (((2,), (0,)), ((), ())))
    return jnp.einsum("btkh,hok->bto", z, heads.transpose(1, 0, 2))


def attention(w: Array, x: Array) -> Array:
    scores = jax.nn.softmax(jnp.einsum("bti,bsi->bts", x @ w, x) / 5)
    return jnp.einsum("bts,bsi->bti", scores, x)


def moves(w: Array, x: Array) -> Array:
    top, places = lax.top_k(x @ w, 6)
    taken = jnp.take_along_axis(x, places, axis=2)
    return jnp.concatenate([jnp.sort(taken), top, jnp.flip(jnp.cumsum(top, axis=1), 1)], axis=2)


ALL: tuple[Callable[[Array, Array], Array], ...] = (
    own_trips,
    shared_trips,
    backwards,
    layers_by_number,
    shared_branch,
    own_branch,
    own_gradient,
    own_gradient_of_a_product,
    transposed,
    transposed_weights,
    attention,
    moves,
)
DIFFERENTIABLE = [fn for fn in ALL if fn not in (own_trips, shared_trips)]
