"""The contracts of `detjax.contract` written a second time, in NumPy, one addition after another.

Nothing here calls the package: constants are written as numbers, so that a changed constant shows as changed bits. What
the contracts leave to the device (exp2, log, the reciprocal, the products of a matrix unit) is a parameter, or the
inputs of a test are chosen such that it does not matter.
"""

import dataclasses
import functools
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence

import ml_dtypes
import numpy as np

LANES = 512
LANE_GROUP = 4
NOISE_LANES = 128
SOFTMAX_BLOCK = 4096
KV_BLOCK = 128
SPAN_BLOCKS = 8
SPAN_WIDTH = 256
LOWEST = np.finfo(np.float32).min
LOG2_E = np.float32(1.4426950408889634)

type Elementwise = Callable[[np.ndarray], np.ndarray]
type State = tuple[np.ndarray, np.ndarray | np.floating, np.ndarray | np.floating]
type MultiplyAdd = Callable[[np.ndarray, np.ndarray | np.float32, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class DeviceFunctions:
    """The functions whose last bits the contracts leave to the device.

    `exp2_of_product(x, factor)` is `exp2(rn(x * factor))` on a GPU. XLA's CPU compiler fuses the product with the first
    subtraction inside exp2, so the rounding in between does not happen there.
    """

    exp2: Elementwise
    exp2_of_product: Callable[[np.ndarray, np.float32], np.ndarray]
    log: Elementwise
    rsqrt: Elementwise


# --- matmul -----------------------------------------------------------------------------------------------------------


def matmul(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Products `[M, N]` of `x [M, K]` and `w [K, N]`: one float32 accumulator per element, K ascending, not fused."""
    total = np.zeros((len(x), w.shape[1]), np.float32)
    for k in range(x.shape[1]):
        total = total + x[:, k : k + 1].astype(np.float32) * w[k].astype(np.float32)
    return total


# --- rows -------------------------------------------------------------------------------------------------------------


def row_sum(x: np.ndarray) -> np.ndarray:
    """Sums `[R, 1]` of float32 rows: lanes in ascending order, then groups of lanes, then pairs."""
    lanes = np.zeros((len(x), LANES), np.float32)
    for start in range(0, x.shape[1], LANES):
        part = x[:, start : start + LANES]
        lanes[:, : part.shape[1]] += part
    sums = np.zeros((len(x), LANES // LANE_GROUP), np.float32)
    for group in range(LANES // LANE_GROUP):
        total = lanes[:, group * LANE_GROUP]
        for lane in range(1, LANE_GROUP):
            total = total + lanes[:, group * LANE_GROUP + lane]
        sums[:, group] = total
    while sums.shape[1] > 1:
        sums = np.stack([sums[:, 2 * i] + sums[:, 2 * i + 1] for i in range(sums.shape[1] // 2)], axis=1)
    return sums


def added(x: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """`x + residual`, added in float32 and rounded once, to x's dtype."""
    return (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)


def rms_scale(h: np.ndarray, eps: float, device: DeviceFunctions) -> np.ndarray:
    """The factors `[R, 1]` that normalize the rows `h`."""
    wide = h.astype(np.float32)
    # XLA replaces the division by a constant by a product with its reciprocal.
    mean = row_sum(wide * wide) * (np.float32(1) / np.float32(h.shape[1]))
    return device.rsqrt(mean + np.float32(eps))


def scaled_rows(h: np.ndarray, weight: np.ndarray, scale: np.ndarray, offset: float) -> np.ndarray:
    """The normalized rows in h's dtype: `rn(rn(h * scale) * rn(weight + offset))`."""
    return ((h.astype(np.float32) * scale) * (weight.astype(np.float32) + np.float32(offset))).astype(h.dtype)


def softmax_statistics(x: np.ndarray, device: DeviceFunctions) -> tuple[np.ndarray, np.ndarray]:
    """The maximum `m` and the sum `l`, each `[R, 1]`, of rows of any dtype."""
    x = x.astype(np.float32)
    maxima, sums = [], []
    for start in range(0, x.shape[1], SOFTMAX_BLOCK):
        block = x[:, start : start + SOFTMAX_BLOCK]
        m = np.maximum(block.max(axis=1, keepdims=True), LOWEST)
        maxima.append(m)
        sums.append(row_sum(device.exp2_of_product(block - m, LOG2_E)))
    m = np.max(maxima, axis=0)
    total = np.zeros_like(m)
    for block_maximum, block_sum in zip(maxima, sums, strict=True):
        total = total + block_sum * device.exp2_of_product(block_maximum - m, LOG2_E)
    return m, total


# --- attention --------------------------------------------------------------------------------------------------------


def block_sum(p: np.ndarray) -> np.ndarray:
    """Sums `[rows]` of the weights `[rows, 128]` of a block: key `64 u + 16 g + 8 e + r` in lane `r` of group `g`."""
    groups = np.zeros((len(p), 4, 8), np.float32)
    for g in range(4):
        for r in range(8):
            keys = [64 * u + 16 * g + 8 * e + r for u in range(2) for e in range(2)]
            total = p[:, keys[0]]
            for key in keys[1:]:
                total = total + p[:, key]
            groups[:, g, r] = total
    lanes = ((groups[:, 0] + groups[:, 1]) + groups[:, 2]) + groups[:, 3]
    while lanes.shape[1] > 1:
        lanes = np.stack([lanes[:, 2 * i] + lanes[:, 2 * i + 1] for i in range(lanes.shape[1] // 2)], axis=1)
    return lanes[:, 0]


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The keys that a query sees, and the transformation of scores."""

    scale: float
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    alibi_slope: float | None = None
    sink: float | None = None


@dataclasses.dataclass(frozen=True)
class Products:
    """The device's products and sums.

    Attributes:
        dot: products of two float32 matrices, from a fresh accumulator.
        exponent: `x * y + z` in the exponents of the weights and in ALiBi's distances.
        output: `x * y + z` in the running output.
        total: `x * y + z` in the running sum of weights.
    """

    dot: Callable[[np.ndarray, np.ndarray], np.ndarray]
    exponent: MultiplyAdd
    output: MultiplyAdd
    total: MultiplyAdd


def fused(x: np.ndarray, y: np.ndarray | np.float32, z: np.ndarray) -> np.ndarray:
    """`x * y + z` with one rounding; a product of float32 numbers is exact in a wider type."""
    wide = np.longdouble
    return (wide(x) * wide(y) + wide(z)).astype(np.float32)


def unfused(x: np.ndarray, y: np.ndarray | np.float32, z: np.ndarray) -> np.ndarray:
    """`x * y + z` with two roundings."""
    return (x * y) + z


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    position: int,
    options: AttentionOptions,
    device: DeviceFunctions,
    products: Products,
) -> tuple[np.ndarray, np.float32]:
    """The output `[V]`, float32 before its last rounding, and the log2 normalizer of one query row over its keys.

    Args:
        q: the query `[K]`.
        k: the request's keys `[t, K]`, from position 0 on.
        v: their values `[t, V]`.
        position: the query's absolute position.
        options: masking and scores.
        device: functions that the contract leaves to the device.
        products: products that the contract leaves to the device.
    """

    def merged(state: State, part: State) -> State:
        m = np.maximum(state[2], part[2])
        a, b = device.exp2(state[2] - m), device.exp2(part[2] - m)
        return products.output(state[0], a, part[0] * b), products.total(state[1], a, part[1] * b), m

    empty = np.zeros(v.shape[1], np.float32), np.float32(0), np.float32(-1e30)
    state = empty if options.sink is None else (empty[0], np.float32(1), np.float32(options.sink) * LOG2_E)
    spans: dict[int, State] = {}
    for first, weights, block_maximum in _blocks(q, k, position, options, device, products):
        values = np.zeros((KV_BLOCK, v.shape[1]), np.float32)
        values[: len(v) - first] = v[first : first + KV_BLOCK].astype(np.float32)
        rounded_weights = weights.astype(v.dtype).astype(np.float32)
        block = products.dot(rounded_weights[None], values)[0], block_sum(weights[None])[0], block_maximum
        if v.shape[1] > SPAN_WIDTH:
            span = first // KV_BLOCK // SPAN_BLOCKS
            spans[span] = merged(spans.get(span, empty), block)
        else:
            state = merged(state, block)
    o, total, m = functools.reduce(merged, spans.values(), state)
    if total == 0:
        return np.zeros_like(o), np.float32(0)
    return o * (np.float32(1) / total) + np.float32(0), m + np.log2(total)


def _blocks(
    q: np.ndarray,
    k: np.ndarray,
    position: int,
    options: AttentionOptions,
    device: DeviceFunctions,
    products: Products,
) -> Iterator[tuple[int, np.ndarray, np.float32]]:
    """Yields the first key, the weights `[128]` and the maximum of each block that the query sees a key of."""
    shaped = options.soft_cap is not None or options.alibi_slope is not None
    c = LOG2_E if shaped else np.float32(np.log2(np.e) * options.scale)
    for first in range(0, len(k), KV_BLOCK):
        keys = np.arange(first, first + KV_BLOCK)
        block = np.zeros((KV_BLOCK, k.shape[1]), np.float32)
        block[: len(k) - first] = k[first : first + KV_BLOCK].astype(np.float32)
        s = products.dot(q.astype(np.float32)[None], block.T)[0]
        if shaped:
            s = s * np.float32(options.scale)
        if (cap := options.soft_cap) is not None:
            e = device.exp2_of_product(s, np.float32(2 * LOG2_E / cap))
            s = np.float32(cap) * (np.float32(1) - np.float32(2) / (np.float32(1) + e))
        if (slope := options.alibi_slope) is not None:
            s = products.exponent(np.float32(slope) * np.ones_like(s), (keys - position).astype(np.float32), s)
        visible = keys < len(k)
        if options.causal:
            visible &= keys <= position
        if options.window is not None:
            visible &= keys > position - options.window
        if not visible.any():
            continue
        s = np.where(visible, s, np.float32(-np.inf))
        block_maximum = np.maximum(s.max() * c, np.float32(-1e30))
        finite = np.where(visible, s, np.float32(0))
        exponents = np.where(
            visible, products.exponent(finite, c, -block_maximum * np.ones_like(s)), np.float32(-np.inf)
        )
        yield first, device.exp2(exponents), block_maximum


# --- quantized keys and values ----------------------------------------------------------------------------------------


def quantize_rows(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes `[R, K]` and scales `[R]` of "int8" or "fp8_e4m3" for finite rows `[R, K]`."""
    largest_code = {"int8": np.float32(127), "fp8_e4m3": np.float32(448)}[kind]
    x = x.astype(np.float32)
    largest = np.abs(x).max(axis=1)
    is_zero = largest < np.float32(2.0**-100)
    scale = np.where(is_zero, np.float32(1), largest) * (np.float32(1) / largest_code)
    t = np.clip(x * (np.float32(1) / scale)[:, None], -largest_code, largest_code)
    t = np.where(is_zero[:, None], np.float32(0), t)
    codes = np.rint(t).astype(np.int8) if kind == "int8" else t.astype(ml_dtypes.float8_e4m3fn)
    return codes, np.where(is_zero, np.float32(0), scale)


def quantize_groups(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes `[R, K / 2]` and float16 scales `[R, K / 32]` of "q4_0" for finite rows `[R, K]`."""
    rows, width = x.shape
    codes, scales = np.zeros((rows, width // 2), np.uint8), np.zeros((rows, width // 32), np.float16)
    for row in range(rows):
        for group in range(width // 32):
            numbers = x[row, 32 * group : 32 * group + 32].astype(np.float32)
            extreme = numbers[np.argmax(np.abs(numbers))]
            d = np.float16(extreme / np.float32(-8))
            code = np.full(32, 8, np.uint8)
            if d != 0:
                t = np.clip(numbers * (np.float32(1) / np.float32(d)), np.float32(-8), np.float32(8))
                code = np.minimum(np.floor(t + np.float32(8.5)), 15).astype(np.uint8)
            codes[row, 16 * group : 16 * group + 16] = code[:16] | (code[16:] << 4)
            scales[row, group] = d
    return codes, scales


# --- sampling ---------------------------------------------------------------------------------------------------------


def prompt_digest(tokens: list[int], images: tuple[bytes, ...] = ()) -> bytes:
    """The digest of a prompt's token ids and of its images' digests."""
    text = struct.pack(f"<Q{len(tokens)}i", len(tokens), *tokens)
    return hashlib.sha256(text + b"".join(struct.pack("<Q", len(image)) + image for image in images)).digest()


def noise_key(seed: int, prompt: bytes, sample_index: int) -> tuple[int, int, int, int]:
    """The four words of a sample's key."""
    return struct.unpack("<4I", hashlib.sha256(struct.pack("<QQ", seed, sample_index) + prompt).digest()[:16])


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32 with 10 rounds (Salmon et al. 2011) of a counter of four 32-bit words and a key of two."""
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        low, high = 0xFFFFFFFF, 32
        counter = [
            second >> high ^ counter[1] ^ key[0],
            second & low,
            first >> high ^ counter[3] ^ key[1],
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


def random_bits(key: Sequence[int], position: int, tokens: Iterable[int]) -> np.ndarray:
    """The 32 random bits of token ids at a position, as int64."""
    bits = []
    for token in map(int, tokens):
        span, place = divmod(token, 4 * NOISE_LANES)
        word, lane = divmod(place, NOISE_LANES)
        bits.append(philox([NOISE_LANES * span + lane, int(position), key[2], key[3]], [key[0], key[1]])[word])
    return np.array(bits, np.int64)


def gumbel(bits: np.ndarray, log: Callable[[np.ndarray], np.ndarray] = np.log) -> np.ndarray:
    """The float32 noise of random bits."""
    v = ((bits + 0.5) * 2.0**-32).astype(np.float32)
    u = (1 - ((bits >> 9) + 0.5) * 2.0**-23).astype(np.float32)
    return -log(np.where(bits < 2**23, v * (1 + v * np.float32(0.5)), -log(u)))


@dataclasses.dataclass(frozen=True)
class Adjustments:
    """The adjustments of a request's logits."""

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: dict[int, float] = dataclasses.field(default_factory=dict)
    barred: frozenset[int] = frozenset()
    allowed: frozenset[int] | None = None


def adjusted(logits: np.ndarray, prompt: list[int], generated: dict[int, int], request: Adjustments) -> np.ndarray:
    """One row of logits after penalties, biases and masks, given how often tokens were generated."""
    result = logits.astype(np.float32)
    for token in range(len(result)):
        x, count = result[token], np.float32(min(generated.get(token, 0), 65535))
        if token in prompt or count:
            reciprocal = np.float32(1) / np.float32(request.repetition)
            x = x * (reciprocal if x > 0 else np.float32(request.repetition))
        if count:
            x = x - np.float32(request.frequency) * count
            x = x - np.float32(request.presence)
        if token in request.bias:
            x = x + np.float32(request.bias[token])
        if token in request.barred or (request.allowed is not None and token not in request.allowed):
            x = np.float32(-np.inf)
        result[token] = x
    return result


def sampling_exponents(logits: np.ndarray, temperature: float, removed: list[int]) -> np.ndarray:
    """Returns the exponents of one row's sampling distribution, whose filters remove some tokens."""
    logits = logits.astype(np.float32)
    result = np.maximum(logits * (np.float32(1) / np.float32(temperature)), LOWEST)
    result[np.isneginf(logits)] = -np.inf
    result[removed] = -np.inf
    return result


def sample(logits: np.ndarray, bits: np.ndarray, temperature: float, device: DeviceFunctions) -> int:
    """The token that is sampled from one row of logits with the numbers `u` given."""
    logits = logits.astype(np.float32)
    if temperature == 0:
        return int(np.argmax(np.where(np.isnan(logits), np.inf, logits)))
    divided = np.maximum(logits * (np.float32(1) / np.float32(temperature)), LOWEST)
    return int(np.argmax(divided + gumbel(bits, device.log)))
