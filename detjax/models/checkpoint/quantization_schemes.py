"""Schemes of quantized modules: the format of a weight, and what becomes of activations."""

import dataclasses
import fnmatch
import re
from collections.abc import Sequence
from typing import Final, Literal

from detjax.models.checkpoint.matrix_formats import MatrixFormat
from detjax.models.checkpoint.quantization import BlockFormat
from detjax.models.configuration.json_object import CheckpointError
from detjax.operands.quantized_weight import QuantizedActivations

Quantized = Literal["computed", "weights", "widened"]
"""The reading of quantized weights: products as the checkpoint describes them, products of plain activations with
weights that stay in codes, or plain weights."""

type Activations = QuantizedActivations | Literal["fp4", "batch"] | None
"""The scales of quantized activations. "fp4" (four-bit activations) and "batch" (one scale for all rows) are not
computed."""

_REFUSED: Final = {
    "fp4": "activations of four bits, which no supported device computes",
    "batch": "one dynamic scale for a whole batch, so that the bits of a request would depend on its neighbours",
}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A module's scheme.

    Attributes:
        matrix_format: the format of its weight.
        activations: the scales of its activations; None: they are plain.
    """

    matrix_format: BlockFormat | MatrixFormat
    activations: Activations = None

    def computed(self, module: str, source: str) -> QuantizedActivations | None:
        """Returns the scales of activations for products.

        Raises:
            CheckpointError: such products are not supported.
        """
        if self.activations == "fp4" or self.activations == "batch":
            raise CheckpointError(
                f"{source}: quantization_config asks for {_REFUSED[self.activations]}, in {module} "
                f"({self.matrix_format.name}); accepted: plain activations with weights in codes, quantized='weights', "
                "or plain weights, quantized='widened'"
            )
        return self.activations


@dataclasses.dataclass(frozen=True)
class Targets:
    """The modules that a list in `config.json` names.

    An entry is a module's name or a part of it between dots, a pattern with `*`, or a regular expression after "re:".

    Attributes:
        names: the entries.
        classes: the entries that stand for all linear modules.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...] = ()

    def __contains__(self, module: str) -> bool:
        return self.matches_name(module) or any(entry in self.classes for entry in self.names)

    def matches_name(self, module: str) -> bool:
        """Returns whether an entry other than a class matches."""
        return any(_matches(entry, module) for entry in self.names if entry not in self.classes)


def _matches(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    if "*" in entry:
        return fnmatch.fnmatchcase(module, entry) or fnmatch.fnmatchcase(module, f"{entry}.*")
    return f".{entry}." in f".{module}."


def targeted(groups: Sequence[tuple[Targets, Scheme]], module: str) -> Scheme | None:
    """Returns the scheme of the first group that names a module, else of the first one that has its class."""
    for targets, scheme in groups:
        if targets.matches_name(module):
            return scheme
    return next((scheme for targets, scheme in groups if module in targets), None)
