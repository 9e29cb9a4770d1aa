"""What the bits are: the order in which every operation adds, as constants.

A *contract* fixes the order of additions and the places of rounding; a *schedule* says which processor does the work
when. Everything in this file belongs to a contract. None of it depends on the batch, on the number of tokens in a call
or on anything else that varies at run time, and no schedule may contradict it. To change a number here is to change
bits: raise `CONTRACT_VERSION` with it.

Bits may differ between kinds of device: the contracts fix the order of what is added, the hardware fixes what one step
of its matrix unit adds.
"""

from typing import Final

import jax.numpy as jnp
import numpy as np

CONTRACT_VERSION: Final = 1

INPUT_DTYPES: Final = ("bfloat16", "float16", "float32")
"""Arrays that an operation takes. Sums are held in `ACCUMULATOR`, and rounded once, when the result is written."""
ACCUMULATOR: Final = jnp.float32

# --- matmul -----------------------------------------------------------------------------------------------------------
# y[m, n] = act(sum over k ascending of x[m, k] * w[k, n] + bias[n]) + residual[m, n]: one accumulator per element, no
# split of K, the epilogue on the float32 accumulator, one rounding at the end. With a soft cap, the activated sum z
# becomes cap * tanh(z / cap) before the residual.


WEIGHT_GRADIENT_TOKENS: Final = 16
"""Weight gradients add tokens in ascending order, this many in one step of the matrix unit, onto one accumulator."""

TPU_ROW_TILE: Final = 128
TPU_K_STEP: Final = 512
"""On TPUs a tile of so many tokens meets so many elements of K in one product, which is added to the accumulator. What
the matrix unit does inside one product is the compiler's choice for the product's shape, so the shape is part of what
the bits are. By the published peaks of v5e, v5p, v6e and TPU7x a bfloat16 weight takes longer to arrive than to meet
128 tokens, so one token costs no more time than it must; 256 would cost a v5p half as much again."""

# --- rows: rms_norm, softmax, log_softmax, logsumexp ------------------------------------------------------------------

LANES: Final = 512
"""Row sums: lane `j` adds elements `j, j + LANES, ...` in ascending order. Then each `LANE_GROUP` of neighbouring lanes
is added left to right; then neighbours are added in pairs, and the sums that makes again in pairs, until one is left.
Lanes without elements are zeros."""

LANE_GROUP: Final = 4
"""Neighbouring lanes that are added left to right: what one thread of a GPU loads at once."""

SOFTMAX_BLOCK: Final = 4096
"""Softmax cuts its axis at multiples of this. With e(x, m) = exp2(rn(rn(x - m) * LOG2_E)), block b of a row x has

    m_b = the maximum of its elements, but at least float32's lowest finite number
    l_b = the row sum of e(x, m_b)

and the row has m, the largest of the m_b, and l, the sum of rn(l_b * e(m_b, m)), blocks added left to right. Then

    logsumexp   = rn(m + log(l))
    log_softmax = rn(rn(x - m) - log(l))
    softmax     = rn(e(x, m) * (1 / l))

with the device's own exp2, log and reciprocal, whose last places may differ between devices and backends. A NaN or a
+inf makes its whole row NaN, and so does a row of -inf alone; any other -inf counts as probability 0. Where a gradient
needs the sum of a row, it is that of the row sums of its blocks, added left to right."""

LOG2_E: Final = np.float32(np.log2(np.e))
"""log2(e), rounded once."""

# --- attention --------------------------------------------------------------------------------------------------------
# Per query row and block b of keys, with c = log2(e) * scale and s = q . k in float32, masked scores being -inf:
#   m_b = max(rn(max(s) * c), LOWEST_MAXIMUM)
#   p   = exp2(fma(s, c, -m_b))
#   l_b = sum of p in the order of KEY_LANES and KEY_GROUPS
#   O_b = rn(p) . V from a fresh accumulator, p rounded to V's dtype
# Blocks merge left to right with m' = max(m, m_b), a = exp2(m - m'), b = exp2(m_b - m'):
#   O = fma(O, a, rn(O_b * b)),  l = fma(l, a, rn(l_b * b))
# The row ends as O * (1 / l); a zero is written as +0. A block whose keys are all masked adds an exact zero, so whether
# it is visited is a schedule.
#
# With a soft cap or ALiBi, s is rn(s * scale) before anything else, and c is log2(e). A soft cap makes it
#   cap * (1 - 2 / (1 + exp2(rn(s * rn(2 * LOG2_E / cap)))))
# each step rounded: cap * tanh(s / cap), by the exponential that every device has; its gradient is tanh's, 1 - tanh^2.
# ALiBi then makes it fma(slope, j - i, s), for the key at position j and the query at i.

