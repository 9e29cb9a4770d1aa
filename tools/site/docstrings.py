"""A Griffe extension that reads "Example:" in docstrings as Griffe's section "Examples:"."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section before docstrings are parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the section in an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
