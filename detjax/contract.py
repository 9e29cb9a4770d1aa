"""The contracts: the order in which every operation adds, and the places where it rounds.

A *contract* fixes the order of additions and the places of rounding; a *schedule* says which processor does the work
when. Everything in this file belongs to a contract. None of it depends on the batch, on the number of tokens in a call
or on anything else that varies at run time, and no schedule may contradict it. A change of a number or of a formula
here changes bits, so it raises `CONTRACT_VERSION`.

Bits may differ between kinds of device: the contracts fix the order of the additions, and the hardware fixes what one
step of its matrix unit adds.

In the formulas `rn` is rounding to the nearest number, ties to even; without another dtype, it is a float32 number.
`fma(a, b, c)` is `a * b + c` with one rounding. Sums are held in `ACCUMULATOR` and rounded once, when the result is
written.

Matrix products
---------------

    y[m, n] = act(sum over k ascending of x[m, k] * w[k, n] + bias[n]) + residual[m, n]

Each element has one accumulator, and K is not split. The epilogue works on the float32 accumulator, and one rounding
ends it. With a `Clamp`, gate and up become `g = min(gate, limit)` and `u = max(min(up, limit), -limit)`; the activated
sum is `rn(rn(u + 1) * rn(act(rn(slope * g)) * rn(1 / slope)))`. With a soft cap, the activated sum `z` becomes
`cap * tanh(z / cap)` before the residual. A gradient takes the derivative of the epilogue at the biased sums rounded to
x's dtype, and rounds the gradient of these sums to x's dtype.
See also `WEIGHT_GRADIENT_TOKENS`, `TPU_ROW_TILE` and `TPU_K_STEP`.

Sums of rows
------------

`rms_norm`, `layer_norm`, `softmax`, `log_softmax` and `logsumexp` add a row in the order of `LANES` and `LANE_GROUP`.
The softmax family works on blocks of the row; `SOFTMAX_BLOCK` has its formulas.

A layer norm is `rnd(rn(rn(rn(c * s) * w) + b))`, where `rnd` rounds to x's dtype, `c = rn(x - rn(sum(x) / D))`, and
`s = rsqrt(rn(rn(sum(c^2) / D) + eps))`, both sums being row sums. A sum of rows with factors adds `rn(x * f)` in their
order, and is rounded to x's dtype.

Single elements
---------------

`add` is `rn(x + y)`, and `scale` is `rn(x * c)` with the constant `c` rounded to x's dtype before. A model whose norms
stand between a projection and the residual stream adds by `add`, and by `rms_norm` with a residual.

Attention
---------

A query row meets the keys in blocks of `KV_BLOCK`. For block `b`, with `c = log2(e) * scale` rounded once and
`s = q . k` in float32, masked scores being -inf:

    m_b = max(rn(max(s) * c), LOWEST_MAXIMUM)
    p   = exp2(fma(s, c, -m_b))
    l_b = the sum of p in the order of KEY_LANES and KEY_GROUPS
    O_b = rn(p) . V from a fresh accumulator, p rounded to V's dtype

Blocks merge left to right, with `m' = max(m, m_b)`, `a = exp2(m - m')` and `b = exp2(m_b - m')`:

    O = fma(O, a, rn(O_b * b))
    l = fma(l, a, rn(l_b * b))

The row ends as `O * (1 / l)`; a zero is written as +0. A block whose keys are all masked adds an exact zero, so a
schedule decides whether it visits that block.

Where values have more than `SPAN_WIDTH` columns, blocks merge left to right within spans of `SPAN_BLOCKS`, each span
from `m = LOWEST_MAXIMUM` and zeros on. The spans' `m`, `l` and `O` then merge left to right by the same formulas.

With a soft cap or ALiBi, `s` is `rn(s * scale)` before anything else, and `c` is log2(e). A soft cap then makes `s`

    cap * (1 - 2 / (1 + exp2(rn(s * rn(2 * LOG2_E / cap)))))

with a rounding after every step. That is `cap * tanh(s / cap)` by the exponential that every device has; its gradient
is that of tanh, `1 - tanh^2`. ALiBi then makes `s` the value `fma(slope, j - i, s)`, for the key at position `j` and
the query at position `i`.

Latent attention
----------------

The key of a token is its normalized latent `c` and its rotated columns `k_r`; the value is `c`. Every phase has the
absorbed form, with head `h`'s weights `K_h`, from latents to the columns that are not rotated, and `V_h`, to values:

    q' = the matrix product of the columns that are not rotated and K_h, n ascending, rounded once
    s  = q' . c + q_r . k_r in one accumulator, the columns of c before those of k_r
    o' = the attended latents, rounded once as by attention
    o  = the matrix product of o' and V_h, columns of the latent ascending, rounded once

The gradient of a column that is both key and value is `rn(dk) + dv`, added in float32 and rounded once.

Experts in groups
-----------------

A router's logits are float32 sums that are not rounded. DeepSeek-V3's chooses by ranks, which are corrected scores, and
weighs by the scores alone:

    score  = 1 / (1 + exp(-logit)), rounded after every step, with the device's own exp and reciprocal
    rank   = rn(score + correction)
    count  = rn(best rank of a group + its second best)
    weight = rn(rn(score * (1 / rn(sum of the chosen scores + 1e-20))) * factor), likewise

A token keeps the groups that count most, and chooses among their experts those of the highest ranks; of equal ones the
lower number wins. The sum adds the chosen experts in ascending order.

Gated delta rule
----------------

A request's tokens are cut into chunks at absolute positions that are multiples of `DELTA_CHUNK`. Token `t` of a chunk
needs the state `S` before the chunk, float32 and at first zero, its own input, and the rows of the chunk's tokens
before it: normalized keys `k`, updates `u` and sums of decays `G`. So it does not matter how a request is cut into
calls, and bits depend on `t` and the request alone. For a value head and the key head that it shares, `c` being
`K^(-1/2)` rounded once, and `rnd` rounding to the dtype of q, k and v:

    G_t  = rn(G_(t-1) + rn(g_t * LOG2_E)), with 0 before the chunk
    r_t  = rn(beta_t * rn(v_t - rn(exp2(G_t) * (k_t . rnd(S)))))
    a_tj = rn(rn(beta_t * (k_t . k_j)) * exp2(rn(G_t - G_j)))             for j < t
    u_t  = rnd(r_t - sum over j < t, ascending, of a_tj * u_j), each step an fma
    p_tj = rn(rn(c * (q_t . k_j)) * exp2(rn(G_t - G_j)))                  for j <= t, else 0
    h    = rnd(p), l = rnd(p - h)
    o_t  = rnd(fma(exp2(G_t), rn(c * (q_t . rnd(S))), sum of h_tj * u_j, then of l_tj * u_j))

and the state after the chunk, with `e` its last token, is

    S' = fma(exp2(G_e), S, sum over j ascending of k_j * rnd(u_j * exp2(rn(G_e - G_j))))

Sums over K run ascending, and so do those over a chunk's tokens, of which there are always `DELTA_CHUNK`: exact zeros
stand behind `t`. Each has a fresh accumulator. The gradients are those of these formulas without the roundings. They
are computed for each request apart, chunk by chunk from the last to the first, in float32, and rounded once.

Before it, queries and keys are divided by their length: `rnd(x * (1 / sqrt(sum(x^2) + eps)))`, a row sum. The decay of
a token is `g = rn(-exp(A) * softplus(rn(a + dt)))`, its rate `beta = 1 / (1 + exp(-b))`, both float32. The norm behind
it is `rnd(rn(rn(x * s) * w) * silu(z))`, with the row sum of `rms_norm` in `s`. A sigmoid gate is
`rnd(x * sigmoid(z))`.

A causal convolution of `n` taps, depthwise, adds the taps in ascending order, the last of which meets the token itself,
from zero on, each step an fma, and is rounded after its activation: `rnd(silu(sum of w_i * x_(t - n + 1 + i)))`. Inputs
before position 0 are exact zeros.

Quantized keys and values
-------------------------

Quantized pages hold codes and scales instead of numbers. A read gives

    value = rn(rn(float32(code) * float32(scale)))

rounded first to float32, then to q's dtype. From there on attention has the bits that it has over pages of these
values, in every phase.

"int8" and "fp8_e4m3" have a float32 scale for each token and head. For a row `x` of K numbers, with `L` being
`KV_LARGEST_CODE`, 127 or 448:

    scale = rn(max |x| * rn(1 / L))
    t     = rn(x * rn(1 / scale)), held within -L and L
    code  = t to the nearest integer or float8_e4m3fn, ties to even

where `1 / scale` is the device's own reciprocal. A row whose largest magnitude is below `KV_SMALLEST` has scale 0 and
codes 0.

"q4_0" has a float16 scale `d` for each `Q4_GROUP` numbers along the head dimension. With `m` the number of largest
magnitude in a group, the first of several:

    d    = rn(m / -8) to float16
    t    = rn(x * rn(1 / d)), held within -8 and 8
    code = min(floor(rn(t + 8.5)), 15)

The code is read as `code - 8`; where `d` is 0, the code is 8. Byte `j` of a group's 16 has element `j` in its low four
bits and element `j + 16` in its high ones. That is llama.cpp's q4_0 but for one step: llama.cpp divides by `d` before
it rounds `d`.

A row, or a group, that holds a NaN or an infinity, or whose `d` leaves float16, has a NaN for its scale and codes of
zero: every element of it is read as NaN. No scale is an infinity. The contract leaves open which of the two zeros a
code of zero is read as: attention shows none of their signs.

Sampling
--------

The noise of a token comes from Threefry-2x32 in its partitionable form: `key(seed)`, then
`fold_in(absolute position of the token)`, then `fold_in(index of the sample)`. Each vocabulary entry has one Gumbel
variable

    g = -log(-log(u))

where `u` is the float32 in [0, 1) of the upper 23 of 32 random bits, and the smallest normal number in place of 0. The
token is the argmax of

    rn(max(rn(logit * (1 / temperature)), float32's lowest finite number) + g)

or of the logits where the temperature is 0. Ties go to the lowest id, and a NaN counts as the largest number. The
logprob is that of `log_softmax` of the logits, in the same bits.

A request may adjust its logits before temperature and filters. These steps come one after the other, each rounded:

1. repetition penalty `r`, for tokens of the prompt and generated ones: `x = rn(x * rn(1 / r))` where `x > 0`, else
   `x = rn(x * r)`;
2. frequency penalty `f`, for a token that was generated `c` times, 65535 at most: `x = rn(x - rn(f * c))`;
3. presence penalty `p`, for generated tokens: `x = rn(x - p)`;
4. logit biases `b`, for the tokens that have one: `x = rn(x + b)`;
5. tokens that would end a sample before it has `min_tokens` tokens: `x = -inf`;
6. tokens that a mask does not allow: `x = -inf`.

The host computes `rn(1 / r)`, so it has the same bits on every device. A prompt's tokens are never counted as generated
ones. Logprobs are those of the logits before these steps: what the model says of a token does not depend on how the
request chooses.

The sampling logprob of a token is its logprob under the distribution that tokens are drawn from: `log_softmax(s)`, in
the bits of `SOFTMAX_BLOCK`, of the adjusted logits `x` after temperature and filters,

    s = -inf where x is -inf or a filter removes the token, else
    s = max(rn(x * (1 / temperature)), float32's lowest finite number)

So a token that cannot be drawn has probability 0 and logprob -inf, although a -inf among the logits is held at the
lowest finite number where noise is added. A row without any other token has NaN. At temperature 1, without filters and
adjustments, the bits are those of the logprob. At temperature 0 the distribution lies on one token, the argmax of `x`
with its ties: the logprob is 0 there and -inf elsewhere.

Gradients of weights
--------------------

The gradient of a row, such as a token's hidden state, is computed from that row alone, as the row itself was. The
gradient of a weight, a bias, a norm's weight, a sink or an embedding is a sum over the tokens of a batch. Its order
depends on the batch's sequences alone, which are numbered:

1. Sequences are cut into contiguous *shards*, `GRADIENT_SHARDS` unless the run says otherwise; shard `s` of `G` has the
   sequences from `floor(s * n / G)` to `floor((s + 1) * n / G)` of `n`.
2. Inside a shard, tokens are added in ascending order, sequence by sequence, into one float32 accumulator per element:
   `WEIGHT_GRADIENT_TOKENS` of them in one step, and every sequence begins a new step. The accumulator begins at zero,
   and goes on from one microbatch to the next. What fills up a sequence has gradients of exact zeros, so steps of
   nothing else change no bit. A matrix unit adds the tokens of a step of a matrix; those of a bias or of a norm's
   weight are added left to right, with the heads of a token as rows of their own. Rows of an embedding add one token at
   a time. A sink adds what a backend makes of a sequence's tokens, each sequence apart.
3. Shards are added as a balanced binary tree: neighbours in pairs, then the results again in pairs, until one is left.
4. A table that is both an embedding and a head has a sum for each, and the two are added at the end.

So microbatches, padding, the packing of sequences into rows, rematerialization and devices are schedules.

Collectives
-----------

A sum over the devices of a mesh is the sum of their terms in the order of the axis, added in float32 as a balanced
binary tree and rounded once: neighbours in pairs, then the results again in pairs, until one is left; a last one
without a neighbour waits. Terms are moved between devices, never added on the way.
"""

