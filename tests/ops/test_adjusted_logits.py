"""Penalties, biases and masks of logits, one at a time and together, on numbers that no step rounds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax import ops
from tests.support.bits import assert_same_bits

SIZE = 35
"""Tokens of the vocabulary: two words of a mask, the second of them not full."""

LOGITS = np.arange(SIZE, dtype=np.float32) / 2 - 4
IN_PROMPT, GENERATED = (1, 2, 20), {2: 1, 8: 3, 21: 2, 34: 300}
BIASES = {0: 1.5, 8: -2.25, 33: -np.inf, 34: 0.75}
ALLOWED = (0, 8, 21, 31, 32, 34)

COUNT = np.array([GENERATED.get(token, 0) for token in range(SIZE)])
IS_IN_PROMPT = np.isin(np.arange(SIZE), IN_PROMPT)
IS_SEEN = IS_IN_PROMPT | (COUNT > 0)
BIAS = np.array([BIASES.get(token, 0.0) for token in range(SIZE)])
IS_ALLOWED = np.isin(np.arange(SIZE), ALLOWED)

REQUESTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition": 2.0},
    "repetition below 1": {"repetition": 0.5},
    "frequency": {"frequency": 0.25},
    "presence": {"presence": 0.75},
    "biases": {"biases": True},
    "a mask": {"masked": True},
    "all together": {"repetition": 4.0, "frequency": -0.5, "presence": 1.25, "biases": True, "masked": True},
}


def expected(
    x: np.ndarray,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    biases: bool = False,
    masked: bool = False,
) -> np.ndarray:
    """The documented steps in float64."""
    x = np.where(IS_SEEN, np.where(x > 0, x / repetition, x * repetition), x.astype(np.float64))
    x = x - frequency * COUNT - presence * (COUNT > 0) + (BIAS if biases else 0)
    return np.where(IS_ALLOWED, x, -np.inf) if masked else x


def arrays(dtype: str, names: list[str]) -> tuple[Any, ...]:
    """The arguments of `adjust_logits`: a row for each request. Ids that are padding have biases, too."""
    requests = [REQUESTS[name] for name in names]
    repetition, frequency, presence = (
        np.float32([request.get(name, default) for request in requests])
        for name, default in (("repetition", 1), ("frequency", 0), ("presence", 0))
    )
    biased = np.tile(np.int32([*BIASES, -1, SIZE, 2**30]), (len(names), 1))
    bias = np.tile(np.float32([*BIASES.values(), 9, 9, -np.inf]), (len(names), 1))
    for row, request in enumerate(requests):
        if not request.get("biases"):
            biased[row, : len(BIASES)] = -1
    words = np.zeros((len(names), 2), np.uint32)
    for row, request in enumerate(requests):
        for token in ALLOWED if request.get("masked") else range(SIZE):
            words[row, token // 32] |= np.uint32(1 << token % 32)
    counts, in_prompt = (np.tile(x, (len(names), 1)) for x in (COUNT.astype(np.uint16), IS_IN_PROMPT))
    adjustments = ops.LogitAdjustments(repetition, 1 / repetition, frequency, presence, biased, bias)
    logits = np.tile(LOGITS, (len(names), 1)).astype(jnp.dtype(dtype))
    return jax.tree.map(jnp.asarray, (logits, ops.SeenTokens(counts, in_prompt), adjustments, words))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_adjustment_changes_the_tokens_that_it_is_for(dtype: str) -> None:
    result = np.asarray(ops.adjust_logits(*arrays(dtype, list(REQUESTS))))
    assert result.dtype == np.float32
    for row, (name, request) in zip(result, REQUESTS.items(), strict=True):
        np.testing.assert_array_equal(row, expected(LOGITS, **request), err_msg=name)
        assert (row != LOGITS).any() == (name != "nothing")


def test_without_a_mask_every_token_may_be_chosen() -> None:
    unmasked = [name for name, request in REQUESTS.items() if not request.get("masked")]
    given = arrays("float32", unmasked)
    assert_same_bits(ops.adjust_logits(*given[:3]), ops.adjust_logits(*given))


def test_a_mask_alone_is_a_mask_with_adjustments_that_change_nothing() -> None:
    logits, _, _, words = given = arrays("bfloat16", ["nothing", "a mask"])
    logits = logits.at[:, 0].set(jnp.nan).at[:, 1].set(jnp.inf)
    result = np.asarray(ops.constrain_logits(logits, words))
    np.testing.assert_array_equal(result[1], np.where(IS_ALLOWED, np.asarray(logits[1], np.float32), -np.inf))
    assert_same_bits(result, ops.adjust_logits(logits, *given[1:]))
