"""Properties of the chip that the kernels rely on."""

import pytest

from detjax.pallas.hopper.device import shared_registers


@pytest.mark.parametrize(
    ("fitting", "too_many"),
    [((256, 256), (256, 264)), ((240, 240, 24), (240, 240, 32)), ((240, 40, 112, 120), (240, 48, 112, 120))],
)
def test_warpgroups_take_no_more_registers_than_their_cta_has(
    fitting: tuple[int, ...], too_many: tuple[int, ...]
) -> None:
    # One that asks for more waits forever for the others, on the device alone.
    assert shared_registers(*fitting) == fitting
    with pytest.raises(ValueError, match=rf"accepted: up to {sum(fitting)},"):
        shared_registers(*too_many)