from typing import Final

import jax.numpy as jnp
import numpy as np

CONTRACT_VERSION: Final = 3
"""The number of this set of contracts. Results with equal numbers, on equal devices and releases, have equal bits."""

INPUT_DTYPES: Final = ("bfloat16", "float16", "float32")
"""The dtypes of the arrays that an operation takes."""

ACCUMULATOR: Final = jnp.float32
"""The dtype of every sum until its result is written."""

# --- matrix products --------------------------------------------------------------------------------------------------

WEIGHT_GRADIENT_TOKENS: Final = 16
"""The tokens that one step of the matrix unit adds to the accumulator of a weight's gradient, in ascending order."""

TPU_ROW_TILE: Final = 128
"""The tokens of a tile on TPUs. The tile meets `TPU_K_STEP` elements of K in one product, which is then added to the
accumulator.

The compiler chooses what the matrix unit does inside one product by the product's shape, so bits depend on the shape.
By the published peaks of v5e, v5p, v6e and TPU7x a bfloat16 weight takes longer to arrive than to meet 128 tokens, so
one token costs no more time than it must; 256 tokens would cost a v5p half as much again."""

TPU_K_STEP: Final = 512
"""The elements of K in one product on TPUs; see `TPU_ROW_TILE`."""

GRADIENT_SHARDS: Final = 8
"""The shards of a batch whose gradients are added apart and then as a tree, unless a run says otherwise: as many
devices as can share a batch."""

