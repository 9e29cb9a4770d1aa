"""Random schedules on small models: for each kind of state, 1,000 of them change no bit of any answer."""

import pytest

from tests.engine import state_schedules
from tests.engine.state_schedules import BLOCK, KINDS, Findings

SCHEDULES = 1000
MANY = [pytest.param(first, marks=pytest.mark.nightly) for first in range(0, SCHEDULES, BLOCK)]


DRAFTS = {"slots": 7, "windows": 7, "fp8_e4m3": 7}
"""Maximum number of guesses of a sequence in a step, for kinds of state. Other kinds have guesses at night."""


@pytest.mark.parametrize("first", ["small", *MANY])
@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_change_no_bit(kind: str, first: int | str) -> None:
    findings = Findings()
    if isinstance(first, str):
        drafts = DRAFTS.get(kind, 0)
        findings = state_schedules.play_small(kind, drafts)
        assert not drafts or findings.guesses > findings.right_guesses > 0
        assert findings.runs and findings.preemptions and findings.cached_tokens and findings.cancelled
        assert findings.snapshot_hits or kind != "slots"
    else:
        state_schedules.search(kind, range(first, min(first + BLOCK, SCHEDULES)), findings)
    assert findings.answers
