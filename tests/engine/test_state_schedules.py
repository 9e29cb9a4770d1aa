"""Random schedules on small models: for each kind of state, 1,000 of them change no bit of any answer."""

import pytest

from tests.engine import state_schedules
from tests.engine.state_schedules import BLOCK, KINDS, Findings

SCHEDULES = 1000


@pytest.mark.sampled(0)
@pytest.mark.parametrize("first", range(0, SCHEDULES, BLOCK))
@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_change_no_bit(kind: str, first: int) -> None:
    findings = Findings()
    state_schedules.search(kind, range(first, min(first + BLOCK, SCHEDULES)), findings)
    assert findings.answers
