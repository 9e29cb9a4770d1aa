"""A training step of a good JAX program without contracts: the rival of `measures`.

Products of bfloat16 numbers with float32 sums, also for gradients; cuDNN's attention and its backward pass; XLA's
fusions with XLA's own options for the rest. Gradients of microbatches are added in float32.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array

from detjax.models.configuration.config import DecoderConfig

type Params = dict[str, Any]

LEARNING_RATE: Final = 1e-5
MAX_NORM: Final = 1.0


def parameters(config: DecoderConfig) -> Params:
    """Returns random bfloat16 weights of a model's shape."""
    width, inner, layers = config.hidden_size, config.intermediate_size, config.layers
    q, kv, head = config.heads, config.kv_heads, config.head_dim
    keys = iter(jax.random.split(jax.random.key(0), 8 * layers + 3))

    def drawn(*shape: int) -> Array:
        return (jax.random.normal(next(keys), shape, jnp.float32) * shape[0] ** -0.5).astype(jnp.bfloat16)

    def ones(size: int) -> Array:
        return jnp.ones(size, jnp.bfloat16)

    def layer() -> Params:
        return {
            "attention_norm": ones(width),
            "qkv": drawn(width, (q + 2 * kv) * head),
            "q_norm": ones(head),
            "k_norm": ones(head),
            "out": drawn(q * head, width),
            "mlp_norm": ones(width),
            "gate_up": drawn(width, 2 * inner),
            "down": drawn(inner, width),
        }

    stack = [layer() for _ in range(layers)]
    params = {"embedding": drawn(config.vocab_size, width), "layers": stack, "norm": ones(width)}
    return params if config.tied_embeddings else params | {"head": drawn(config.vocab_size, width)}


def norm(x: Array, weight: Array, eps: float) -> Array:
    """Computes RMS norm."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * jnp.broadcast_to(weight.astype(jnp.float32), x.shape)).astype(x.dtype)


def product(x: Array, w: Array) -> Array:
    """Computes a matrix product."""
    return jnp.dot(x, w)


def rope(x: Array, frequencies: Array) -> Array:
    """Applies rotary embedding to heads `[B, T, H, K]`."""
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[None, :, None, None] * frequencies[None, None, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attention(q: Array, k: Array, v: Array) -> Array:
    """Computes causal attention, by cuDNN on a GPU."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def gated(gate_up: Array) -> Array:
    """Computes SwiGLU of both projections."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def qkv_heads(qkv: Array, q_norm: Array, k_norm: Array, config: DecoderConfig) -> tuple[Array, Array, Array]:
    """Returns queries and keys, normalized and rotated, and values."""
    heads = qkv.reshape(*qkv.shape[:2], -1, config.head_dim)
    q, k, v = jnp.split(heads, [config.heads, config.heads + config.kv_heads], axis=2)
    frequencies, eps = jnp.asarray(config.rope.inverse_frequencies, jnp.float32), config.norm_eps
    return rope(norm(q, q_norm, eps), frequencies), rope(norm(k, k_norm, eps), frequencies), v


@jax.custom_vjp
def logits(x: Array, head: Array) -> Array:
    """Computes float32 logits, whose gradients are rounded to bfloat16 for products, like all others."""
    return jnp.dot(x, head.T, preferred_element_type=jnp.float32)


def _logits_forward(x: Array, head: Array) -> tuple[Array, tuple[Array, Array]]:
    return logits(x, head), (x, head)


def _logits_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, head = saved
    gradient = gradient.astype(x.dtype)
    return jnp.dot(gradient, head), jnp.dot(gradient.T, x)


logits.defvjp(_logits_forward, _logits_backward)


def token_logprobs(x: Array, head: Array, targets: Array, chunk: int | None) -> Array:
    """Returns logprobs of targets for hidden states `[N, D]`, at once or in chunks that gradients recompute."""

    def logprobs(x: Array, targets: Array) -> Array:
        return jnp.take_along_axis(jax.nn.log_softmax(logits(x, head)), targets[:, None], axis=1)[:, 0]

    if chunk is None:
        return logprobs(x, targets)
    chunks = x.reshape(-1, chunk, x.shape[-1]), targets.reshape(-1, chunk)
    return lax.map(lambda pair: jax.checkpoint(logprobs)(*pair), chunks).reshape(-1)


def loss(
    params: Params, tokens: Array, targets: Array, weights: Array, config: DecoderConfig, chunk: int | None
) -> Array:
    """Returns the weighted sum of negative logprobs of targets after tokens `[B, T]`."""
    x, eps = params["embedding"][tokens], config.norm_eps
    for layer in params["layers"]:
        qkv = product(norm(x, layer["attention_norm"], eps), layer["qkv"])
        o = attention(*qkv_heads(qkv, layer["q_norm"], layer["k_norm"], config))
        x = x + product(o.reshape(*x.shape[:2], -1), layer["out"])
        x = x + product(gated(product(norm(x, layer["mlp_norm"], eps), layer["gate_up"])), layer["down"])
    x = norm(x, params["norm"], eps).reshape(-1, x.shape[-1])
    head = params.get("head", params["embedding"])
    return -jnp.sum(token_logprobs(x, head, targets.reshape(-1), chunk) * weights.reshape(-1))


class Training:
    """Masters, moments and weights, and the step that updates them."""

    def __init__(self, config: DecoderConfig, chunk: int | None) -> None:
        optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE))
        self.params = parameters(config)
        self.masters = jax.tree.map(lambda x: x.astype(jnp.float32), self.params)
        self.state = optimizer.init(self.masters)

        def add(sums: Params, params: Params, tokens: Array, targets: Array, weights: Array) -> Params:
            gradients = jax.grad(loss)(params, tokens, targets, weights, config, chunk)
            return jax.tree.map(lambda total, g: total + g.astype(jnp.float32), sums, gradients)

        def update(masters: Params, state: Any, gradients: Params) -> tuple[Params, Any, Params]:
            updates, state = optimizer.update(gradients, state, masters)
            masters = jax.tree.map(jnp.add, masters, updates)
            return masters, state, jax.tree.map(lambda x: x.astype(jnp.bfloat16), masters)

        self.add = jax.jit(add, donate_argnums=0)
        self.update = jax.jit(update, donate_argnums=(0, 1))
        self.zeros = jax.jit(lambda: jax.tree.map(jnp.zeros_like, self.masters))

    def step(self, microbatches: list[tuple[Array, ...]]) -> None:
        """Trains a step over microbatches of tokens, targets and weights."""
        sums = self.zeros()
        for microbatch in microbatches:
            sums = self.add(sums, self.params, *microbatch)
        self.masters, self.state, self.params = self.update(self.masters, self.state, sums)
        jax.block_until_ready(self.params)
