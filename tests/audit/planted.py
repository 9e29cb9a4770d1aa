"""A small model with layers of one defect each, which change few bits: what bisections are tested with."""

from collections.abc import Callable, Mapping
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

WIDTH, LENGTH, EXPERTS = 64, 8, 4
LAYERS: Final = ("embed", "norm", "attention", "mlp", "experts", "states", "head")

type Weights = dict[str, Array]


def weights(seed: int = 0) -> Weights:
    """Returns random weights."""
    draw = np.random.default_rng(seed)
    shapes = {"table": (32, WIDTH), "scale": (WIDTH,), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH), "router": (WIDTH, EXPERTS)}
    shapes |= {"experts": (EXPERTS, WIDTH), "head": (WIDTH, 32)}
    return {
        name: jnp.asarray(draw.standard_normal(s) * 0.2 + (name == "scale"), jnp.float32) for name, s in shapes.items()
    }


def tokens(rows: int, position: int, neighbours: int = 1) -> Array:
    """Returns tokens `[rows, LENGTH]` whose row at this position is always the same."""
    alone = np.random.default_rng(0).integers(0, 32, LENGTH)
    others = np.random.default_rng(neighbours).integers(0, 32, (rows, LENGTH))
    others[position] = alone
    return jnp.asarray(others, jnp.int32)


@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def model(defect: str | None, weights: Weights, tokens: Array) -> Array:
    """Returns the logits of the last token of each row, with a defect or None."""
    here = lambda name, good, bad: bad() if defect == name else good()  # noqa: E731
    with jax.named_scope("embed"):
        x = weights["table"][tokens]
        x = here("neighbours add to a table", lambda: x, lambda: weights["table"].at[tokens].add(1e-3)[tokens])
        x = here("a table in bfloat16", lambda: x, lambda: _rounded(weights["table"])[tokens])
    with jax.named_scope("norm"):
        x = _norm(here, weights, x)
    with jax.named_scope("attention"):
        x = x + _attention(here, weights, x)
    with jax.named_scope("mlp"):
        x = x + _mlp(here, weights, x)
    with jax.named_scope("experts"):
        x = x + _experts(here, weights, x)
    with jax.named_scope("states"):
        x = x + _states(here, x)
    with jax.named_scope("head"):
        head = here("weights in bfloat16", lambda: weights["head"], lambda: _rounded(weights["head"]))
        logits = x[:, -1] @ head
        total = lambda z: jnp.log(jnp.sum(jnp.exp(z - lax.stop_gradient(jnp.max(z))), axis=-1, keepdims=True))  # noqa: E731
        shift = jnp.max(logits, axis=-1, keepdims=True)
        stable = lambda: logits - shift - jnp.log(jnp.sum(jnp.exp(logits - shift), axis=-1, keepdims=True))  # noqa: E731
        return here("a maximum over the batch", stable, lambda: logits - jnp.max(logits) - total(logits))


type _Here = Callable[[str, Callable[[], Array], Callable[[], Array]], Array]


def _norm(here: _Here, weights: Weights, x: Array) -> Array:
    mean = here(
        "batch norm",
        lambda: jnp.mean(x * x, axis=-1, keepdims=True),
        lambda: jnp.broadcast_to(jnp.mean(x * x, axis=(0, 2), keepdims=True), (*x.shape[:2], 1)),
    )
    mean = here("a sum backwards", lambda: mean, lambda: _in_order((x * x)[..., ::-1]) / WIDTH)
    root = here("another epsilon", lambda: lax.rsqrt(mean + 1e-6), lambda: lax.rsqrt(mean + 2e-6))
    root = here("a quotient for rsqrt", lambda: root, lambda: 1 / jnp.sqrt(mean + 1e-6) * jnp.float32(1 + 2**-23))
    y = x * root * weights["scale"]
    return here("a scale that is added", lambda: y, lambda: x * root + x * root * (weights["scale"] - 1))


def _attention(here: _Here, weights: Weights, x: Array) -> Array:
    q, k, v = jnp.split(x @ weights["qkv"], 3, axis=-1)
    scores = jnp.einsum("bqd,bkd->bqk", q, k) * 0.125
    order = jnp.arange(LENGTH)
    causal = here(
        "a mask off by one", lambda: order[:, None] >= order, lambda: order[:, None] >= jnp.maximum(order - 1, 0)
    )
    scores = jnp.where(causal, scores, -1e9)
    slot = jnp.arange(x.shape[0])[:, None, None]
    scores = here("a mask by position", lambda: scores, lambda: jnp.where((slot % 3 == 2) & (order == 0), -1e9, scores))
    top = jnp.max(scores, axis=-1, keepdims=True)
    weight = here("no maximum in softmax", lambda: jnp.exp(scores - top), lambda: jnp.exp(scores))
    weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    weight = here("weights of keys in bfloat16", lambda: weight, lambda: _rounded(weight))
    mixed = jnp.einsum("bqk,bkd->bqd", weight, v)
    half = WIDTH // 2
    split = lambda: mixed[..., :half] @ weights["out"][:half] + mixed[..., half:] @ weights["out"][half:]  # noqa: E731
    return here("a split K", lambda: mixed @ weights["out"], split)


