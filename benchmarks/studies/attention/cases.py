"""The measured calls of attention, and the number of measurements."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from detjax.bench.timing import rotations

BF16: Final = jnp.dtype("bfloat16")
MAX_BYTES: Final = 12 << 30
"""Maximum size of the argument sets that one implementation rotates, in bytes."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of all measurements.

    Attributes:
        prefill: (tokens, requests, head size) of timed causal calls.
        decode: (requests, cached tokens per request) of timed calls with one query.
        ragged: requests of one timed decode call, and the maximum number of tokens of one; the minimum is 1.
        backward: (tokens, requests) of timed gradients.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: default head size.
        layers: calls of attention in the program that is replayed to time a step.
        accuracy_tokens: tokens of the request whose result is compared with float64.
        requests: requests whose bits are compared.
        longest: tokens of the longest of these requests.
        tokens: total tokens of these requests.
        chunks: tokens of a prefill chunk.
        verified: queries of calls that verify drafted tokens, at random positions.
        windows: number of such positions per request.
        sampled: number of decoded positions per request.
        repeated_decodes: runs of one decode.
        repeated_prefills: runs of one prefill.
        head_dims: head sizes at which every option is tried.
        groups: query heads per key head that are tried.
        option_tokens: tokens of the request on which every option is tried.
        latents: (requests, cached tokens per request, queries per request) of timed calls over latents.
        latent_heads: query heads of these calls.
        latent_dims: columns of their keys, and of their values, which are the keys' first columns.
    """

    prefill: Sequence[tuple[int, int, int]] = (
        (1024, 8, 128),
        (4096, 2, 128),
        (16384, 1, 128),
        (32768, 1, 128),
        (4096, 2, 64),
        (4096, 2, 96),
        (4096, 2, 256),
    )
    decode: Sequence[tuple[int, int]] = ((1, 4096), (1, 65536), (8, 8192), (16, 4096), (64, 4096), (64, 16384))
    ragged: tuple[int, int] = (64, 32768)
    backward: Sequence[tuple[int, int]] = ((4096, 2), (16384, 1))
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 20
    accuracy_tokens: int = 1024
    requests: int = 24
    longest: int = 8192
    tokens: int = 65536
    chunks: Sequence[int] = (7, 64, 100, 128, 1000)
    verified: Sequence[int] = tuple(range(2, 17))
    windows: int = 4
    sampled: int = 64
    repeated_decodes: int = 1000
    repeated_prefills: int = 100
    head_dims: Sequence[int] = (64, 80, 96, 112, 128, 192, 256)
    groups: Sequence[int] = (1, 2, 3, 4, 7, 8, 16)
    option_tokens: int = 300
    latents: Sequence[tuple[int, int, int]] = (
        (1, 4096, 1),
        (1, 65536, 1),
        (16, 4096, 1),
        (64, 4096, 1),
        (16, 4096, 4),
        (1, 4096, 4096),
    )
    latent_heads: int = 128
    latent_dims: tuple[int, int] = (576, 512)


SMALL: Final = Sizes(
    prefill=((48, 2, 64),),
    decode=((1, 100),),
    ragged=(4, 200),
    backward=((40, 2),),
    heads=4,
    kv_heads=2,
    head_dim=64,
    layers=2,
    accuracy_tokens=200,
    requests=3,
    longest=140,
    tokens=180,
    chunks=(64,),
    verified=(2,),
    windows=1,
    sampled=3,
    repeated_decodes=2,
    repeated_prefills=2,
    head_dims=(64,),
    groups=(1,),
    option_tokens=140,
    latents=((2, 140, 1),),
    latent_heads=4,
    latent_dims=(48, 32),
)
"""Sizes that run on a CPU in seconds."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A causal call of attention: the last `queries` tokens of each request attend to the whole request.

    Attributes:
        name: the case's name in tables.
        queries: queries per request.
        lengths: cached tokens of each request, including the queries.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: head size.
        key_columns: the number of the keys' first columns that are the values; None: values are separate arrays.
    """

    name: str
    queries: int
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    key_columns: int | None = None

    @property
    def batch(self) -> int:
        """The number of requests."""
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(self.lengths)

    @property
    def ragged(self) -> bool:
        """True if requests have different lengths."""
        return len(set(self.lengths)) > 1

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, without masked pairs."""
        share = 2 if self.queries == self.longest else 1
        columns = self.head_dim + (self.key_columns or self.head_dim)
        return 2 * self.heads * columns * sum(self.queries * length for length in self.lengths) // share

    @property
    def kv_read(self) -> int:
        """Bytes of the requests' keys and values."""
        arrays = 1 if self.key_columns else 2
        return arrays * sum(self.lengths) * self.kv_heads * self.head_dim * BF16.itemsize

    @property
    def expected_seconds(self) -> float:
        """The approximate time of a good kernel."""
        return max(self.operations / 600e12, self.kv_read / 4e12, 5e-6)

    @property
    def calls(self) -> int:
        """The number of calls per round."""
        return timing.calls_for(self.expected_seconds)

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return timing.rounds_for(self.expected_seconds)

    @property
    def sets(self) -> int:
        """The number of argument sets that keeps calls from hitting the cache, limited by memory."""
        queries = self.batch * self.queries * self.heads * self.head_dim * BF16.itemsize
        # Implementations without pages pad every request to the longest.
        allocated = queries + 2 * self.batch * self.longest * self.kv_heads * self.head_dim * BF16.itemsize
        return max(1, min(rotations(self.kv_read + queries), MAX_BYTES // allocated))

    def fields(self) -> dict[str, Any]:
        """The fields that identify the case in a result."""
        lengths = {"lengths": list(self.lengths)} if self.ragged else {}
        return {
            "case": self.name,
            "batch": self.batch,
            "queries": self.queries,
            "tokens": self.longest,
            "head_dim": self.head_dim,
            **lengths,
        }


def prefill_case(sizes: Sizes, tokens: int, batch: int, head_dim: int) -> Case:
    """Returns a prefill of requests of equal length."""
    name = f"{batch} × {tokens}" + ("" if head_dim == sizes.head_dim else f", head size {head_dim}")
    return Case(name, tokens, (tokens,) * batch, sizes.heads, sizes.kv_heads, head_dim)


def prefill_cases(sizes: Sizes) -> list[Case]:
    """Returns the timed prefills."""
    return [prefill_case(sizes, *shape) for shape in sizes.prefill]


def backward_cases(sizes: Sizes) -> list[Case]:
    """Returns the timed gradients."""
    return [prefill_case(sizes, *shape, sizes.head_dim) for shape in sizes.backward]


def decode_cases(sizes: Sizes) -> Iterator[Case]:
    """Yields the timed decodes; the last one has ragged requests."""
    for batch, tokens in sizes.decode:
        yield Case(f"{batch} × {tokens}", 1, (tokens,) * batch, sizes.heads, sizes.kv_heads, sizes.head_dim)
    batch, longest = sizes.ragged
    # Lengths are spread evenly over powers of two.
    exponents = np.random.default_rng(0).permutation(np.arange(batch) / (batch - 1))
    lengths = tuple(round(longest**exponent) for exponent in exponents.tolist())
    yield Case(f"{batch} × 1 to {longest}", 1, lengths, sizes.heads, sizes.kv_heads, sizes.head_dim)


def latent_cases(sizes: Sizes) -> list[Case]:
    """Returns the timed calls over latents: decodes, verify steps and prefills."""
    width, values = sizes.latent_dims
    return [
        Case(f"{batch} × {tokens}, queries {queries}", queries, (tokens,) * batch, sizes.latent_heads, 1, width, values)
        for batch, tokens, queries in sizes.latents
    ]


def request_lengths(sizes: Sizes) -> np.ndarray:
    """Returns the lengths of the requests whose bits are compared, from 1 to the longest, in a fixed random order."""
    rng, count, longest = np.random.default_rng(1), sizes.requests, sizes.longest
    # The mean of the squares of numbers spread evenly over [0, 1) is 1/3.
    lengths = np.ceil(longest * ((np.arange(count) + rng.random(count)) / count) ** 2).astype(np.int32)
    lengths[0], lengths[-1] = 1, longest
    lengths[count // 2] += sizes.tokens - lengths.sum()
    assert lengths.min() == 1 and lengths.max() == longest, "sizes.tokens is too far from a third of requests * longest"
    return rng.permutation(lengths)
