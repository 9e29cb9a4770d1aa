"""Layers of Flax, alone and stacked, and what keeps a state."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import Array, lax

from tests.invariant.idioms.registry import Function, accepted, refused

GROUP = "Layers and their state"
KEPT = "pass the state as an argument with rows, and return it"


def weights(*shape: int, seed: int = 0) -> Array:
    """Returns a weight."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[0]), jnp.float32)


def applied(module: nn.Module, *example: Array) -> Function:
    """Returns a Linen module's function of rows."""
    variables = module.init(jax.random.key(0), *example)
    return lambda *rows: module.apply(variables, *rows)


SEQUENCES = jnp.zeros((1, 6, 8))
IMAGES = jnp.zeros((1, 8, 8, 3))


@accepted(GROUP, "`nnx.Linear`, `nnx.Embed`, `nnx.LayerNorm`, `nnx.RMSNorm`", "", "tokens", has_gradient=False)
def nnx_layers() -> nnx.Module:
    rngs = nnx.Rngs(0)
    layers = nnx.Embed(16, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
    return nnx.Sequential(*layers, nnx.gelu, nnx.RMSNorm(8, rngs=rngs))


class _Residual(nn.Module):
    @nn.compact
    def __call__(self, x: Array, _: None) -> tuple[Array, None]:
        return x + nn.Dense(8)(nn.tanh(nn.LayerNorm()(x))), None


@accepted(GROUP, "Linen: `nn.scan` over layers, with `nn.remat`", "")
def linen_scan_and_remat() -> Function:
    scanned = nn.scan(nn.remat(_Residual), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    module = scanned()
    variables = module.init(jax.random.key(0), SEQUENCES, None)
    return lambda x: module.apply(variables, x, None)[0]


class _Stacked(nnx.Module):
    """Three layers whose weights have one more axis."""

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), 3)
        self.layers = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)))(keys)


@accepted(GROUP, "`nnx.scan` over layers", "")
def nnx_scan() -> nnx.Module:
    class Tower(_Stacked):
        def __call__(self, x: Array) -> Array:
            through = nnx.scan(lambda x, layer: x + jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return through(x, self.layers)

    return Tower()


@accepted(GROUP, "an ensemble: `nnx.vmap` over models", "")
def nnx_ensemble() -> nnx.Module:
    class Ensemble(_Stacked):
        def __call__(self, x: Array) -> Array:
            results = nnx.vmap(lambda model, x: jnp.tanh(model(x)), in_axes=(0, None))(self.layers, x)
            return jnp.mean(results, axis=0)

    return Ensemble()


@accepted(GROUP, "`nnx.MultiHeadAttention` without a cache, with a causal mask", "")
def nnx_attention() -> Function:
    layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    return lambda x: layer(x, mask=nnx.make_causal_mask(x[..., 0]))


@accepted(GROUP, "`jax.nn.dot_product_attention`", "")
def dot_product_attention() -> Function:
    w = weights(8, 24)

    def attention(x: Array) -> Array:
        q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], 2, 12), 3, axis=-1)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    return attention


@accepted(GROUP, "a mask by each row's length", "pass lengths as an argument with rows", "sequences with lengths")
def lengths_and_mask() -> Function:
    w = weights(8, 8)

    def fn(x: Array, length: Array) -> Array:
        scores = jnp.einsum("btd,bsd->bts", x @ w, x)
        is_read = jnp.arange(x.shape[1]) < length[:, None, None]
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.where(is_read, scores, -1e30)), x)

    return fn


@accepted(GROUP, "a KV cache that is an argument with rows, and a result", "", "caches")
def kv_cache() -> Function:
    w = weights(8, 8)

    def step(x: Array, cache: Array, length: Array) -> tuple[Array, Array]:
        cache = jax.vmap(lambda one, x, at: lax.dynamic_update_slice(one, x, (at, 0)))(cache, x @ w, length)
        is_read = jnp.arange(cache.shape[1]) <= length[:, None, None]
        scores = jnp.where(is_read, jnp.einsum("btd,bsd->bts", x, cache), -jnp.inf)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), cache), cache

    return step


@refused(
    GROUP, "a KV cache that a module writes (`decode=True`)", KEPT, "a call writes into MultiHeadAttention", "steps"
)
def kv_cache_of_a_module() -> nnx.Module:
    layer = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache((3, 6, 8))
    return layer


@accepted(GROUP, "`nnx.BatchNorm` in evaluation", "its running averages act as weights")
def batch_norm_in_evaluation() -> nnx.Module:
    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    norm.eval()
    return norm


