"""Products with adapters that a study launches: in the interpreter, all forms have the bits of sorted rows."""

import numpy as np

import detjax
from benchmarks import adapted_products
from tests.pallas.hopper.interpreter import interpreted, normal
from tests.support.bits import assert_same_bits, same_bits


def test_all_forms_have_the_bits_of_sorted_rows() -> None:
    groups = list(adapted_products.wide_groups({"gate and up": (2, 64, 64)}, rows=(9,), slots=3))
    assert [len(group.products) for group in groups] == [1, 1]
    x = normal(9, 64, dtype="bfloat16")
    for group in groups:
        (product,), weight = group.products, group.draw()
        with detjax.use_backend("hopper"):
            expected, y = (interpreted(fn, x, weight) for fn in (group.expected, product.multiply))
        assert_same_bits(y, expected)
        assert not same_bits(y[0], y[1])
        assert np.isfinite(y.astype(np.float32)).all()
