"""Options that select the model to load and the backend to run it on."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from detjax import models
from detjax.cli.options import Option
from detjax.engine import SpeculativeConfig
from detjax.models import Decoder, Tokenizer
from detjax.models.checkpoint.quantization_schemes import Quantized
from detjax.models.configuration.json_object import parse_json_object
from detjax.runtime import backends

Backend = Annotated[
    str | None,
    Option(
        f"Backend to use: {', '.join((*backends.BACKENDS, backends.STOCK))}.",
        default=f"{backends.BACKEND_VARIABLE}, else the best one for this device",
    ),
]
JSON_FILE: Final = Option(name="--json", default="no file")
LORA_MODULES: Final = Option(name="--lora-modules", takes_several=True)
"""The option for adapters, by vLLM's name and in its form."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading:
    """The model that a command loads.

    Attributes:
        model: directory of a Hugging Face checkpoint.
        dtype: data type to compute in: float32, bfloat16 or float16. Default: the checkpoint's.
        tensor_parallel: shard the model over N devices; N does not change any bits.
        expert_parallel: shard the experts of each layer over N groups of --tensor-parallel devices; N does not change
            any bits.
        chat_template: file with a Jinja chat template. Default: the checkpoint's template.
        template_date: today's date for chat templates, as YYYY-MM-DD; it is part of the fingerprint. Default: no date.
        hf_overrides: JSON object with keys of the checkpoint's config.json and the values to read instead, as for vLLM.
            Default: nothing is replaced.
        quantized: reading of quantized weights: "computed", products as the checkpoint describes them; "weights", plain
            activations with weights in codes; "widened", plain weights.
    """

    model: Path
    dtype: str | None = None
    tensor_parallel: int = 1
    expert_parallel: int = 1
    chat_template: Path | None = None
    template_date: datetime.date | None = None
    hf_overrides: str | None = None
    quantized: Quantized = "computed"

    def overrides(self) -> dict[str, Any]:
        """Returns the replaced keys of config.json; raises a ValueError if the option is not a JSON object."""
        if self.hf_overrides is None:
            return {}
        try:
            return parse_json_object(self.hf_overrides.encode(), "--hf-overrides")
        except ValueError as error:
            raise ValueError(f'{error}. An example is {{"is_matryoshka": true}}') from None

    def speculative(self, text: str | None) -> SpeculativeConfig | None:
        """Returns the settings in --speculative-config; raises a ValueError if they are not accepted."""
        return None if text is None else SpeculativeConfig.from_json(text, self.model)

    def template(self) -> str | None:
        """Reads the chat template; raises a ValueError if the file is not readable."""
        try:
            return None if self.chat_template is None else self.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ValueError(
                f"--chat-template is {str(self.chat_template)!r}, which cannot be read ({reason}); accepted: a file "
                "with a Jinja template"
            ) from error

    def load(
        self, template: str | None = None, adapters: Mapping[str, Path] = MappingProxyType({})
    ) -> tuple[Decoder, Tokenizer]:
        """Returns the sharded model, and its tokenizer with `template` instead of the checkpoint's chat template.

        The model knows the adapters in some folders by their names.
        """
        mesh = models.mesh_of(self.tensor_parallel, self.expert_parallel)
        options: dict[str, Any] = {"overrides": self.overrides(), "quantized": self.quantized}
        decoder, tokenizer = models.load(self.model, adapters=adapters, dtype=self.dtype, mesh=mesh, **options)
        if tokenizer is None:
            raise ValueError(
                f"{self.model} has no tokenizer.json; accepted: a checkpoint with one, since prompts are text"
            )
        if self.template_date is not None:
            tokenizer = tokenizer.with_template_date(self.template_date)
        return decoder, tokenizer if template is None else tokenizer.with_chat_template(template)


def lora_adapters(modules: Sequence[str]) -> dict[str, Path]:
    """Returns the folders of adapters by name, as --lora-modules gives them; raises a ValueError if one is invalid."""
    adapters: dict[str, Path] = {}
    for text in modules:
        if text.lstrip().startswith("{"):
            given = parse_json_object(text.encode(), "--lora-modules")
            name, path = given.get("name"), given.get("path")
            if unknown := sorted(given.keys() - {"name", "path", "base_model_name"}):
                raise ValueError(f"--lora-modules has {unknown[0]!r}; accepted: name, path, base_model_name")
        else:
            name, _, path = text.partition("=")
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            raise ValueError(f"--lora-modules is {text!r}; accepted: NAME=PATH, or a JSON object with name and path")
        if name in adapters:
            raise ValueError(f"--lora-modules has {name!r} twice; accepted: each name once")
        adapters[name] = Path(path)
    return adapters
