"""The options that say which model a command loads, and on what it computes."""

import dataclasses
import datetime
from pathlib import Path
from typing import Annotated, Final

from detjax import models
from detjax.cli.options import Option
from detjax.models import Decoder, Tokenizer
from detjax.runtime import backends

Backend = Annotated[
    str | None,
    Option(
        f"Use this backend: {', '.join((*backends.BACKENDS, backends.STOCK))}.",
        default=f"{backends.BACKEND_VARIABLE}, else the best for this device",
    ),
]
JSON_FILE: Final = Option(name="--json", default="nowhere")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading:
    """The model of a command.

    Attributes:
        model: directory with a Hugging Face checkpoint.
        dtype: compute in float32, bfloat16 or float16. Default: the checkpoint's dtype.
        tensor_parallel: share the model among N devices; no bit depends on their number.
        expert_parallel: share the experts of each layer among N groups of devices, --tensor-parallel devices each; no
            bit depends on their number.
        chat_template: use the chat template of this file, written in Jinja. Default: the checkpoint's.
        template_date: tell chat templates that this is today, YYYY-MM-DD; it is part of the fingerprint. Default: no
            date.
    """

    model: Path
    dtype: str | None = None
    tensor_parallel: int = 1
    expert_parallel: int = 1
    chat_template: Path | None = None
    template_date: datetime.date | None = None

    def template(self) -> str | None:
        """Reads the chat template.

        Raises:
            ValueError: it cannot be read.
        """
        try:
            return None if self.chat_template is None else self.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ValueError(
                f"--chat-template is {str(self.chat_template)!r}, which cannot be read ({reason}); accepted: a file "
                "with a Jinja template"
            ) from error

    def load(self, template: str | None = None) -> tuple[Decoder, Tokenizer]:
        """Returns the model, shared by devices, and its tokenizer with a chat template in place of the checkpoint's.

        Raises:
            ValueError: the checkpoint has no tokenizer, or there are fewer devices.
        """
        mesh = models.mesh_of(self.tensor_parallel, self.expert_parallel)
        decoder, tokenizer = models.load(self.model, dtype=self.dtype, mesh=mesh)
        if tokenizer is None:
            raise ValueError(
                f"{self.model} has no tokenizer.json; accepted: a checkpoint with one, because prompts are text"
            )
        if self.template_date is not None:
            tokenizer = tokenizer.with_template_date(self.template_date)
        return decoder, tokenizer if template is None else tokenizer.with_chat_template(template)
