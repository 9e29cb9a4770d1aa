"""Idioms of functions of arrays: products, routing, linear algebra, sorting, dtypes."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from tests.invariant.idioms.layers import weights
from tests.invariant.idioms.registry import Function, accepted, refused

ROUTING = "Experts and graphs"
ALGEBRA = "Linear algebra"
ORDER = "Sums, sorting and windows over a row"
DTYPES = "Dtypes"


@accepted(ROUTING, "experts by one-hot products", "")
def experts_by_one_hot() -> Function:
    gates, up = weights(8, 4), weights(8, 4, 8)

    def fn(x: Array) -> Array:
        scores = jax.nn.softmax(x @ gates)
        chosen = jax.nn.one_hot(jnp.argmax(scores, -1), 4)
        return jnp.einsum("bte,btef->btf", scores * chosen, jnp.einsum("btd,def->btef", x, up))

    return fn


@accepted(
    ROUTING,
    "experts by sorting the batch's tokens (`argsort`, `lax.ragged_dot`, and back)",
    "each row's tokens are sorted separately",
)
def experts_by_sorting() -> Function:
    gates, up = weights(8, 4), weights(4, 8, 8)

    def fn(x: Array) -> Array:
        tokens = x.reshape(-1, 8)
        expert = jnp.argmax(tokens @ gates, axis=-1)
        order = jnp.argsort(expert)
        y = lax.ragged_dot(tokens[order], up, jnp.bincount(expert, length=4))
        return jnp.zeros_like(y).at[order].set(y, unique_indices=True).reshape(x.shape)

    return fn


@refused(
    ROUTING,
    "experts with a capacity for the batch",
    "other rows would cause tokens to be dropped: count with `cumsum` over each row",
    "accumulates over the batch",
)
def experts_with_a_capacity() -> Function:
    gates, up = weights(8, 4), weights(8, 4, 8)

    def fn(x: Array) -> Array:
        chosen = jax.nn.one_hot(jnp.argmax(x @ gates, -1), 4).reshape(-1, 4)
        fits = (jnp.cumsum(chosen, axis=0) <= 5) * chosen
        return jnp.einsum("bte,btd,def->btf", fits.reshape(*x.shape[:2], 4), x, up)

    return fn


@accepted(ROUTING, "`einsum` of four arrays", "")
def einsum_of_four() -> Function:
    a, b = weights(8, 4), weights(4, 8)
    return lambda x: jnp.einsum("btd,de,ef,bsf->bts", x, a, b, x)


@accepted(ROUTING, "`jax.ops.segment_sum` within a row", "")
def segment_sums() -> Function:
    segments = jnp.asarray([0, 0, 1, 2, 2, 2])
    return jax.vmap(lambda x: jax.ops.segment_sum(x, segments, num_segments=3))


@accepted(ROUTING, "graphs: messages along edges, one graph for each row", "")
def graphs() -> Function:
    senders, receivers, w = jnp.asarray([0, 1, 2, 3, 4, 5, 0]), jnp.asarray([1, 2, 3, 4, 5, 0, 3]), weights(8, 8)

    def layer(x: Array) -> Array:
        messages = jnp.tanh(x[:, senders] @ w)
        return x + jnp.zeros_like(x).at[:, receivers].add(messages)

    return lambda x: layer(layer(x))


def _positive(x: Array) -> Array:
    return x @ x.swapaxes(-1, -2) + 2 * jnp.eye(3)


@accepted(ALGEBRA, "`jnp.linalg.solve`", "", "matrices")
def solve() -> Function:
    return lambda x: jnp.linalg.solve(_positive(x), x)


@accepted(ALGEBRA, "`jnp.linalg.cholesky`", "", "matrices")
def cholesky() -> Function:
    return lambda x: jnp.linalg.cholesky(_positive(x))


@accepted(ALGEBRA, "`jnp.linalg.eigh`", "", "matrices")
def eigh() -> Function:
    return lambda x: jnp.linalg.eigh(_positive(x))[0]


@accepted(ALGEBRA, "`jnp.linalg.svd`", "", "matrices")
def svd() -> Function:
    return lambda x: jnp.linalg.svd(x, compute_uv=False)


@accepted(ALGEBRA, "`jnp.linalg.qr`", "", "matrices")
def qr() -> Function:
    return lambda x: jnp.linalg.qr(_positive(x))[1]


@accepted(ALGEBRA, "`jnp.linalg.inv`, `jnp.linalg.det`", "", "matrices")
def inverse_and_determinant() -> Function:
    return lambda x: jnp.linalg.inv(_positive(x)) * jnp.linalg.det(_positive(x))[:, None, None]


@accepted(ALGEBRA, "`jax.scipy.linalg.expm`", "", "matrices", has_gradient=False)
def expm() -> Function:
    return lambda x: jax.vmap(jax.scipy.linalg.expm)(x / 4)


@accepted(ORDER, "`jnp.cumsum`, `jnp.cumprod`", "")
def cumulative() -> Function:
    return lambda x: jnp.cumsum(x, axis=1) + jnp.cumprod(x, axis=-1)


@accepted(ORDER, "`jnp.sort`, `jnp.argsort`", "")
def sort() -> Function:
    return lambda x: jnp.sort(x, axis=1) + jnp.take_along_axis(x, jnp.argsort(x, axis=-1), axis=-1)


@accepted(ORDER, "`lax.top_k`", "")
def top_k() -> Function:
    return lambda x: lax.top_k(x, 3)[0]


@accepted(ORDER, "`jnp.quantile`, `jnp.median`", "")
def quantile() -> Function:
    return lambda x: jnp.quantile(x, 0.3, axis=1) + jnp.median(x, axis=1)


@accepted(ORDER, "`jnp.var`, `jnp.linalg.norm`, `jax.nn.logsumexp`", "")
def statistics() -> Function:
    return lambda x: jnp.stack([jnp.var(x, axis=1), jnp.linalg.norm(x, axis=1), jax.nn.logsumexp(x, axis=1)], axis=-1)


@accepted(ORDER, "`jax.vmap` and `jnp.vectorize` of a function of one row", "")
def vmap() -> Function:
    w = weights(8, 8)
    return jax.vmap(lambda x: jnp.vectorize(jnp.tanh)(x @ w) / (1 + jnp.linalg.norm(x)))


def _perceptron(dtype: str) -> Function:
    w, v = weights(8, 16).astype(dtype), weights(16, 8).astype(dtype)
    return lambda x: jnp.tanh(x.astype(dtype) @ w) @ v


@accepted(DTYPES, "bfloat16", "")
def bfloat16() -> Function:
    return _perceptron("bfloat16")


@accepted(DTYPES, "float16", "")
def float16() -> Function:
    return _perceptron("float16")


@accepted(DTYPES, "float64 (`jax_enable_x64`)", "", "doubles", has_float64=True)
def float64() -> Function:
    return _perceptron("float64")


@accepted(DTYPES, "int8 products", "", "small integers", has_gradient=False)
def int8_products() -> Function:
    w = jnp.asarray(weights(8, 8) * 100, jnp.int8)
    return lambda x: lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)


@accepted(DTYPES, "an int8 scale for each row", "", "vectors", has_gradient=False)
def scale_of_each_row() -> Function:
    return lambda x: jnp.round(x / jnp.max(jnp.abs(x), axis=-1, keepdims=True) * 127).astype(jnp.int8)


@accepted(DTYPES, "an MLP of complex numbers", "")
def complex_perceptron() -> Function:
    w, v = (lax.complex(weights(8, 8, seed=n), weights(8, 8, seed=n + 1)) for n in (0, 2))

    def fn(x: Array) -> Array:
        z = lax.complex(x, x[:, ::-1]) @ w
        z = z * jax.nn.sigmoid(jnp.abs(z)) @ v
        return jnp.real(z) + jnp.imag(z)

    return fn
