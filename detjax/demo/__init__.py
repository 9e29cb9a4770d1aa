"""`detjax demo`: one question asked a thousand times under changing load, with stock XLA and with detjax."""

from pathlib import Path
from typing import Final

CHECKPOINT: Final = Path(__file__).parent / "checkpoint"
"""The model that comes with detjax: 1.3 million parameters, trained on Shakespeare's plays."""

DEFAULT_PROMPT: Final = "KING RICHARD III:\nHell is empty, and all the devils are here.\n"
"""A question to which stock XLA gives three answers.

Of 160 prompts tried with `CHECKPOINT` in bfloat16 on a CPU, with 96 tokens to follow, one in five had more than one
answer; most of these had two.
"""

DEFAULT_MAX_TOKENS: Final = 40
"""Tokens of an answer at most."""
