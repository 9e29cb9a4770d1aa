"""The contracts: the order in which each operation adds, and the places where it rounds.

A *contract* fixes the order of additions and the places of rounding; a *schedule* says which processor does the work
when. Everything in this file belongs to a contract. Nothing here depends on the batch, on the number of tokens in a
call or on anything else that varies at run time, and no schedule may contradict it. Changing a number or a formula
here changes bits and raises `CONTRACT_VERSION`.

Bits may differ between kinds of device: the contracts fix the order of additions, and the hardware fixes what one step
of its matrix unit adds. On one GPU they may differ between backends: `wgmma` (Hopper) and `mma.sync.m16n8k16` (every
NVIDIA GPU) both take K in steps of 16, but are different instructions. The backend is part of the fingerprint.

In the formulas `rn` rounds to the nearest number, ties to even, in float32 unless another dtype is given.
`fma(a, b, c)` is `a * b + c` with one rounding. Sums are kept in `ACCUMULATOR` and rounded once, when the result is
written.

Matrix products
---------------

    y[m, n] = act(sum over k ascending of x[m, k] * w[k, n] + bias[n]) + residual[m, n]

Each element has one accumulator, and K is not split. The epilogue works on the float32 accumulator and ends with one
rounding. With a `Clamp`, gate and up become `g = min(gate, limit)` and `u = max(min(up, limit), -limit)`; the activated
sum is `rn(rn(u + 1) * rn(act(rn(slope * g)) * rn(1 / slope)))`. With a soft cap, the activated sum `z` becomes
`cap * tanh(z / cap)` before the residual. A gradient evaluates the derivative of the epilogue at the biased sums
rounded to x's dtype, and rounds the gradient of these sums to x's dtype.
See also `WEIGHT_GRADIENT_TOKENS`, `TPU_ROW_TILE` and `TPU_K_STEP`.

Quantized weights
-----------------

The format of a weight whose activations are plain is a schedule. The product has the bits of one with the plain weight

    w = rnd(rn(number * scale))

where `rnd` rounds to x's dtype and `number` is a code's number, less its zero point. K ascends in the order of the
file.

Products with quantized activations have a contract of their own. A group of columns, `FP8_BLOCK` or the weight's own
number of them, or the whole row, is quantized alone, from `x` as rounded to its dtype:

    s    = rn(max |x| / FP8_LARGEST), or 1 where that is 0; or the checkpoint's scale, if it is static
    code = rn(x / s), clamped to +-FP8_LARGEST, to the nearest e4m3 number, ties to even

Both are true divisions. Columns after the last one of a row are zeros. With `P_b` the sum of block `b`, columns
ascending, of products of numbers, from a fresh accumulator, blocks ascending:

    in groups:  acc = fma(P_b, rn(s_x * s_w), acc), with the scales of the row's group and of the weight's block
    by rows:    acc = rn(acc + P_b), and at the end rn(s_x * rn(s_w * acc))

On Hopper GPUs `P_b` is the matrix unit's sum for e4m3 operands, which has fewer bits than its sums of 16-bit numbers,
if blocks have `FP8_BLOCK` columns. Blocks of other sizes, and all blocks elsewhere, are sums of 16-bit numbers, which
hold the numbers of codes exactly. So which sum `P_b` is depends on the backend and on the weight's format alone.

The epilogue of a matrix product follows. The gradient of x is the gradient of a product with the widened weight; the
derivative of the epilogue is evaluated at the biased sums of this contract. Codes and scales have no gradient. The
up-projection of latent attention is always widened, since its keys and values are plain.

Adapters
--------

A row with an adapter of the factors A `[R, K]`, B `[N, R]` and `scale` `[N]` has the sum

    u[r]   = rnd(sum over k ascending of x[k] * A[r, k])
    d[n]   = sum over r ascending of u[r] * B[n, r], a fresh accumulator
    acc[n] = fma(scale[n], d[n], rn(sum over k ascending of x[k] * w[k, n] + bias[n]))

before the epilogue; `rnd` rounds to x's dtype. A row without an adapter has the plain product's sum. Ranks
of zeros change no bit. `scale` belongs to an adapter and an output. With g the gradient of the sums, rounded as above,
`h = rnd(rn(scale[n] * g[n]))` and `v[r] = rnd(sum over n ascending of h[n] * B[n, r])`, the gradients are
`rnd(rn(sum over n of g[n] * w[k, n] + sum over r of v[r] * A[r, k]))` for x, each sum with its own accumulator, the sum
over tokens of `v[r] * x[k]` for A, and of `h[n] * u[r]` for B; tokens as in `WEIGHT_GRADIENT_TOKENS`. The weight has
none. See `RANK_STEP`.

Sums of rows
------------

`rms_norm`, `layer_norm`, `softmax`, `log_softmax` and `logsumexp` add a row in the order of `LANES` and `LANE_GROUP`.
The softmax family works on blocks of the row; `SOFTMAX_BLOCK` has its formulas.

A layer norm is `rnd(rn(rn(rn(c * s) * w) + b))`, where `rnd` rounds to x's dtype, `c = rn(x - rn(sum(x) / D))`, and
`s = rsqrt(rn(rn(sum(c^2) / D) + eps))`; both sums are row sums. A weighted sum of rows adds `rn(x * f)` in the order
of the rows, and is rounded to x's dtype.

Single elements
---------------

`add` is `rn(x + y)`, and `scale` is `rn(x * c)` with the constant `c` first rounded to x's dtype. A model with norms
between a projection and the residual stream adds by `add`, and by `rms_norm` with a residual.

Pooling
-------

The mean of a prompt's hidden states is `rn(s * rn(1 / n))`, with `s` their float32 sum, tokens added in ascending order
from zero, each step rounded, and `rn(1 / n)` computed by the host. An embedding is `l2_norm`, in float32, of its first
columns with zeros in place of the others. Logits of classes are float32 sums that are not rounded; the logit of two
tokens is the difference of theirs. Scores are `softmax` or `sigmoid` of logits.

Attention
---------

A query row processes the keys in blocks of `KV_BLOCK`. For block `b`, with `c = log2(e) * scale` rounded once and
`s = q . k` in float32, -inf where masked:

    m_b = max(rn(max(s) * c), LOWEST_MAXIMUM)
    p   = exp2(fma(s, c, -m_b))
    l_b = the sum of p in the order of KEY_LANES and KEY_GROUPS
    O_b = rn(p) . V from a fresh accumulator, p rounded to V's dtype

Blocks merge left to right, with `m' = max(m, m_b)`, `a = exp2(m - m')` and `b = exp2(m_b - m')`:

    O = fma(O, a, rn(O_b * b))
    l = fma(l, a, rn(l_b * b))

The result is `O * (1 / l)`; a zero is written as +0. A block whose keys are all masked adds an exact zero, so a
schedule may skip or visit it.

If values have more than `SPAN_WIDTH` columns, blocks merge left to right within spans of `SPAN_BLOCKS`, each span
starting from `m = LOWEST_MAXIMUM` and zeros. The spans' `m`, `l` and `O` then merge left to right by the same formulas.

With a soft cap or ALiBi, `s` is first replaced by `rn(s * scale)`, and `c` is log2(e). A soft cap then replaces `s` by

    cap * (1 - 2 / (1 + exp2(rn(s * rn(2 * LOG2_E / cap)))))

with a rounding after every step. This is `cap * tanh(s / cap)` in terms of the exponential that every device has; its
gradient is `1 - tanh^2`. ALiBi then replaces `s` by `fma(slope, j - i, s)`, for the key at position `j` and the query
at position `i`.

Latent attention
----------------

The key of a token is its normalized latent `c` and its rotated columns `k_r`; the value is `c`. Every phase uses the
absorbed form. Head `h` has weights `K_h`, from latents to the unrotated columns, and `V_h`, from latents to values:

    q' = the matrix product of the unrotated columns and K_h, n ascending, rounded once
    s  = q' . c + q_r . k_r in one accumulator, the columns of c before the columns of k_r
    o' = the attended latents, rounded once as by attention
    o  = the matrix product of o' and V_h, columns of the latent ascending, rounded once

A column that is both key and value has the gradient `rn(dk) + dv`, added in float32 and rounded once.

Experts in groups
-----------------

A router's logits are float32 sums that are not rounded. DeepSeek-V3's router chooses by ranks, which are corrected
scores, and weighs by the uncorrected scores:

    score  = 1 / (1 + exp(-logit)), rounded after every step, with the device's own exp and reciprocal
    rank   = rn(score + correction)
    count  = rn(best rank of a group + its second best)
    weight = rn(rn(score * (1 / rn(sum of the chosen scores + 1e-20))) * factor), with the same reciprocal

A token keeps the groups with the highest counts, and chooses the experts of the highest ranks in them; among equals,
the lower number wins. The sum adds the chosen experts in ascending order.

Gated delta rule
----------------

A request's tokens are divided into chunks at absolute positions that are multiples of `DELTA_CHUNK`. Token `t` of a
chunk needs the state `S` before the chunk (float32, initially zero), its own input, and the rows of the chunk's earlier
tokens: normalized keys `k`, updates `u` and sums of decays `G`. So bits depend only on `t` and the request, and not on
how the request is divided into calls. For a value head and its key head, with `c = K^(-1/2)` rounded once and `rnd`
rounding to the dtype of q, k and v:

    G_t  = rn(G_(t-1) + rn(g_t * LOG2_E)), with 0 before the chunk
    r_t  = rn(beta_t * rn(v_t - rn(exp2(G_t) * (k_t . rnd(S)))))
    a_tj = rn(rn(beta_t * (k_t . k_j)) * exp2(rn(G_t - G_j)))             for j < t
    u_t  = rnd(r_t - sum over j < t, ascending, of a_tj * u_j), each step an fma
    p_tj = rn(rn(c * (q_t . k_j)) * exp2(rn(G_t - G_j)))                  for j <= t, else 0
    h    = rnd(p), l = rnd(p - h)
    o_t  = rnd(fma(exp2(G_t), rn(c * (q_t . rnd(S))), sum of h_tj * u_j, then of l_tj * u_j))

The state after the chunk, whose last token is `e`, is

    S' = fma(exp2(G_e), S, sum over j ascending of k_j * rnd(u_j * exp2(rn(G_e - G_j))))

Sums over K and over a chunk's tokens run in ascending order, each in a fresh accumulator. A sum over tokens always has
`DELTA_CHUNK` terms: exact zeros follow `t`. The gradients are the derivatives of these formulas without the roundings.
They are computed separately for each request, chunk by chunk from the last to the first, in float32, and rounded once.

Queries and keys are first divided by their length: `rnd(x * (1 / sqrt(sum(x^2) + eps)))`, a row sum. The decay of a
token is `g = rn(-exp(A) * softplus(rn(a + dt)))`, its rate `beta = 1 / (1 + exp(-b))`, both float32. The norm that
follows is `rnd(rn(rn(x * s) * w) * silu(z))`, with the row sum of `rms_norm` in `s`. A sigmoid gate is
`rnd(x * sigmoid(z))`.

A depthwise causal convolution of `n` taps adds the taps in ascending order, starting from zero, each step an fma, and
is rounded after its activation: `rnd(silu(sum of w_i * x_(t - n + 1 + i)))`. The last tap multiplies the token itself.
Inputs before position 0 are exact zeros.

Quantized keys and values
-------------------------

Quantized pages hold codes and scales instead of numbers. A read gives

    value = rn(rn(float32(code) * float32(scale)))

rounded first to float32, then to q's dtype. Attention then has the same bits as over pages of these values, in every
phase.

"int8" and "fp8_e4m3" have a float32 scale for each token and head. For a row `x` of K numbers, with `L` the
`KV_LARGEST_CODE`, 127 or 448:

    scale = rn(max |x| * rn(1 / L))
    t     = rn(x * rn(1 / scale)), clamped to [-L, L]
    code  = t to the nearest integer or float8_e4m3fn, ties to even

where `1 / scale` is the device's own reciprocal. A row whose largest magnitude is below `KV_SMALLEST` has scale 0 and
codes 0.

"q4_0" has a float16 scale `d` for each `Q4_GROUP` numbers along the head dimension. With `m` the number of largest
magnitude in a group, the first if there are several:

    d    = rn(m / -8) to float16
    t    = rn(x * rn(1 / d)), clamped to [-8, 8]
    code = min(floor(rn(t + 8.5)), 15)

The code is read as `code - 8`; where `d` is 0, the code is 8. Byte `j` of a group's 16 has element `j` in its low four
bits and element `j + 16` in its high four bits. This is llama.cpp's q4_0 except for one step: llama.cpp divides by `d`
before it rounds `d`.

A row or group that holds a NaN or an infinity, or whose `d` is out of float16's range, has a NaN as its scale and codes
of zero, so all its elements are read as NaN. No scale is an infinity. The contract does not say whether a code of zero
is read as +0 or -0: attention's results do not show the sign.

Sampling
--------

The noise of a token is a function of the request's seed, its prompt, the sample's index, the token's absolute
position and its id. It comes from Philox-4x32 with 10 rounds (Salmon et al. 2011). Once for a sample, the host computes

    prompt = SHA-256(number of token ids | token ids | length and digest of each image)
    words  = the first four of SHA-256(seed | index of the sample | prompt)

with token ids as int32, all other numbers as uint64, and words as uint32, all little-endian. The token ids are the
prompt's alone: generated tokens do not count, so a request that is resumed or computed again keeps its noise. Words 0
and 1 are Philox's key. With `L` the `NOISE_LANES` and `W` the `NOISE_WORDS`, the noise of token id `t` is word
`(t // L) % W` of the result for the counter

    (t // (L * W)) * L + t % L,  absolute position of the token,  word 2,  word 3

Each vocabulary entry has one Gumbel variable

    g = -log(e),    e = v * (1 + v / 2)    where b < 2^23, with v = (b + 1/2) * 2^-32
                    e = -log(u)            otherwise, with u = 1 - (k + 1/2) * 2^-23

for 32 random bits `b`: `k` is the upper 23 of them, and `e` is an exponential variable. `u` and `v` are exact float32.
The smallest `e`, which unlikely tokens need to be chosen, have all random bits, and lack less than 2^-19 of their
value. The token is the argmax of

    rn(max(rn(logit * (1 / temperature)), float32's lowest finite number) + g)

or of the logits if the temperature is 0. Ties go to the lowest id, and a NaN counts as the largest number. The logprob
has the bits of `log_softmax` of the logits.

A request may adjust its logits before temperature and filters. These steps apply in sequence, each rounded:

1. repetition penalty `r`, for tokens of the prompt and generated ones: `x = rn(x * rn(1 / r))` where `x > 0`, else
   `x = rn(x * r)`;
2. frequency penalty `f`, for a token that was generated `c` times, 65535 at most: `x = rn(x - rn(f * c))`;
3. presence penalty `p`, for generated tokens: `x = rn(x - p)`;
4. logit biases `b`, for the tokens that have one: `x = rn(x + b)`;
5. tokens that would end a sample before it has `min_tokens` tokens: `x = -inf`;
6. tokens that a mask does not allow: `x = -inf`.

The host computes `rn(1 / r)`, so it has the same bits on every device. A prompt's tokens never count as generated.
Logprobs are computed from the logits before these steps: the model's logprob of a token does not depend on how the
request samples.

The sampling logprob of a token is its logprob under the distribution that tokens are drawn from: `log_softmax(s)`, in
the bits of `SOFTMAX_BLOCK`, of the adjusted logits `x` after temperature and filters,

    s = -inf where x is -inf or a filter removes the token, else
    s = max(rn(x * (1 / temperature)), float32's lowest finite number)

So a token that cannot be drawn has probability 0 and logprob -inf, although a -inf among the logits is clamped to the
lowest finite number before noise is added. A row without any other token has NaN. At temperature 1, without filters
and adjustments, the bits are equal to the logprob's. At temperature 0 one token has all the probability, the argmax of
`x` with the same rule for ties: its logprob is 0, and -inf elsewhere.

Gradients of weights
--------------------

The gradient of a row, such as a token's hidden state, depends on that row alone, like the row itself. The gradient of a
weight, a bias, a norm's weight, a sink or an embedding is a sum over the tokens of a batch. Its order depends only on
the batch's sequences, which are numbered:

1. Sequences are divided into contiguous *shards*, `GRADIENT_SHARDS` by default; shard `s` of `G` has the sequences from
   `floor(s * n / G)` to `floor((s + 1) * n / G)` of `n`.
2. Within a shard, tokens are added in ascending order, sequence by sequence, to one float32 accumulator per element:
   `WEIGHT_GRADIENT_TOKENS` in one step. Every sequence begins a new step. The accumulator begins at zero and continues
   from one microbatch to the next. Padding has gradients of exact zeros, so steps of padding change no bit. For a
   matrix, the matrix unit adds the tokens of a step; for a bias or a norm's weight they are added left to right, with
   the heads of a token as separate rows. Rows of an embedding add one token at a time. A sink adds one term per
   sequence, which the backend computes from the sequence's tokens.
3. Shards are added as a balanced binary tree: neighbours in pairs, then the results again in pairs, until one is left.
4. A table that is both an embedding and a head has a sum for each, and the two are added at the end.

So microbatches, padding, the packing of sequences into rows, rematerialization and devices are schedules.

Collectives
-----------

A sum over the devices of a mesh adds their terms in the order of the axis, in float32, as a balanced binary tree, and
rounds once: neighbours in pairs, then the results again in pairs, until one is left; a last one without a neighbour
passes to the next round. Terms are moved between devices and never added in transit.
"""

