"""Random codes in place of a model's matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.bench import presets, random_codes
from detjax.models.network import parameters
from detjax.operands.quantized_weight import QuantizedWeight, widened
from tests.support.compiled_programs import compiled_programs


@pytest.mark.parametrize("name", random_codes.FORMATS)
def test_products_of_a_drawn_weight_have_the_magnitude_of_their_rows(name: str) -> None:
    w = random_codes.drawn_weight((300, 512), name, "float32", 3)
    assert w.shape == (300, 512) and w.scales.shape == (300, 4)
    numbers = np.asarray(widened(w))
    assert np.isfinite(numbers).all()
    assert 0.8 < np.sqrt((numbers**2).sum(axis=1).mean()) < 1.25
    other = random_codes.drawn_weight((300, 512), name, "float32", 4)
    assert (np.asarray(w.codes) != np.asarray(other.codes)).mean() > 0.8


def test_blocks_of_rows_share_their_scales_where_activations_are_quantized() -> None:
    scales = np.asarray(random_codes.drawn_weight((300, 256), "fp8", "bfloat16", 0).scales)
    for first in (0, 128, 256):
        assert (scales[first : first + 128] == scales[first]).all()
    assert (scales[0] != scales[128]).all()
    scales = np.asarray(random_codes.drawn_weight((300, 256), "int4", "bfloat16", 0).scales)
    assert len(np.unique(scales)) > 100


def test_only_the_matrices_of_products_are_replaced() -> None:
    plain, coded = (presets.decoder("tiny-experts", 2, weights=weights) for weights in (None, "int4"))
    kinds = {path[-1] for path, weight in parameters(coded).items() if isinstance(weight, QuantizedWeight)}
    assert kinds == {"qkv", "output", "gate_up", "down"}
    for (path, before), after in zip(parameters(plain).items(), parameters(coded).values(), strict=True):
        assert before.shape == after.shape, path
        if not isinstance(after, QuantizedWeight):
            assert np.asarray(before).tobytes() == np.asarray(after).tobytes(), path


def test_plain_weights_are_the_widened_codes() -> None:
    coded, plain = (random_codes.with_codes(presets.decoder("tiny", 1), "int4", plain=plain) for plain in (False, True))
    for (path, codes), numbers in zip(parameters(coded).items(), parameters(plain).values(), strict=True):
        if isinstance(codes, QuantizedWeight):
            assert numbers.dtype == jnp.bfloat16
            assert np.asarray(widened(codes)).tobytes() == np.asarray(numbers).tobytes(), path


def test_one_program_draws_all_weights_of_a_shape() -> None:
    jax.clear_caches()
    with compiled_programs() as compiled:
        for seed in range(4):
            random_codes.drawn_weight((16, 64), "fp8", "bfloat16", seed)
    assert sum("_drawn" in name for name in compiled) == 1
