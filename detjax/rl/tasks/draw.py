"""Random integers that are the same on every platform and with all versions of Python and NumPy."""

import hashlib
from collections.abc import Sequence


class Draw:
    """A stream of random integers determined by a label.

    `random.Random` and `numpy.random.Generator` promise the same random bits in all releases, but not the same integers
    below a limit or the same permutations. Here the `n`-th integer is SHAKE-256 (FIPS 202) of the label and `n`, modulo
    the limit.

    Example:
        >>> from detjax.rl.tasks.draw import Draw
        >>> Draw("sorting/seed 0").below(10) == Draw("sorting/seed 0").below(10)
        True
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._count = 0

    def below(self, limit: int) -> int:
        """Returns the next integer: 0 to `limit - 1`, equally likely to within 2^-128.

        Raises:
            ValueError: the limit is less than 1.
        """
        if limit < 1:
            raise ValueError(f"Draw: limit is {limit}; accepted: at least 1")
        # 128 bits more than the limit make the bias of the remainder negligible.
        size = limit.bit_length() // 8 + 17
        digest = hashlib.shake_256(f"{self._label}/{self._count}".encode()).digest(size)
        self._count += 1
        return int.from_bytes(digest, "big") % limit

    def between(self, low: int, high: int) -> int:
        """Returns the next integer from `low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def choice[Value](self, values: Sequence[Value]) -> Value:
        """Returns one of the values with equal probability."""
        return values[self.below(len(values))]

    def positions(self, count: int, size: int) -> frozenset[int]:
        """Returns `count` different integers from 0 to `size - 1`; all sets are equally likely."""
        remaining = list(range(size))
        return frozenset(remaining.pop(self.below(len(remaining))) for _ in range(count))
