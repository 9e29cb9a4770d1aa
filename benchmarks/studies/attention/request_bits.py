"""Compares every way to compute the tokens of ragged requests with a prefill of each request alone."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.progress import track

import detjax
from benchmarks.bits import differing_tokens
from benchmarks.inputs import normal
from benchmarks.studies.attention import inputs
from benchmarks.studies.attention.cases import Sizes, request_lengths
from benchmarks.studies.attention.comparison import Comparison
from benchmarks.studies.attention.programs import paged_attention
from detjax.contract import KV_BLOCK
from detjax.operands.kv_pages import Queries

ONE_TOKEN: Final = 1


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of attention.

    Attributes:
        tokens: queries per request.
        requests: the requests of the call.
        starts: the position of each request's first query.
    """

    tokens: int
    requests: Sequence[int]
    starts: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Pool:
    """Keys and values in pages.

    Attributes:
        k_pages: keys.
        v_pages: values.
        page_table: the pages of each request.
    """

    k_pages: jax.Array
    v_pages: jax.Array
    page_table: np.ndarray


def chunk_program(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a program of attention for a chunk of each request; later tokens are not cached yet.

    Args:
        attend: attention of queries, pages of keys and of values, and `Queries`.

    Returns:
        A function of queries [B, tokens, H, K], the pages, `Queries` with each request's whole length, and whether to
        compute the forward pass of gradients.
    """

    @functools.partial(detjax.jit, static_argnames="training")
    def program(
        q: jax.Array, pages: tuple[jax.Array, jax.Array], queries: Queries, *, training: bool = False
    ) -> jax.Array:
        length = jnp.minimum(jnp.asarray(queries.start) + q.shape[1], queries.length)
        chunk = dataclasses.replace(queries, length=length)

        def attend_to_pages(q: jax.Array) -> jax.Array:
            return attend(q, *pages, chunk)

        return jax.vjp(attend_to_pages, q)[0] if training else attend_to_pages(q)

    return program


@functools.partial(jax.jit, static_argnames="tokens")
def rows_from(x: jax.Array, tokens: int, requests: jax.Array, starts: jax.Array) -> jax.Array:
    """Returns `tokens` tokens [B, tokens, H, K] of some requests of `x` [R, L, H, K], from each one's start."""

    def one(request: jax.Array, start: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, (request, start, 0, 0), (1, tokens, *x.shape[2:]))[0]

    return jax.vmap(one)(requests, starts)


@jax.jit
def count_different(o: jax.Array, want: jax.Array, starts: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns how many tokens of each request differ. Queries after a request's end do not count."""
    tokens = o.shape[1]
    present = starts[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None] < lengths[:, None]
    return (differing_tokens(o, want) & present).sum(axis=1)


@jax.jit
def with_nan(pages: jax.Array, kept: jax.Array) -> jax.Array:
    """Returns the pages with NaN where `kept` [P, S] is false."""
    return jnp.where(kept[:, None, :, None], pages, jnp.nan)


class Requests:
    """Ragged requests, and the outputs of a prefill of each alone."""

    def __init__(self, sizes: Sizes, comparison: Comparison, attend: Callable[..., jax.Array]) -> None:
        self.sizes, self.comparison, self._program = sizes, comparison, chunk_program(attend)
        self.lengths = request_lengths(sizes)
        # The last chunk of the longest request may extend beyond its end.
        room = max(padded_length(sizes.longest), sizes.longest + max(*sizes.chunks, *sizes.verified))
        self.q = normal((len(self.lengths), room, sizes.heads, sizes.head_dim), jnp.asarray(5))
        pages = sum(inputs.page_counts(self.lengths.tolist()))
        k, v = inputs.keys_and_values((pages, sizes.kv_heads, KV_BLOCK, sizes.head_dim), 1)[0]
        self.pool = Pool(k, v, inputs.page_table(self.lengths.tolist()))
        self.want = self.q

    def attend(self, call: Call, pool: Pool | None = None, training: bool = False) -> tuple[jax.Array, jax.Array]:
        """Returns a call's outputs, and how many tokens of each request differ from the reference."""
        pool = pool or self.pool
        requests, starts = jnp.asarray(call.requests, jnp.int32), jnp.asarray(call.starts, jnp.int32)
        lengths = jnp.asarray(self.lengths)[requests]
        queries = Queries(jnp.asarray(pool.page_table)[requests], starts, lengths)
        q = rows_from(self.q, call.tokens, requests, starts)
        o = self._program(q, (pool.k_pages, pool.v_pages), queries, training=training)
        want = rows_from(self.want, call.tokens, requests, starts)
        return o, count_different(o, want, starts, lengths)

    def prefill_alone(self) -> None:
        """Computes the reference outputs. Lengths are padded to powers of two to compile few programs."""
        rows = []
        for call, length in zip(self.whole(), self.lengths.tolist(), strict=True):
            o = self.attend(call)[0][0, :length]
            rows.append(jnp.pad(o, ((0, self.q.shape[1] - length), (0, 0), (0, 0))))
        self.want = jnp.stack(rows)
        if not bool(jnp.isfinite(self.want).all()):
            self.comparison.differences.append("prefill: outputs are not finite")

    def compare(self, kind: str, calls: Iterable[Call], pool: Pool | None = None, training: bool = False) -> None:
        """Compares the outputs of calls with the reference; the host waits once."""
        made = [(call, self.attend(call, pool, training)[1]) for call in calls]
        counts = jax.device_get([count for _, count in made])
        differing: dict[int, int] = {}
        for (call, _), count in zip(made, counts, strict=True):
            for request, start, different in zip(call.requests, call.starts, count.tolist(), strict=True):
                compared = min(call.tokens, int(self.lengths[request]) - start)
                self.comparison.tokens[kind] = self.comparison.tokens.get(kind, 0) + compared
                differing[request] = differing.get(request, 0) + different
        for request, different in differing.items():
            if different:
                self.comparison.differences.append(
                    f"{kind}: {different} tokens of request {request}, which has {self.lengths[request]}"
                )

    def whole(self) -> list[Call]:
        """Returns a prefill of each request alone."""
        return [Call(padded_length(length), [request], [0]) for request, length in enumerate(self.lengths.tolist())]

    def in_chunks(self, tokens: int) -> Iterator[Call]:
        """Yields prefills of each request alone in chunks of `tokens` tokens."""
        for request, length in enumerate(self.lengths.tolist()):
            for start in range(0, length, tokens):
                yield Call(tokens, [request], [start])

    def sampled(self) -> np.ndarray:
        """Returns the positions [R, sampled] of decoded tokens, including the first and the last."""
        rng, count = np.random.default_rng(3), self.sizes.sampled
        picked = [np.concatenate([[0, n - 1], rng.integers(0, n, count - 2)]) for n in self.lengths.tolist()]
        return np.stack(picked).astype(np.int32)

    def verified(self, tokens: int) -> Iterator[Call]:
        """Yields calls of all requests together, at positions that leave room for the tokens, or at 0."""
        rng = np.random.default_rng(tokens)
        for _ in range(self.sizes.windows):
            starts = [int(rng.integers(0, max(1, length - tokens + 1))) for length in self.lengths.tolist()]
            yield Call(tokens, range(len(starts)), starts)

    def decoded_together(self) -> list[Call]:
        """Returns decodes of all requests at their sampled positions."""
        return [Call(ONE_TOKEN, range(len(self.lengths)), starts) for starts in self.sampled().T.tolist()]

    def decoded_alone(self) -> list[Call]:
        """Returns decodes of one request at one sampled position each."""
        return [Call(ONE_TOKEN, [request], [p]) for request, row in enumerate(self.sampled().tolist()) for p in row]

    def kept(self, request: int, whole_pages: bool) -> np.ndarray:
        """Returns the mask [P, S] of a request's slots in the pool: whole pages, or only its tokens."""
        length = int(self.lengths[request])
        pages = self.pool.page_table[request, : inputs.page_counts([length])[0]]
        out = np.zeros((len(self.pool.k_pages), KV_BLOCK), bool)
        out[pages] = True
        if not whole_pages and length % KV_BLOCK:
            out[pages[-1], length % KV_BLOCK :] = False
        return out

    def compare_among_nan(self, kind: str, whole_pages: bool) -> None:
        """Compares prefill and decode of each request in a pool with NaN where `kept` is false."""
        positions = self.sampled()
        for request, whole in enumerate(self.whole()):
            kept = self.kept(request, whole_pages)
            pages = with_nan(self.pool.k_pages, kept), with_nan(self.pool.v_pages, kept)
            decodes = [Call(ONE_TOKEN, [request], [p]) for p in positions[request, :4].tolist()]
            self.compare(kind, [whole, *decodes], Pool(*pages, self.pool.page_table))

    def compare_shuffled(self) -> None:
        """Compares prefill and decode with the pages in random order."""
        order = np.random.default_rng(4).permutation(len(self.pool.k_pages))
        place = np.argsort(order).astype(np.int32)
        pool = Pool(self.pool.k_pages[order], self.pool.v_pages[order], place[self.pool.page_table])
        self.compare("shuffled pages, prefill", self.whole(), pool)
        self.compare("shuffled pages, decode together", self.decoded_together(), pool)

    def compare_repeated(self, kind: str, call: Call, times: int) -> None:
        """Compares runs of one call."""
        runs = jax.device_get([self.attend(call)[1].sum() for _ in range(times)])
        different = sum(bool(count) for count in runs)
        self.comparison.repeats += times
        if different:
            self.comparison.differences.append(f"{kind}: {different} of {times} repeated runs")


def padded_length(length: int) -> int:
    """Returns the number of queries to which a prefill of `length` tokens is padded."""
    return max(KV_BLOCK, 1 << (length - 1).bit_length())


def compare_requests(sizes: Sizes, comparison: Comparison, attend: Callable[..., jax.Array] = paged_attention) -> None:
    """Compares every way to compute the tokens; a failure does not end the comparison.

    Args:
        sizes: the requests.
        comparison: collects counts and notes.
        attend: the attention to compare.
    """
    requests = Requests(sizes, comparison, attend)
    if not comparison.attempt("prefill", requests.prefill_alone):
        return
    stages = _stages(sizes, requests)
    for kind, compare in track(stages.items(), "comparing bits", len(stages), console=Console(stderr=True)):
        comparison.attempt(kind, compare)


def _stages(sizes: Sizes, requests: Requests) -> dict[str, Callable[[], None]]:
    """The comparisons, by the way to compute tokens."""
    stages: dict[str, Callable[[], None]] = {}

    def stage(kind: str, calls: Callable[[], Iterable[Call]], **options: Any) -> None:
        stages[kind] = lambda: requests.compare(kind, calls(), **options)

    stage("prefill padded to the longest", lambda: requests.in_chunks(padded_length(sizes.longest)))
    stage("training forward", requests.whole, training=True)
    for tokens in sizes.chunks:
        stage(f"chunks of {tokens}", functools.partial(requests.in_chunks, tokens))
    stage("decode alone", requests.decoded_alone)
    stage("decode together", requests.decoded_together)
    for tokens in sizes.verified:
        stage(f"verify {tokens}", functools.partial(requests.verified, tokens))
    stages["shuffled pages"] = requests.compare_shuffled
    for kind, whole_pages in (("NaN in others' pages", True), ("NaN after the last token", False)):
        stages[kind] = functools.partial(requests.compare_among_nan, kind, whole_pages)
    last = (requests.lengths - 1).tolist()
    decode, times = Call(ONE_TOKEN, range(len(last)), last), sizes.repeated_decodes
    stages["repeated decode"] = functools.partial(requests.compare_repeated, "repeated decode", decode, times)
    prefill, times = requests.whole()[int(requests.lengths.argmax())], sizes.repeated_prefills
    stages["repeated prefill"] = functools.partial(requests.compare_repeated, "repeated prefill", prefill, times)
    return stages