@refused(
    GROUP,
    "`nnx.BatchNorm` in training",
    "it averages over the batch: call `module.eval()`, or use a norm of the row",
    "a call writes into BatchNorm",
)
def batch_norm_in_training() -> nnx.Module:
    return nnx.BatchNorm(8, rngs=nnx.Rngs(0))


@refused(
    GROUP,
    "Linen's `BatchNorm` in training",
    "its statistics cover the batch: use `use_running_average=True`",
    "reduces over the batch",
)
def linen_batch_norm_in_training() -> Function:
    module = nn.BatchNorm(use_running_average=False)
    variables = module.init(jax.random.key(0), SEQUENCES)
    return lambda x: module.apply(variables, x, mutable=["batch_stats"])[0]


@accepted(GROUP, "`nnx.Dropout` in evaluation", "")
def dropout_in_evaluation() -> nnx.Module:
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    dropout.eval()
    return nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), dropout)


@refused(
    GROUP,
    "`nnx.Dropout` in training",
    "it counts its calls, and draws for the batch: draw with one key per row, as below",
    "a call writes into",
)
def dropout_in_training() -> nnx.Module:
    return nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))


@accepted(
    GROUP,
    "dropout with a key for each row (`jax.vmap` of `jax.random.bernoulli`)",
    "pass keys as an argument with rows",
    "sequences with keys",
)
def dropout_with_keys() -> Function:
    def fn(x: Array, keys: Array) -> Array:
        is_kept = jax.vmap(lambda key, x: jax.random.bernoulli(key, 0.5, x.shape))(keys, x)
        return jnp.where(is_kept, 2 * x, 0)

    return fn


@refused(
    GROUP,
    "dropout with one key for the batch",
    "a row's values would depend on its position: use one key per row",
    "depend on its position in the batch",
)
def dropout_with_one_key() -> Function:
    return lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0)


@accepted(GROUP, "Linen's `nn.RNN(nn.LSTMCell)`", "")
def linen_lstm() -> Function:
    return applied(nn.RNN(nn.LSTMCell(8)), SEQUENCES)


@accepted(GROUP, "`nnx.RNN`, with a first state of zeros or `initial_carry=`", "")
def nnx_rnn() -> nnx.Module:
    return nnx.RNN(nnx.GRUCell(8, 8, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))


@accepted(GROUP, "S5: a diagonal recurrence of complex numbers, `lax.associative_scan`", "")
def s5() -> Function:
    eigenvalues = jnp.exp(lax.complex(-jnp.linspace(0.1, 1.0, 8), jnp.linspace(0.0, 3.0, 8)))
    w_in, w_out = (lax.complex(weights(8, 8, seed=n), weights(8, 8, seed=n + 1)) for n in (0, 2))

    def fn(x: Array) -> Array:
        u = x.astype(jnp.complex64) @ w_in
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
        _, states = lax.associative_scan(combine, (jnp.broadcast_to(eigenvalues, u.shape), u), axis=1)
        return jnp.real(states @ w_out)

    return fn


@accepted(GROUP, "FNet: Fourier transforms over positions and features", "")
def fnet() -> Function:
    return lambda x: x + jnp.real(jnp.fft.fft(jnp.fft.fft(x, axis=-1), axis=-2))


@accepted(
    GROUP,
    "a deep equilibrium: a `while_loop` to a fixed point under `lax.map` over rows, with a custom gradient",
    "each row has its own trip count",
)
def deep_equilibrium() -> Function:
    w = weights(8, 8) / 3

    def solve(f: Function, z: Array) -> Array:
        goes_on = lambda state: (state[0] < 20) & (jnp.max(jnp.abs(state[1] - state[2])) > 1e-4)  # noqa: E731
        return lax.while_loop(goes_on, lambda s: (s[0] + 1, s[2], f(s[2])), (0, z, f(z)))[2]

    @jax.custom_vjp
    def fixed(w: Array, x: Array) -> Array:
        return solve(lambda z: jnp.tanh(z @ w + x), jnp.zeros_like(x))

    def backward(saved: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array]:
        w, x, z = saved
        _, pull = jax.vjp(lambda z: jnp.tanh(z @ w + x), z)
        u = solve(lambda u: g + pull(u)[0], g)
        return jax.vjp(lambda w, x: jnp.tanh(z @ w + x), w, x)[1](u)

    fixed.defvjp(lambda w, x: (z := fixed(w, x), (w, x, z)), backward)
    return lambda x: lax.map(lambda x: fixed(w, x), x)


@accepted(
    GROUP,
    "a `while_loop` under `jax.vmap` over rows",
    "each row has its own trip count; JAX has no reverse-mode gradient of it",
    has_gradient=False,
)
def while_loop_under_vmap() -> Function:
    return jax.vmap(lambda x: lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 0.5, lambda x: x / 2, x))