# --- sums of rows -----------------------------------------------------------------------------------------------------

LANES: Final = 512
"""The lanes of a row sum.

1. Lane `j` adds the elements `j, j + LANES, j + 2 * LANES, ...` in ascending order. A lane without elements is zero.
2. Each `LANE_GROUP` of neighbouring lanes is added left to right.
3. Neighbouring sums are added in pairs, then the results again in pairs, until one is left."""

LANE_GROUP: Final = 4
"""The neighbouring lanes that a row sum adds left to right: as many as one thread of a GPU loads at once."""

SOFTMAX_BLOCK: Final = 4096
"""The elements of a block of softmax, which cuts its axis at multiples of this number.

With `e(x, m) = exp2(rn(rn(x - m) * LOG2_E))`, block `b` of a row `x` has

    m_b = the maximum of its elements, but at least float32's lowest finite number
    l_b = the row sum of e(x, m_b)

and the row has `m`, the largest of the `m_b`, and `l`, the sum of `rn(l_b * e(m_b, m))`, blocks added left to right.
Then

    logsumexp   = rn(m + log(l))
    log_softmax = rn(rn(x - m) - log(l))
    softmax     = rn(e(x, m) * (1 / l))

with the device's own exp2, log and reciprocal, whose last places may differ between devices and backends. A NaN or a
+inf makes its whole row NaN, and so does a row of nothing but -inf; any other -inf counts as probability 0. Where a
gradient needs the sum of a row, it adds the row sums of its blocks left to right."""

