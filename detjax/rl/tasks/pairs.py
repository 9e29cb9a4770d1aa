"""Prompts with completions from a file, for supervised training: the task `sft`."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

NAME: Final = "sft"
"""The task's name."""
_KEYS: Final = ("prompt", "completion")


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Prompts with completions, in the order of their file.

    Attributes:
        pairs: the texts.
        digest: a SHA-256 of them.
    """

    pairs: tuple[tuple[str, str], ...]
    digest: str

    @classmethod
    def read(cls, path: Path) -> "Pairs":
        """Returns the pairs of a file with a JSON object in each line, which has a prompt and a completion.

        Raises:
            ValueError: the file cannot be read, a line is not such an object, or the file has no lines.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read ({error}); accepted: a file of JSON lines in UTF-8") from error
        pairs = [_pair(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
        if not pairs:
            raise ValueError(f"{path} has no lines; accepted: at least one object with a prompt and a completion")
        return cls(tuple(pairs), hashlib.sha256(json.dumps(pairs).encode()).hexdigest())

    def chosen(self, seed: int, numbers: Sequence[int]) -> list[tuple[str, str]]:
        """Returns the pairs of the given numbers of a series: pass after pass over the file, each in another order.

        The order of a pass is a function of the seed and of the number of the pass, on every platform.
        """
        orders: dict[int, list[int]] = {}
        result = []
        for number in numbers:
            epoch, place = divmod(number, len(self.pairs))
            if epoch not in orders:
                orders[epoch] = sorted(range(len(self.pairs)), key=lambda index: _rank(seed, epoch, index))
            result.append(self.pairs[orders[epoch][place]])
        return result


def _rank(seed: int, epoch: int, index: int) -> bytes:
    return hashlib.sha256(f"{NAME}/{seed}/{epoch}/{index}".encode()).digest()


def _pair(place: str, line: str) -> tuple[str, str]:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON ({error}); accepted: an object with a prompt and a completion") from None
    if not isinstance(raw, dict) or set(raw) != set(_KEYS) or not all(isinstance(raw[key], str) for key in _KEYS):
        given = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
        raise ValueError(
            f"{place} has {given}; accepted: an object with the texts prompt and completion, and no others"
        )
    if not raw["prompt"]:
        raise ValueError(f"{place} has an empty prompt; accepted: a text, since the first token is not trained")
    return raw["prompt"], raw["completion"]
