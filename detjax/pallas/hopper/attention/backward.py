r"""Gradients of attention on Hopper (Pallas Mosaic GPU): one kernel for queries, one for keys and values.

Forward computes, for one head, with the scale $\sigma$, a soft cap $c$ and ALiBi's slope $\alpha$,

$$X = \sigma Q K^T, \quad T = \tanh(X / c), \quad Z_{ij} = c\,T_{ij} + \alpha (j - i), \quad
P_{ij} = 2^{\log_2(e) Z_{ij} - N_i}, \quad O = P V$$

where $N_i$ is the log2 of the row's normalizer, the sink's share included. Without a soft cap $Z_{ij}$ begins with
$X_{ij}$. From the output's gradient $dO$ follow

$$dP = dO\,V^T, \quad \delta_i = \sum_v dO_{iv} O_{iv}, \quad dS_{ij} = P_{ij} (dP_{ij} - \delta_i) (1 - T_{ij}^2)$$

$$dQ = \sigma\,dS\,K, \quad dK = \sigma\,dS^T Q, \quad dV = P^T dO, \quad
d\mathrm{sink} = -\sum_i 2^{\log_2(e)\,\mathrm{sink} - N_i} \delta_i$$

Without a soft cap the factor $1 - T^2$ is missing. $P$ and $dS$ are rounded to the operands' dtype before they are
multiplied.

Both kernels recompute the probabilities from the forward pass's normalizers. So there are seven products rather than
five, but every sum has one owner and one order:

* `dq`: a CTA has 128 query rows of one head and adds keys in ascending order. It also stores each row's `delta` for the
  other kernel.
* `dk` and `dv`: a CTA has a page of one KV head. For each query head of the group it adds query rows in ascending
  order, `ROWS` at a time, from zeros; the heads' sums are added left to right. Scores are transposed here: with keys on
  the matrix unit's rows, probabilities are the next product's operand in the registers where they were computed.

In both, two warpgroups multiply 64 rows each and take turns at the matrix unit, so that one multiplies while the other
exponentiates. A third warpgroup loads.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK
from detjax.operands.kv_pages import KVPages, Queries
from detjax.operands.options import Masking
from detjax.operands.rounding import log2_scale
from detjax.pallas.hopper.attention.backward_kernel import Operands
from detjax.pallas.hopper.attention.backward_keys import key_gradients
from detjax.pallas.hopper.attention.backward_queries import query_gradient
from detjax.pallas.hopper.attention.backward_rows import KeyPages, RequestRows, rows_of_requests
from detjax.pallas.hopper.attention.backward_schedule import Problem, Schedule, default_schedule
from detjax.pallas.hopper.attention.mask import pack_words
from detjax.pallas.hopper.mosaic.layouts import ROWS


class Residuals(NamedTuple):
    """Arrays of the forward call that the gradients need.

    Attributes:
        q: queries of all requests, `[N, H, K]`: packed, or rectangular with N / B rows each, a multiple of 8. Padding
            of rectangular ones is finite.
        kv: pages of numbers.
        queries: page table, start and length of each request, and positions of packed queries. Within the requests'
            lengths a page occurs once in the table, since each gradient has one owner.
        sinks: a score for each head, or None.
        mask: `[B or 1, H or 1, T, s]`, as `ops.attention` has it, or None.
        o: the output, `[N, H, V]`.
        log2_normalizers: log2 of each row's normalizer, `[H, N]` float32.
    """

    q: Array
    kv: KVPages
    queries: Queries
    sinks: Array | None
    mask: Array | None
    o: Array
    log2_normalizers: Array


def backward(
    residuals: Residuals,
    do: Array,
    sinks_sum: Array | None = None,
    *,
    masking: Masking,
    schedule: Schedule | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """Returns gradients of q `[N, H, K]`, page pools `[P, h, S, K]` and `[P, h, S, V]`, and sinks `[H]` float32.

    Pages that no request owns, rows of a page after its request's length, and padding of packed queries get zeros.

    Args:
        residuals: the forward call.
        do: gradient of the output, `[N, H, V]`; zeros in the padding of rectangular rows.
        sinks_sum: the sum of sinks' gradients to continue; None: zeros.
        masking: which keys a query sees, and how scores are shaped.
        schedule: default: `default_schedule`.
    """
    queries, (k_pages, v_pages) = residuals.queries, residuals.kv.numbers
    page_table, start, length = (jnp.asarray(x) for x in (queries.page_table, queries.start, queries.length))
    rows = rows_of_requests(queries, residuals.q.shape[0])
    q, o, do = (rows.padded(x) for x in (residuals.q, residuals.o, do))
    # In a padding row every key has probability 0.
    normalizers = rows.padded(residuals.log2_normalizers, axis=1, value=jnp.inf)
    tiles, pages = rows.tiles(), rows.key_pages(page_table, length, k_pages.shape[0])
    counts = tiles.request.shape[0], pages.request.shape[0], rows.rows_of_each
    widths = q.shape[-1], v_pages.shape[-1]
    problem = Problem(*counts, q.shape[1], k_pages.shape[1], page_table.shape[1], *widths, q.dtype)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    slopes = None if masking.alibi_slopes is None else jnp.asarray(masking.alibi_slopes, ACCUMULATOR)
    places = page_table, start, length
    operands = Operands(q, do, normalizers, k_pages, v_pages, *places, slopes, None)
    words = transposed = None
    if (mask := residuals.mask) is not None:
        shape = rows.most_rows, problem.blocks * KV_BLOCK
        words, transposed = pack_words(mask, *shape), pack_words(mask.swapaxes(2, 3), *shape[::-1])
    dq, delta = query_gradient(problem, schedule, masking, operands._replace(mask=words, tiles=tiles, o=o))
    operands = operands._replace(mask=transposed, pages=pages, delta=delta)
    gradients: dict[str, Array] = {}
    for names in ("kv",) if schedule.together else ("k", "v"):
        gradients |= key_gradients(problem, schedule, masking, names, operands)
    dk, dv = _zeros_in_free_pages(gradients, pages)
    dsinks = None
    if residuals.sinks is not None:
        dsinks = _sink_gradient(rows, residuals.sinks, normalizers, delta, sinks_sum)
    return rows.unpadded(dq), dk, dv, dsinks


def _zeros_in_free_pages(gradients: dict[str, Array], pages: KeyPages) -> tuple[Array, Array]:
    """Returns gradients of keys and values with zeros in the pages that no request owns, which no kernel writes."""
    count = gradients["k"].shape[0]
    is_owned = jnp.zeros(count, bool).at[jnp.where(pages.rows > 0, pages.page, count)].set(True, mode="drop")
    is_owned = is_owned[:, None, None, None]
    dk, dv = (jnp.where(is_owned, x, jnp.zeros((), x.dtype)) for x in (gradients[name] for name in "kv"))
    return dk, dv


def _sink_gradient(
    rows: RequestRows, sinks: Array, normalizers: Array, delta: Array, sinks_sum: Array | None = None
) -> Array:
    """Returns `sinks_sum - sum(share of the sink * delta)`.

    Neighbouring rows of a request are added in pairs, then the pairs in pairs, and so on; requests are added in order.
    So padding with zeros changes no bit, and the order does not depend on lengths.
    """
    share = jnp.exp2((sinks.astype(ACCUMULATOR) * log2_scale(1.0))[:, None] - normalizers)
    x = lax.optimization_barrier(share * delta).reshape(share.shape[0], -1, ROWS)
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    x, stride = x[..., 0], 1
    # Each block of rows adds the request's block `stride` later. Of the results only every second one is used in the
    # next round, and so on. Padding blocks may be NaN.
    block = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    first, count = rows.first_row // ROWS, rows.rows // ROWS
    request = jnp.maximum(jnp.sum(first[None] <= block.T, axis=1, dtype=jnp.int32) - 1, 0)
    end = (first + count)[request][None]
    while stride < rows.most_rows // ROWS:
        partner = jnp.pad(x[:, stride:], ((0, 0), (0, stride)))
        x = x + jnp.where(block + stride < end, partner, 0.0)
        stride *= 2
    request_sums = jnp.where((count > 0)[:, None], x[:, jnp.minimum(first, x.shape[1] - 1)].T, 0.0)
    start, rest = (-request_sums[0], request_sums[1:]) if sinks_sum is None else (sinks_sum, request_sums)
    return lax.scan(lambda total, one: (total - one, None), start, rest, unroll=32)[0]