KV_BLOCK: Final = 128
"""Keys are cut at absolute positions that are multiples of this. It is also the number of tokens in a page."""

KEY_LANES: Final = 8
KEY_GROUPS: Final = 4
"""Sums of p over a block, key `64 u + 16 g + 8 e + r` in lane `r` of group `g`: each lane of each group adds its four
keys in ascending order. Then the groups of a lane are added in ascending order; then neighbouring lanes in pairs, and
the sums that makes again in pairs, until one is left. So a GPU adds what its threads hold of the matrix unit's result
before they exchange anything, be keys the columns of it (prefill) or the rows (decode)."""

QUERY_UNIT: Final = 8
"""Where queries of several requests are packed into one array, each request begins at a multiple of this."""

LOWEST_MAXIMUM: Final = -1e30
"""Floor of a row's maximum in the log2 domain: keeps `-inf - -inf` out of fully masked blocks."""


TPU_ATTENTION_ROWS: Final = 64
"""On TPUs so many rows of queries meet a block of keys in one product, as with `TPU_ROW_TILE`."""

# --- quantized keys and values ----------------------------------------------------------------------------------------
# Quantized pages hold codes and scales instead of numbers. They are read as
#   value = rn(rn(float32(code) * float32(scale)))   first to float32, then to q's dtype
# and from there on attention has the bits that it has over pages of these values, in every phase.
#
# "int8" and "fp8_e4m3" have a float32 scale per token and head. For a row x of K numbers, with L being 127 or 448,
#   scale = rn(max |x| * rn(1 / L)),  t = rn(x * rn(1 / scale)) held within -L and L
# by the device's own reciprocal, and the code is t to the nearest integer or float8_e4m3fn, ties to even.
# A row whose largest magnitude is below KV_SMALLEST has scale 0 and codes 0: the scales of such rows would leave
# float32's normal numbers.
#
# "q4_0" has a float16 scale d per Q4_GROUP numbers along the head dimension. With m the number of largest magnitude in
# a group, the first of several,
#   d = rn(m / -8) to float16,  t = rn(x * rn(1 / d)) held within -8 and 8,  code = min(floor(rn(t + 8.5)), 15)
# and the code is read as code - 8; where d is 0 it is 8. Byte j of a group's 16 has element j in its low four bits and
# j + 16 in its high ones. That is llama.cpp's q4_0 but for one step: llama.cpp divides by d before it rounds d.
#
# A row, or a group, that holds a NaN or an infinity, or whose d leaves float16, has a NaN for its scale and codes of
# zero: all of it is read as NaN. No scale is an infinity. Which zero a code of zero is read as is left open: attention
# shows none of their signs.


KV_LARGEST_CODE: Final = {"int8": 127.0, "fp8_e4m3": 448.0}

KV_SMALLEST: Final = 2.0**-100

Q4_GROUP: Final = 32
"""Numbers that share a scale in "q4_0": head sizes are multiples of it."""


# --- sampling ---------------------------------------------------------------------------------------------------------
# key(seed), fold_in(absolute position of the token), fold_in(index of the sample), one Gumbel variable g per vocabulary
# entry: g = -log(-log(u)), u the float32 in [0, 1) of the upper 23 of 32 random bits, and of 0 the smallest normal
# number. The token is the argmax of rn(max(rn(logit * (1 / temperature)), float32's lowest finite number) + g), or of
# the logits where the temperature is 0; ties go to the lowest id, and a NaN counts as the largest. Threefry-2x32 in its
# partitionable form. The logprob is that of log_softmax of the logits, in the same bits.

PRNG: Final = "threefry2x32"

# --- collectives ------------------------------------------------------------------------------------------------------
# A sum over the devices of a mesh is that of their terms in the order of the axis, added left to right in float32 and
# rounded once. Terms are moved between devices, never added on the way.

# --- the portable backend ---------------------------------------------------------------------------------------------

PORTABLE_ROWS: Final = 16
"""Rows of a portable tile. XLA compiles the tile, so its shape belongs to what the bits are."""