LOG2_E: Final = np.float32(np.log2(np.e))
"""log2(e), rounded once."""

# --- attention --------------------------------------------------------------------------------------------------------

KV_BLOCK: Final = 128
"""The keys of a block of attention, cut at absolute positions that are multiples of this number. It is also the number
of tokens in a page."""

KEY_LANES: Final = 8
"""The lanes of each group when the weights `p` of a block are added.

Key `64 u + 16 g + 8 e + r` of the block is in lane `r` of group `g`.

1. Each lane of each group adds its four keys in ascending order.
2. The groups of a lane are added in ascending order.
3. Neighbouring lanes are added in pairs, then the results again in pairs, until one is left.

So a GPU adds what its threads hold of the matrix unit's result before they exchange anything, whether keys are the
columns of that result (prefill) or its rows (decode)."""

KEY_GROUPS: Final = 4
"""The groups of keys in a block; see `KEY_LANES`."""

SPAN_BLOCKS: Final = 8
"""The blocks of a span, cut at absolute positions that are multiples of `SPAN_BLOCKS * KV_BLOCK` tokens.

A schedule that splits a sequence stores a result for each part that may not be merged yet. With many columns of values
the results of single blocks are larger than the keys that they were made of; those of spans are not."""

SPAN_WIDTH: Final = 256
"""The most columns of values whose blocks are merged without spans."""

