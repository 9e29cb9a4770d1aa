"""The measured products and their inputs."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bits import anchor_positions
from benchmarks.inputs import normal_weight
from detjax.bench import timing
from detjax.bench.shapes import MODELS, TOKENS, linears
from detjax.models import DecoderConfig
from detjax.pallas.hopper.matmul.plan import Problem

BF16: Final = jnp.dtype("bfloat16")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of all measurements.

    Attributes:
        linears: the linear layers [N, K], with the models and names of this shape.
        tokens: numbers of tokens.
        neighbours: numbers of tokens at which the anchor row is also computed next to constant rows.
        probe: [N, K] of repeated runs and of the comparison of schedules.
        scheduled_tokens: numbers of tokens at which schedules are compared.
        repeated_tokens: numbers of tokens of repeated runs.
        repeats: repetitions of a run.
        epilogues: [N, K] of the linear layers that are measured with their epilogues, by name.
        epilogue_tokens: their numbers of tokens.
    """

    linears: dict[tuple[int, int], list[str]]
    tokens: Sequence[int]
    neighbours: Sequence[int] = (16, 128, 1024)
    probe: tuple[int, int] = (4096, 12288)
    scheduled_tokens: Sequence[int] = (8, 64, 256, 1024)
    repeated_tokens: Sequence[int] = (128, 4096)
    repeats: int = 1000
    epilogues: dict[str, tuple[int, int]] = dataclasses.field(default_factory=lambda: linears(MODELS["Qwen3-8B"]))
    epilogue_tokens: Sequence[int] = (1, 64, 1024)

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens."""
        return max(*self.tokens, *self.scheduled_tokens, *self.repeated_tokens, *self.epilogue_tokens)


def full_sizes(models: Iterable[str] = MODELS, tokens: Sequence[int] = TOKENS) -> Sizes:
    """Returns the sizes for the linear layers of models."""
    return Sizes(unique_linears({name: MODELS[name] for name in models}), tuple(tokens))


def small_sizes() -> Sizes:
    """Returns sizes that run on a CPU in seconds."""
    config = dataclasses.replace(
        MODELS["Qwen3-8B"],
        **{"hidden_size": 128, "intermediate_size": 192, "vocab_size": 1000, "heads": 4, "kv_heads": 1, "head_dim": 32},
    )
    layers = linears(config)
    return Sizes(
        linears={layers[name]: [f"small {name}"] for name in ("qkv", "down")},
        tokens=(1, 17),
        neighbours=(17,),
        probe=(128, 192),
        repeated_tokens=(17,),
        repeats=3,
        epilogues=layers,
        epilogue_tokens=(17,),
    )


def unique_linears(models: dict[str, DecoderConfig]) -> dict[tuple[int, int], list[str]]:
    """Returns the names of the linear layers of each [N, K], sorted by K and N."""
    names: dict[tuple[int, int], list[str]] = {}
    for model, config in models.items():
        for name, shape in linears(config).items():
            names.setdefault(shape, []).append(f"{model} {name}")
    return dict(sorted(names.items(), key=lambda item: item[0][::-1]))


def operations(problem: Problem) -> int:
    """Returns the number of multiplications and additions."""
    return 2 * problem.m * problem.n * problem.k * problem.parts


def traffic(problem: Problem) -> int:
    """Returns the bytes that must be read and written."""
    p = problem
    residual = 0 if p.residual_dtype is None else p.m * p.n * p.residual_dtype.itemsize
    read = (p.m + p.parts * p.n) * p.k * p.dtype.itemsize
    return read + residual + p.m * p.n * p.out_dtype.itemsize


def expected_seconds(problem: Problem) -> float:
    """Returns the approximate time of a good kernel."""
    return max(operations(problem) / 700e12, traffic(problem) / 4e12)


def weight_sets(*shape: int) -> list[jax.Array]:
    """Returns enough weights to rotate so that no call finds its own in the cache."""
    count = timing.rotations(2 * int(np.prod(shape)))
    return jax.block_until_ready([normal_weight(shape, jnp.asarray(seed)) for seed in range(count)])


def token_rows(m: int, k: int, most: int, neighbours: float | None = None) -> jax.Array:
    """Returns `[m, k]` with the anchor row as its first, middle and last row.

    Args:
        m: rows.
        k: the width of a row.
        most: the largest m; rows of all m with the same `most` are equal.
        neighbours: the value of all other rows; None: random numbers.
    """
    pool = _pool(k, most)
    x = pool[1 : m + 1].copy() if neighbours is None else np.full((m, k), neighbours, BF16)
    x[anchor_positions(m)] = pool[0]
    return jnp.asarray(x)


@functools.lru_cache(maxsize=1)
def _pool(k: int, rows: int) -> np.ndarray:
    return np.random.default_rng(k).standard_normal((rows + 1, k), np.float32).astype(BF16)
