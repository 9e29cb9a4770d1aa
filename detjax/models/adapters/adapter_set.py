"""The adapters of a loaded model: `model(tokens, adapter=...)` computes each row with its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from detjax.models.adapters.adapted_model import with_adapter
from detjax.models.adapters.adapter import Adapter
from detjax.models.adapters.pool import AdapterPool, SlotArrays
from detjax.models.configuration.json_object import CheckpointError
from detjax.models.decoder import Decoder
from detjax.models.network import split
from detjax.operands.adapted_weight import NO_ADAPTER


class AdapterSet:
    """Adapters by name. Rows of one call may have different ones, each with the bits that it has alone.

    Adapters that only have factors share a pool, so a call is one pass over the model. Adapters that replace weights,
    or change the head, are models of their own: their rows are computed separately.
    """

    def __init__(self, model: Decoder, adapters: Mapping[str, Adapter]) -> None:
        """The adapters of a model, which is not modified.

        Raises:
            CheckpointError: an adapter does not fit the model.
        """
        self.by_name = dict(adapters)
        self._alone: dict[str, Decoder] = {}
        pooled = {}
        for name, adapter in adapters.items():
            try:
                AdapterPool(model, 0, adapter.rank, (adapter,)).check(adapter)
                pooled[name] = adapter
            except CheckpointError:
                self._alone[name] = with_adapter(model, adapter)  # raises if the adapter does not fit at all
        self._slots = {name: slot for slot, name in enumerate(pooled)}
        rank = max((adapter.rank for adapter in pooled.values()), default=1)
        self._pool = AdapterPool(model, len(pooled), rank, pooled.values()) if pooled else None

    def _arrays(self) -> SlotArrays:
        """The arrays of the pool, which the first call allocates: an engine has a pool of its own."""
        assert self._pool is not None
        if self._pool.arrays is None:
            self._pool.make()
            for name, slot in self._slots.items():
                self._pool.put(slot, self.by_name[name])
        assert self._pool.arrays is not None
        return self._pool.arrays

    def __call__(
        self,
        model: Decoder,
        tokens: Int[Array, "B T"],
        cache: Any,
        counts: Int[Array, "B"] | None,
        adapter: str | Sequence[str | None],
    ) -> Any:
        """Returns the results of the model for rows with adapters; see `Decoder.__call__`.

        Raises:
            NotImplementedError: a cache, and rows that need separate models.
            ValueError: a name is unknown, or there are more or fewer names than rows.
        """
        batch, length = tokens.shape
        names = [adapter] * batch if isinstance(adapter, str) else list(adapter)
        self._check(names, batch)
        models = {name: self._alone.get(name) if name is not None else None for name in dict.fromkeys(names)}
        separate = {name: decoder for name, decoder in models.items() if decoder is not None}
        if not separate:
            return self._shared(model, names, length)(tokens, cache, counts)
        if len(models) == 1:
            (decoder,) = separate.values()
            return decoder(tokens, cache, counts)
        if cache is not None:
            raise NotImplementedError(
                f"Decoder: a cache and rows with {[*models]}; accepted: rows of a single adapter if it replaces "
                "weights or changes the head"
            )
        results = np.empty((batch, length, model.config.vocab_size), np.float32)
        groups = [[index for index, name in enumerate(names) if name == one] for one in separate]
        groups.append([index for index, name in enumerate(names) if name not in separate])
        for rows in filter(None, groups):
            chosen, some = np.array(rows), None if counts is None else counts[np.array(rows)]
            decoder = separate.get(names[rows[0]]) or self._shared(model, [names[row] for row in rows], length)
            results[chosen] = np.asarray(decoder.logits(decoder.hidden(tokens[chosen], None, some)[0]))
        return jnp.asarray(results)

    def _check(self, names: Sequence[str | None], batch: int) -> None:
        unknown = [name for name in names if name is not None and name not in self.by_name]
        if unknown:
            raise ValueError(f"Decoder: adapter {unknown[0]!r}; accepted: None, {', '.join(map(repr, self.by_name))}")
        if len(names) != batch:
            raise ValueError(f"Decoder: {len(names)} adapters for {batch} rows; accepted: one name, or one per row")

    def _shared(self, model: Decoder, names: Sequence[str | None], length: int) -> Decoder:
        """Returns the model for rows with adapters of the pool."""
        if self._pool is None or all(name is None for name in names):
            return model
        slots = [NO_ADAPTER if name is None else self._slots[name] for name in names]
        rows = jnp.asarray(np.repeat(np.array(slots, np.int32)[:, None], length, axis=1))
        return self._arrays().adapted(model, rows)


def without_adapters(model: Decoder) -> Decoder:
    """Returns a decoder that shares the weights, and knows no adapter by name."""
    if model.adapters is None:
        return model
    network, weights = split(model)
    plain = network.with_weights(weights)
    plain.adapters = None
    return plain
