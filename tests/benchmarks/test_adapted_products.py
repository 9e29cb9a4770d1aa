"""Products with adapters that a study launches: in the interpreter, all forms have the bits of separate kernels."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from benchmarks import adapted_products
from benchmarks.adapted_products import FORMS, Form
from benchmarks.repeated_products import Group
from tests.pallas.hopper.interpreter import interpreted, lowered, normal
from tests.support.bits import assert_same_bits, same_bits

WIDTHS = {
    "queries, keys and values": (128, 64),
    "output": (64, 64),
    "gate and up": (2, 64, 64),
    "down": (64, 128),
}


def check_bits(group: Group) -> None:
    """The product of a group has the expected bits, and its rows and results differ."""
    (product,), weight, x = group.products, group.draw(), normal(9, group.columns, dtype="bfloat16")
    with detjax.use_backend("hopper"):
        expected, y = (interpreted(fn, x, weight) for fn in (group.expected, product.multiply))
    assert y.shape == (9, group.outputs)
    assert_same_bits(y, expected)
    assert not same_bits(y[0], y[1])
    assert np.isfinite(y.astype(np.float32)).all()


def test_rows_with_adapters_have_the_bits_of_sorted_rows() -> None:
    groups = list(adapted_products.wide_groups({"gate and up": (2, 64, 64)}, rows=(9,), slots=3))
    assert [len(group.products) for group in groups] == [1, 1]
    for group in groups:
        check_bits(group)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_form_of_one_adapter_has_the_bits_of_separate_kernels(form: Form) -> None:
    (group,) = adapted_products.groups_of_forms(WIDTHS, rows=(9,), forms=[form])
    check_bits(group)


def test_gradients_of_rows_kept_sums_and_many_ranks_are_launched() -> None:
    assert {form.layout for form in FORMS} == {"nk", "kn"}
    assert {form.ranks for form in FORMS if form.layout == "kn"} == {48, 128, 256}
    assert {form.ranks for form in FORMS if form.keeps and form.width == "gate and up"} == {32, 128, 256}
    groups = itertools.chain(adapted_products.wide_groups(), adapted_products.groups_of_forms())
    names = [group.name for group in groups]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_form_lowers_for_all_numbers_of_rows(form: Form) -> None:
    (group,) = adapted_products.groups_of_forms(forms=[form])
    for product in group.products:
        x = jax.ShapeDtypeStruct((product.rows, group.columns), jnp.bfloat16)
        with detjax.use_backend("hopper"):
            assert "mosaic_gpu" in lowered(product.multiply, x, group.described)
