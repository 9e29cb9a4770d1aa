"""The noise of sampling: a Gumbel variable for each token id, from a request's key and the token's position.

Philox-4x32 with 10 rounds (Salmon et al. 2011) makes four words of 32 random bits from a key and a counter; `contract`
says which. Everything here is integer arithmetic but for `gumbel`, so the bits are the same on every backend.
"""

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Final, SupportsIndex

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

from detjax.contract import ACCUMULATOR, NOISE_LANES, NOISE_WORDS

ROUNDS: Final = 10
_MULTIPLIERS: Final = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
_KEY_STEPS: Final = 0x9E3779B9, 0xBB67AE85
_MANTISSA: Final = 23
"""Bits of a float32 below its first one."""
_RARE: Final = np.float32(2.0 ** (_MANTISSA - 32))
"""The share of the random bits that are rare noise."""
_LARGEST_BELOW_ONE: Final = np.float32(1 - 2**-24)

SPAN: Final = NOISE_LANES * NOISE_WORDS
"""Consecutive token ids whose noise comes from `NOISE_LANES` counters."""

NO_NOISE: Final = 0, 0, 0, 0
"""The key of rows that sample nothing."""

type Words = tuple[Array, Array, Array, Array]
"""The four words of a counter, or of Philox's result."""


def prompt_digest(tokens: Sequence[int], images: Sequence[bytes] = ()) -> bytes:
    """Returns the digest of a prompt that its samples' noise depends on, the same on every machine.

    Args:
        tokens: the prompt's token ids, in which an image has as many tokens as rows.
        images: a digest of each image.

    Example:
        >>> ops.prompt_digest([3, 1, 4]).hex()[:16]
        '9931569a24ced61f'
    """
    hashed = hashlib.sha256(len(tokens).to_bytes(8, "little"))
    hashed.update(np.asarray(tokens, "<i4").tobytes())
    for image in images:
        hashed.update(len(image).to_bytes(8, "little") + image)
    return hashed.digest()


def noise_key(seed: SupportsIndex, prompt: bytes, sample_index: SupportsIndex = 0) -> tuple[int, int, int, int]:
    """Returns the key of a sample's noise, four 32-bit words.

    Args:
        seed: the request's seed.
        prompt: the prompt's digest; see `prompt_digest`.
        sample_index: the index of the sample in its request.

    Raises:
        TypeError: the seed or the index is not an integer.
        ValueError: the seed is not in the range 0 to 2^64 - 1, or the index not in 0 to 2^31 - 1.

    Example:
        >>> ops.noise_key(7, ops.prompt_digest([3, 1, 4]))
        (4133689421, 1470025727, 662003392, 3243293780)
    """
    numbers = {"seed": (operator.index(seed), 64), "sample_index": (operator.index(sample_index), 31)}
    for name, (number, bits) in numbers.items():
        if not 0 <= number < 2**bits:
            raise ValueError(f"{name} is {number}; accepted: 0 to 2^{bits} - 1")
    hashed = b"".join(number.to_bytes(8, "little") for number, _ in numbers.values())
    first, second, third, fourth = np.frombuffer(hashlib.sha256(hashed + prompt).digest()[:16], "<u4").tolist()
    return first, second, third, fourth


def multiply_high(word: Array, factor: np.uint32) -> Array:
    """Returns the upper 32 bits of the product of uint32 words with a constant, from products of halves.

    JAX's `lax.mulhi` has the same bits. But XLA cannot divide it among devices, and TPUs have no such instruction.
    """
    half, shift = np.uint32(0xFFFF), np.uint32(16)
    low, high, factor_low, factor_high = word & half, word >> shift, factor & half, factor >> shift
    middle = high * factor_low + (low * factor_low >> shift)
    other = low * factor_high + (middle & half)
    return high * factor_high + (middle >> shift) + (other >> shift)