from typing import Final

import jax.numpy as jnp
import numpy as np

CONTRACT_VERSION: Final = 6
"""The version of this set of contracts. Equal versions, devices and releases give equal bits."""

INPUT_DTYPES: Final = ("bfloat16", "float16", "float32")
"""The dtypes that operations accept."""

ACCUMULATOR: Final = jnp.float32
"""The dtype of all sums until the result is written."""

# --- matrix products --------------------------------------------------------------------------------------------------

WEIGHT_GRADIENT_TOKENS: Final = 16
"""Tokens that one step of the matrix unit adds to the accumulator of a weight's gradient, in ascending order."""

RANK_STEP: Final = 16
"""Ranks of an adapter that one product adds. Unused ranks are zeros."""

TPU_ROW_TILE: Final = 128
"""Tokens of a tile on TPUs. One product multiplies the tile by `TPU_K_STEP` elements of K and is then added to the
accumulator.

The compiler chooses the matrix unit's order inside one product by the product's shape, so bits depend on the shape.
By the published peaks of v5e, v5p, v6e and TPU7x, loading a bfloat16 weight takes longer than multiplying it by 128
tokens, so a single token costs nothing extra; with 256 tokens it would take 50% longer on a v5p."""

FP8_BLOCK: Final = 128
"""Columns whose e4m3 products are added before their sum is added to a float32 accumulator.

Hopper's matrix unit keeps about 14 bits when it adds products of e4m3 numbers (DeepSeek-AI 2024, section 3.3.2).
Relative to the sum of magnitudes, the error of a block was at most 4.4e-4 for normal numbers and 1.04e-3 for numbers of
all exponents on an H200 (`python -m benchmarks fp8_products`)."""

