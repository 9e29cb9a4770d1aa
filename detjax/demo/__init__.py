"""`detjax demo`: one question under a thousand loads, with stock XLA and with detjax."""

from pathlib import Path
from typing import Final

CHECKPOINT: Final = Path(__file__).parent / "checkpoint"
"""The model that comes with detjax: 1.3 million parameters that have read Shakespeare."""

DEFAULT_PROMPT: Final = "KING RICHARD III:\nHell is empty, and all the devils are here.\n"
"""A question on which stock XLA is of several minds, as on one in five of the 160 that were tried with `CHECKPOINT` in
bfloat16 on a CPU, with 96 tokens to follow; most give two answers, this one three."""

DEFAULT_MAX_TOKENS: Final = 40