def philox(
    counter: Words, key: tuple[Array, Array], multiply_high: Callable[[Array, np.uint32], Array] = multiply_high
) -> Words:
    """Returns the four random words of uint32 counters: Philox-4x32 with 10 rounds.

    Args:
        counter: the counter's words.
        key: the key's words.
        multiply_high: returns the upper 32 bits of a word's product with a constant.
    """
    a, b, c, d = counter
    for number in range(ROUNDS):
        first, second = (word + np.uint32(number * step % 2**32) for word, step in zip(key, _KEY_STEPS, strict=True))
        a, b, c, d = (
            multiply_high(c, _MULTIPLIERS[1]) ^ b ^ first,
            c * _MULTIPLIERS[1],
            multiply_high(a, _MULTIPLIERS[0]) ^ d ^ second,
            a * _MULTIPLIERS[0],
        )
    return a, b, c, d


def gumbel(bits: Array) -> Array:
    """Returns the float32 Gumbel variables of 32 random bits; see `contract`.

    The fewer the bits, the larger the variable. Likely noise has 23 random bits, and rare noise, which unlikely tokens
    need to be chosen, has all 32.
    """
    is_rare = bits >> np.uint32(_MANTISSA) == 0
    mantissa = jnp.where(is_rare, bits, (bits ^ np.uint32(0xFFFFFFFF)) >> np.uint32(32 - _MANTISSA))
    uniform = lax.bitcast_convert_type(mantissa | np.uint32(0x3F800000), ACCUMULATOR) - _LARGEST_BELOW_ONE
    # Both factors are exact before the product, so no fused instruction changes a bit.
    rare = uniform * _RARE
    return -jnp.log(jnp.where(is_rare, rare * (1 + rare * np.float32(0.5)), -jnp.log(uniform)))


def group(token: Array) -> Array:
    """Returns the first words of token ids' counters, uint32. `NOISE_WORDS` ids have the same one."""
    token = token.astype(jnp.uint32)
    return ((token // np.uint32(SPAN)) * np.uint32(NOISE_LANES)) | (token % np.uint32(NOISE_LANES))


def noise_of_tokens(
    keys: UInt32[Array, "B 4"], positions: Int32[Array, "B"], tokens: Int32[Array, "n"]
) -> Float32[Array, "B n"]:
    """Returns the noise of any token ids in each row."""
    words = _words(keys, positions, group(tokens))
    word = jnp.broadcast_to((tokens // np.int32(NOISE_LANES)) % np.int32(NOISE_WORDS), words[0].shape)
    return gumbel(lax.select_n(word, *words))


def noise_of_range(
    keys: UInt32[Array, "B 4"], positions: Int32[Array, "B"], first: Int32[Array, ""], size: int
) -> Float32[Array, "B n"]:
    """Returns the noise of `size` consecutive token ids in each row. The first is a multiple of `SPAN`."""
    # The barriers limit what XLA compiles as one loop: without them, it would take seconds, and compute all words again
    # for each of them.
    if size <= SPAN:
        return noise_of_tokens(keys, positions, lax.optimization_barrier(first + jnp.arange(size, dtype=jnp.int32)))
    spans = -(-size // SPAN)
    # The ids of a span have the next `NOISE_LANES` numbers as the first words of their counters.
    groups = first // np.int32(NOISE_WORDS) + jnp.arange(spans * NOISE_LANES, dtype=jnp.int32)
    words = lax.optimization_barrier(_words(keys, positions, lax.optimization_barrier(groups.astype(jnp.uint32))))
    bits = jnp.stack([word.reshape(-1, spans, NOISE_LANES) for word in words], axis=2)
    return gumbel(bits.reshape(len(keys), -1)[:, :size])


def _words(keys: Array, positions: Array, groups: Array) -> Words:
    """Returns the random words of each row `[B, n]`, from the first words of its counters."""
    shape = len(keys), len(groups)
    first, second, third, fourth = (jnp.broadcast_to(keys[:, word, None], shape) for word in range(4))
    position = jnp.broadcast_to(positions.astype(jnp.uint32)[:, None], shape)
    return philox((jnp.broadcast_to(groups[None], shape), position, third, fourth), (first, second))
