"""A checkpoint's sampling defaults, from `generation_config.json`."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from detjax.models.configuration.family import Description
from detjax.models.configuration.json_object import JsonObject


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of a model; None: the checkpoint has no default."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool = False
    """False: the most likely token is chosen, and the numbers below have no effect."""
    temperature: float | None = None
    top_k: int | None = None
    """0: all tokens."""
    top_p: float | None = None
    min_p: float | None = None
    unread: str = "{}"
    """The file's other options as a JSON object, which are saved again. Only `repetition_penalty` has an effect here; a
    separate field for it would change the digest of every model."""

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any], source: str, described: Description) -> "GenerationDefaults":
        """Returns the defaults of a checkpoint from the contents of `generation_config.json`, if any.

        Missing token ids are read from `config.json`, whose decoder is `described`. Errors call the file `source`.

        Raises:
            CheckpointError: a value of the wrong type or out of range.
        """
        family, file = described.family, JsonObject(raw, source)
        stated = {"bos_token_id": family.bos, "eos_token_id": family.eos} | dict(described.file.raw)
        fallback = JsonObject(stated, described.file.source)
        bos, eos, pad = (
            file if file.get(key) is not None else fallback for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        )
        ends = eos.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ends):
            raise eos.error("eos_token_id", "an integer >= 0, a list of such, null")
        # A separate object, so that `file` does not mark this key as read and `unread` keeps it.
        JsonObject(raw, source).optional_number(
            "repetition_penalty", minimum=1e-6, maximum=1e6, accepted="a number from 1e-6 to 1e6"
        )
        return cls(
            eos_token_ids=tuple(dict.fromkeys(ends)),
            bos_token_id=bos.optional_integer("bos_token_id", minimum=0),
            pad_token_id=pad.optional_integer("pad_token_id", minimum=0),
            do_sample=file.boolean("do_sample", False),
            temperature=file.optional_number("temperature", minimum=0.0, accepted="a finite number >= 0"),
            top_k=file.optional_integer("top_k", minimum=0),
            top_p=file.optional_number("top_p", minimum=0.0, maximum=1.0, accepted="a number from 0 to 1"),
            min_p=file.optional_number("min_p", minimum=0.0, maximum=1.0, accepted="a number from 0 to 1"),
            unread=json.dumps(file.unread(), sort_keys=True),
        )

    @property
    def repetition_penalty(self) -> float | None:
        """The divisor of the logits of tokens that occur in the text, whether tokens are sampled or not."""
        return json.loads(self.unread).get("repetition_penalty")

    def token_ids_to_hugging_face(self) -> dict[str, Any]:
        """Returns the token ids in the form of both files."""
        eos = list(self.eos_token_ids)
        return {
            "bos_token_id": self.bos_token_id,
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
            "pad_token_id": self.pad_token_id,
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """Returns the contents of an equivalent `generation_config.json`."""
        numbers = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        raw = json.loads(self.unread) | self.token_ids_to_hugging_face() | {"do_sample": self.do_sample} | numbers
        return {key: value for key, value in raw.items() if value is not None}