FP8_LARGEST: Final = 448.0
"""The largest e4m3 number."""

TPU_K_STEP: Final = 512
"""Elements of K in one product on TPUs; see `TPU_ROW_TILE`."""

GRADIENT_SHARDS: Final = 8
"""Default number of shards of a batch whose gradients are added separately and then as a tree: the maximum number of
devices that can share a batch."""

# --- sums of rows -----------------------------------------------------------------------------------------------------

LANES: Final = 512
"""Lanes of a row sum.

1. Lane `j` adds the elements `j, j + LANES, j + 2 * LANES, ...` in ascending order. A lane without elements is zero.
2. Each group of `LANE_GROUP` neighbouring lanes is added left to right.
3. Neighbouring sums are added in pairs, then the results again in pairs, until one is left."""

LANE_GROUP: Final = 4
"""Neighbouring lanes that a row sum adds left to right: the number that one GPU thread loads at once."""

SOFTMAX_BLOCK: Final = 4096
"""Elements of a block of softmax. Blocks begin at multiples of this number.

With `e(x, m) = exp2(rn(rn(x - m) * LOG2_E))`, block `b` of a row `x` has

    m_b = the maximum of its elements, but at least float32's lowest finite number
    l_b = the row sum of e(x, m_b)

For the row, `m` is the largest `m_b`, and `l` is the sum of `rn(l_b * e(m_b, m))`, blocks added left to right. Then

    logsumexp   = rn(m + log(l))
    log_softmax = rn(rn(x - m) - log(l))
    softmax     = rn(e(x, m) * (1 / l))

with the device's own exp2, log and reciprocal, whose last places may differ between devices and backends. A NaN or a
+inf makes its whole row NaN; a row of nothing but -inf is NaN too; any other -inf has probability 0. A gradient that
needs the sum of a row adds the row sums of its blocks left to right."""