QUERY_UNIT: Final = 8
"""Where queries of several requests are packed into one array, each request begins at a multiple of this number."""

LOWEST_MAXIMUM: Final = -1e30
"""The floor of a row's maximum in the log2 domain. It keeps `-inf - -inf` out of fully masked blocks."""

TPU_ATTENTION_ROWS: Final = 64
"""The rows of queries that meet a block of keys in one product on TPUs. Bits depend on this shape as they do on
`TPU_ROW_TILE`."""

# --- gated delta rule -------------------------------------------------------------------------------------------------

DELTA_CHUNK: Final = 64
"""The tokens of a chunk of the gated delta rule, cut at absolute positions that are multiples of this number. It
divides `KV_BLOCK`, so a request can be resumed where a page ends."""

# --- quantized keys and values ----------------------------------------------------------------------------------------

KV_LARGEST_CODE: Final = {"int8": 127.0, "fp8_e4m3": 448.0}
"""The largest magnitude of a code, for each kind of quantization with one scale for each token and head."""

KV_SMALLEST: Final = 2.0**-100
"""A row whose largest magnitude is below this number is stored as zeros: its scale would leave float32's normal
numbers."""

Q4_GROUP: Final = 32
"""The numbers that share a scale in "q4_0". Head sizes are multiples of it."""

# --- sampling ---------------------------------------------------------------------------------------------------------

PRNG: Final = "threefry2x32"
"""JAX's name for the generator of random bits, Threefry-2x32 (Salmon et al. 2011)."""

# --- the portable backend ---------------------------------------------------------------------------------------------

PORTABLE_ROWS: Final = 16
"""The rows of a portable tile. XLA compiles the tile, so bits depend on its shape."""