def _mlp(here: _Here, weights: Weights, x: Array) -> Array:
    h = x @ weights["up"]
    h = here("another GELU", lambda: jax.nn.gelu(h), lambda: jax.nn.gelu(h, approximate=False))
    largest = lambda: jnp.round(h / jnp.max(jnp.abs(h)) * 127) * jnp.max(jnp.abs(h)) / 127  # noqa: E731
    h = here("a quantization scale of the batch", lambda: h, largest)
    keys = lambda: jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(x.shape[0]))  # noqa: E731
    dropped = lambda: jax.vmap(lambda key, h: h * jax.random.bernoulli(key, 0.9, h.shape))(keys(), h)  # noqa: E731
    h = here("a dropout key by slot", lambda: h, dropped)
    down = weights["down"]
    parts = lambda: jnp.stack([h[..., k::4] @ down[k::4] for k in range(4)])  # noqa: E731
    y = here("devices' sums in another order", lambda: h @ down, lambda: jnp.sum(parts(), axis=0))
    low = lambda: jnp.einsum("bti,io->bto", h.astype(jnp.bfloat16), down.astype(jnp.bfloat16)).astype(jnp.float32)  # noqa: E731
    return here("a bfloat16 accumulation", lambda: y, low)


def _experts(here: _Here, weights: Weights, x: Array) -> Array:
    scores = x @ weights["router"]
    chosen = jax.nn.one_hot(jnp.argmax(scores, axis=-1), EXPERTS)
    place = lambda: jnp.cumsum(chosen.reshape(-1, EXPERTS), axis=0).reshape(chosen.shape)  # noqa: E731
    chosen = here("a capacity of experts", lambda: chosen, lambda: jnp.where(place() <= 3, chosen, 0.0))
    return jnp.einsum("bte,ed->btd", chosen, weights["experts"]) * 0.5


def _states(here: _Here, x: Array) -> Array:
    def step(state: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        x, time = now
        state = state * jnp.float32(0.5) + x
        wrong = lambda: jnp.where(time == 5, state * jnp.float32(1 + 2**-20), state)  # noqa: E731
        state = here("a step of a scan", lambda: state, wrong)
        return state, jnp.tanh(state)

    times = jnp.arange(LENGTH)
    return jnp.swapaxes(lax.scan(step, jnp.zeros_like(x[:, 0]), (jnp.swapaxes(x, 0, 1), times))[1], 0, 1)


def _in_order(x: Array) -> Array:
    return jnp.cumsum(x, axis=-1)[..., -1:]


def _rounded(x: Array) -> Array:
    return lax.reduce_precision(x, 8, 7)


IN_NUMBERS: Final[Mapping[str, str]] = {
    "a table in bfloat16": "embed",
    "a sum backwards": "norm",
    "another epsilon": "norm",
    "a quotient for rsqrt": "norm",
    "a scale that is added": "norm",
    "a mask off by one": "attention",
    "no maximum in softmax": "attention",
    "weights of keys in bfloat16": "attention",
    "a split K": "attention",
    "another GELU": "mlp",
    "devices' sums in another order": "mlp",
    "a bfloat16 accumulation": "mlp",
    "a step of a scan": "states",
    "weights in bfloat16": "head",
}
"""Defects that change a function's numbers, each with its layer."""

IN_ROWS: Final[Mapping[str, str]] = {
    "neighbours add to a table": "embed",
    "batch norm": "norm",
    "a mask by position": "attention",
    "a quantization scale of the batch": "mlp",
    "a dropout key by slot": "mlp",
    "a capacity of experts": "experts",
    "a maximum over the batch": "head",
}
"""Defects that let a row depend on the others, or on its position."""

LINES: Final[Mapping[str, str]] = {
    "neighbours add to a table": ".at[tokens].add(1e-3)",
    "batch norm": "axis=(0, 2)",
    "a mask by position": "slot % 3 == 2",
    "a quantization scale of the batch": "h / jnp.max(jnp.abs(h))",
    "a dropout key by slot": "jax.random.bernoulli(",
    "a capacity of experts": "jnp.cumsum(chosen",
    "a maximum over the batch": "logits - jnp.max(logits) - total",
}
"""Text in the line that lets a row depend on the others, or on its position."""