LOG2_E: Final = np.float32(np.log2(np.e))
"""log2(e), rounded once."""

# --- attention --------------------------------------------------------------------------------------------------------

KV_BLOCK: Final = 128
"""Keys of a block of attention, and tokens of a page. Blocks begin at absolute positions that are multiples of it."""

KEY_LANES: Final = 8
"""Lanes of each group when the weights `p` of a block are added.

Key `64 u + 16 g + 8 e + r` of the block is in lane `r` of group `g`.

1. Each lane of each group adds its four keys in ascending order.
2. The groups of a lane are added in ascending order.
3. Neighbouring lanes are added in pairs, then the results again in pairs, until one is left.

So each GPU thread adds its own elements of the matrix unit's result before threads exchange sums, whether keys are the
columns of that result (prefill) or its rows (decode)."""

KEY_GROUPS: Final = 4
"""Groups of keys in a block; see `KEY_LANES`."""

SPAN_BLOCKS: Final = 8
"""Blocks of a span. Spans begin at absolute positions that are multiples of `SPAN_BLOCKS * KV_BLOCK` tokens.

A schedule that splits a sequence stores a result for each part until it can merge them. With many columns of values,
the results of single blocks are larger than the keys they were computed from; the results of spans are not."""

SPAN_WIDTH: Final = 256
"""Maximum number of columns of values whose blocks merge without spans."""

