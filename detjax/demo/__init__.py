"""`detjax demo`: asks one question a thousand times under changing load, with stock XLA and with detjax."""

from pathlib import Path
from typing import Final

CHECKPOINT: Final = Path(__file__).parent / "checkpoint"
"""The model that ships with detjax: 1.3 million parameters, trained on Shakespeare's plays."""

EAGLE3: Final = Path(__file__).parent / "eagle3"
"""An EAGLE-3 head that drafts for it, trained on texts that it wrote."""

DRAFT_MODEL: Final = Path(__file__).parent / "draft_model"
"""A smaller model with its vocabulary that drafts for it, trained on the same texts."""

DEFAULT_PROMPT: Final = "KING RICHARD III:\nHell is empty, and all the devils are here.\n"
"""A question to which stock XLA gives three answers.

With `CHECKPOINT` in bfloat16 on a CPU and answers of 96 tokens, one in five of 160 prompts had more than one answer,
usually two.
"""

DEFAULT_MAX_TOKENS: Final = 40
"""Default maximum number of tokens in an answer."""