QUERY_UNIT: Final = 8
"""Alignment of packed queries: in an array of several requests, each request begins at a multiple of this number."""

LOWEST_MAXIMUM: Final = -1e30
"""Lower bound of a row's maximum in the log2 domain. It avoids `-inf - -inf` in fully masked blocks."""

TPU_ATTENTION_ROWS: Final = 64
"""Query rows that one product multiplies by a block of keys on TPUs. Bits depend on it as on `TPU_ROW_TILE`."""

# --- gated delta rule -------------------------------------------------------------------------------------------------

DELTA_CHUNK: Final = 64
"""Tokens of a chunk of the gated delta rule. Chunks begin at absolute positions that are multiples of it. It divides
`KV_BLOCK`, so a request can resume at the end of a page."""

# --- quantized keys and values ----------------------------------------------------------------------------------------

KV_LARGEST_CODE: Final = {"int8": 127.0, "fp8_e4m3": 448.0}
"""The largest magnitude of a code, for quantizations with one scale per token and head."""

KV_SMALLEST: Final = 2.0**-100
"""A row whose largest magnitude is below this number is stored as zeros: its scale would be subnormal in float32."""

Q4_GROUP: Final = 32
"""Numbers that share a scale in "q4_0". Head sizes are multiples of it."""

# --- sampling ---------------------------------------------------------------------------------------------------------

NOISE_WORDS: Final = 4
"""Words of a result of Philox; see `NOISE_LANES`."""

NOISE_LANES: Final = 128
"""Distance of the token ids that share a result of Philox: the threads of a warpgroup, and the lanes of a TPU register.
So a thread or a lane uses all words of its results."""

# --- the portable backend ---------------------------------------------------------------------------------------------

PORTABLE_ROWS: Final = 16
"""Rows of a tile of the portable backend. XLA compiles the tile, so bits depend on its shape."""
