"""The decoder: one definition of the network for prefill, decode and training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, DTypeLike, Float, Float32, Int

from detjax import ops
from detjax.models.cache import KVCache, State, declarations, layers_in_slots
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import family_named
from detjax.models.mesh import Call, empty_state, empty_state_of_a_device, run, specs_of
from detjax.models.network import Network, Weights, split
from detjax.models.parts.embedding import Embedding
from detjax.models.parts.norm import RMSNorm
from detjax.models.parts.per_layer_embedding import PerLayerEmbedding
from detjax.models.parts.sharding import DeviceColumns, current_links, device_columns, linked
from detjax.models.parts.state import PagesOfLayer, StateSize
from detjax.operands.kv_pages import Queries
from detjax.operands.options import MODEL_DISTRIBUTION, Distribution, KVQuantization
from detjax.operands.sampling_arrays import Arrays
from detjax.runtime import compilation
from detjax.runtime.device_links import DeviceLinks

if TYPE_CHECKING:
    from detjax.models.configuration.generation_defaults import GenerationDefaults
    from detjax.models.vision.images import ImageOptions


class ImageRows(NamedTuple):
    """The rows of tokens that are `present` in an image; other rows are ignored.

    A token's rows are side by side: one in place of its embedding and, for some towers, rows that are added to the
    outputs of the first layers, one for each; see `VisionOptions.row_width`.
    """

    present: Bool[Arrays, "*N"]
    rows: Float[Arrays, "*N R"]


class RowAdapters(Protocol):
    """The adapters of a decoder, by name; see `detjax.models.adapters.adapter_set`."""

    by_name: dict[str, Any]

    def __call__(
        self,
        model: Any,
        tokens: Array,
        cache: KVCache | None,
        counts: Array | None,
        adapter: str | Sequence[str | None],
    ) -> Any:
        """Returns the results of the decoder for rows with adapters."""
        ...


class Decoder(nnx.Module):
    """A decoder-only transformer: an embedding, the layers of its family, and a head; for some, a vision tower.

    Attributes:
        config: shape and options.
        generation_defaults: the checkpoint's defaults for generation, or None.
        image_options: how images become patches; None for a model without a vision tower.
        video_options: how video frames become patches; None: as images do.
        quantized_from: the checkpoint whose codes and scales some weights hold; None: all weights are plain.
        mesh: the devices that share the model, with the axes "tensor" and "expert"; None: the model is on one device,
            or replicated. See `detjax.models.sharded`.
        adapters: the adapters that `__call__` knows by name; None: no adapters.
    """

    CHECKPOINT_NAMES: Final = {
        "embedding": "model.embed_tokens",
        "layers": "model.layers",
        "per_layer": "model",
        "final_norm": "model.norm",
        "lm_head": "lm_head",
        "score": "score",
        "vision": "visual",
    }

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32) -> None:
        """Makes a decoder with random weights; `dtype` is the dtype of weights, activations and cache.

        Raises:
            ValueError: the configuration's architecture belongs to no family.
        """
        family, sizes = family_named("Decoder", config.architecture), (config.vocab_size, config.hidden_size)
        factor: dict[str, Any] = {"factor": config.hidden_size**0.5} if family.scales_embedding else {}
        logits: dict[str, Any] = {"soft_cap": config.logit_soft_cap}
        if config.multipliers is not None:
            factor = {"factor": config.multipliers.embedding, "factor_dtype": jnp.float32}
            logits |= {"logit_factor": 1 / config.multipliers.logits_divisor}
        table = functools.partial(Embedding, *sizes, rngs=rngs, dtype=dtype, **logits)
        self.config = config
        self.generation_defaults: GenerationDefaults | None = None
        # Each weight takes the next random numbers, so a seed's weights depend on this order.
        self.embedding = table(**factor)
        self.layers = nnx.List([family.layer(config, index, rngs=rngs, dtype=dtype) for index in range(config.layers)])
        self.final_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype, offset=family.norm_offset)
        pooling = config.pooling
        has_head = not config.tied_embeddings and (pooling is None or pooling.has_answers)
        self.lm_head = table() if has_head else None
        self.score = None if pooling is None else pooling.classifier(config.hidden_size, rngs=rngs, dtype=dtype)
        per_layer: dict[str, Any] = {"eps": config.norm_eps, "rngs": rngs, "dtype": dtype}
        self.per_layer = (
            None
            if config.per_layer is None
            else PerLayerEmbedding(config.hidden_size, config.layers, config.per_layer, **per_layer)
        )
        vision = config.vision
        self.vision = None if vision is None else vision.tower(vision, rngs=rngs, dtype=dtype)
        self.image_options: ImageOptions | None = None
        self.video_options: ImageOptions | None = None
        self.quantized_from: str | None = None
        self.mesh: Mesh | None = None
        self.adapters: RowAdapters | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of weights, activations and cache."""
        return self.embedding.weight[...].dtype

    @overload
    def __call__(
        self, tokens: Int[Array, "B T"], *, adapter: str | Sequence[str | None] | None = None
    ) -> Float32[Array, "B T V"]: ...
    @overload
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        counts: Int[Array, "B"] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> tuple[Float32[Array, "B T V"], KVCache]: ...
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        cache: KVCache | None = None,
        counts: Int[Array, "B"] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Float32[Array, "B T V"] | tuple[Float32[Array, "B T V"], KVCache]:
        """Returns the logits of each token's successor; with a cache, also the cache with these tokens in it.

        Args:
            tokens: ids within the vocabulary. They follow the tokens that their requests have in the cache.
            cache: default: none, the tokens are whole requests from position 0 on, as in training.
            counts: the number of tokens of each request, the rest being padding on the right; default: all.
            adapter: the name of an adapter that `load` was given, or a list with a name or None for each request;
                default: none.

        Raises:
            ValueError: the model has no adapter of this name.
        """
        if adapter is not None:
            if self.adapters is None:
                raise ValueError(f"Decoder: adapter is {adapter!r}; accepted: None, as the model has no adapters")
            return self.adapters(self, tokens, cache, counts, adapter)
        hidden, written = self.hidden(tokens, cache, counts)
        return self.logits(hidden) if cache is None else (self.logits(hidden), written)

    def hidden(
        self, tokens: Int[Array, "B T"], cache: KVCache | None = None, counts: Int[Array, "B"] | None = None
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Returns the normalized last hidden states, and the cache with the tokens in it; see `__call__`."""
        batch, length = tokens.shape
        cache = self.empty_cache(batch, length) if cache is None else cache
        counts = jnp.full(batch, length, jnp.int32) if counts is None else counts.astype(jnp.int32)
        queries = cache.next_queries(counts)
        x, state = self.hidden_states(tokens, queries, cache.state)
        if cache.lost is not None:
            x = jnp.where(cache.lost[:, None, None], jnp.asarray(jnp.nan, x.dtype), x)
        return x, cache.written(state, queries)

    def hidden_states(
        self,
        tokens: Int[Array, "*N"],
        queries: Queries,
        state: State,
        images: ImageRows | None = None,
        *,
        rematerialized: bool = False,
    ) -> tuple[Float[Array, "*N D"], State]:
        """Returns the normalized last hidden states, and the layers' state with the tokens in it.

        Args:
            tokens: ids within the vocabulary, `[B, T]` or packed, `[N]`.
            queries: the requests that the tokens belong to, and the location of those in the state.
            state: the layers' state; see `empty_state`.
            images: rows of images, of the model's dtype.
            rematerialized: whether gradients recompute the activations of each layer instead of keeping them. Bits do
                not depend on it.
        """
        if self.mesh is not None:
            specs = specs_of(self.mesh, declarations(self.config))
            inputs, options = (P(), P(), specs, P()), (("rematerialized", rematerialized),)
            return run(self, Call("hidden_states", inputs, (P(), specs), options), tokens, queries, state, images)
        x, _, state = self._run_layers(tokens, queries, state, images, (), rematerialized)
        return self.final_norm(x), state

    def block(
        self,
        tokens: Int[Array, "*N"],
        queries: Queries,
        state: State,
        x: Float[Array, "*N D"],
        is_first: Bool[Array, ""] | None = None,
    ) -> tuple[Float[Array, "*N D"], Float[Array, "*N D"], State]:
        """Returns what `hidden_states` does for a block of a decoder's layers, and between the two its residual stream.

        The decoder has the layers of the block alone; see `blocks`.

        Args:
            tokens: see `hidden_states`, as for the next two.
            queries: the requests that the tokens belong to.
            state: the state of the block's layers.
            x: the residual stream after the previous block; before the first one, the embeddings of the tokens.
            is_first: whether this is the first block, which then ignores `x` and embeds the tokens itself; None: no
                block embeds them.
        """
        if self.mesh is not None:
            specs = specs_of(self.mesh, declarations(self.config)[: len(self.layers)])
            call = Call("block", (P(), P(), specs, P(), P()), (P(), P(), specs))
            return run(self, call, tokens, queries, state, x, is_first)
        before = x, is_first
        x, _, state = self._run_layers(tokens, queries, state, None, (), rematerialized=False, before=before)
        return self.final_norm(x), x, state

    def embedded(self, tokens: Int[Array, "*N"]) -> Float[Array, "*N D"]:
        """Returns the embeddings of tokens: the residual stream before the first layer."""
        if self.mesh is not None:
            return run(self, Call("embedded", (P(),), P()), tokens)
        return self.embedding(tokens)

    def hidden_and_residual_states(
        self,
        tokens: Int[Array, "*N"],
        queries: Queries,
        state: State,
        images: ImageRows | None = None,
        *,
        depths: tuple[int, ...],
    ) -> tuple[Float[Array, "*N D"], tuple[Float[Array, "*N D"], ...], State]:
        """Returns what `hidden_states` does and, between the two, the residual stream that enters some layers.

        Args:
            tokens: see `hidden_states`, as for the next three.
            queries: the requests that the tokens belong to.
            state: the layers' state.
            images: rows of images.
            depths: the indices of the layers.
        """
        if self.mesh is not None:
            specs = specs_of(self.mesh, declarations(self.config))
            inputs, outputs, options = (P(), P(), specs, P()), (P(), P(), specs), (("depths", depths),)
            call = Call("hidden_and_residual_states", inputs, outputs, options)
            return run(self, call, tokens, queries, state, images)
        x, streams, state = self._run_layers(tokens, queries, state, images, depths, rematerialized=False)
        return self.final_norm(x), streams, state

    def _run_layers(
        self,
        tokens: Int[Array, "*N"],
        queries: Queries,
        state: State,
        images: ImageRows | None,
        depths: tuple[int, ...],
        rematerialized: bool,
        before: tuple[Float[Array, "*N D"], Bool[Array, ""] | None] | None = None,
    ) -> tuple[Float[Array, "*N D"], tuple[Float[Array, "*N D"], ...], State]:
        """Returns the residual stream after the layers and at some depths, and the layers' state; see `block`."""
        run_layer = jax.checkpoint(_layer, static_argnums=0) if rematerialized else _layer
        x, present, added = self._stream_before(tokens, before), None, []
        if images is not None:
            present, width = jnp.asarray(images.present), x.shape[-1]
            embedded, *added = jnp.split(jnp.asarray(images.rows), images.rows.shape[-1] // width, axis=-1)
            x = jnp.where(present[..., None], embedded, x)
        columns, written, entering = None, [], dict[int, Array]()
        inputs = None if self.per_layer is None else self.per_layer(tokens, x)
        # A block has fewer layers than the model. Where the model has blocks, the layers of all declare the same.
        layers = zip(self.layers, declarations(self.config)[: len(self.layers)], state, strict=True)
        for index, (layer, declared, layer_state) in enumerate(layers):
            pages = written[declared.layer] if isinstance(declared, PagesOfLayer) else layer_state
            rows = (x,) if inputs is None else (x, inputs[..., index, :])
            if index in depths:
                entering[index] = x
            x, columns, new_state = run_layer(*split(layer), current_links(), rows, columns, queries, pages)
            written.append(layer_state if isinstance(declared, PagesOfLayer) else new_state)
            if index < len(added):
                x, columns = ops.add(x, added[index], mask=present), None
        return x, tuple(entering[depth] for depth in depths), tuple(written)

    def _stream_before(
        self, tokens: Int[Array, "*N"], before: tuple[Float[Array, "*N D"], Bool[Array, ""] | None] | None
    ) -> Float[Array, "*N D"]:
        """Returns the residual stream that enters the first of the layers; see `block` for what may be `before` it."""
        if before is None:
            return self.embedding(tokens)
        x, is_first = before
        return x if is_first is None else jnp.where(is_first, self.embedding(tokens), x)

    @property
    def has_slots(self) -> bool:
        """True if some layer keeps per-request state in slots, not in pages."""
        return any(self.layers_in_slots)

    @property
    def layers_in_slots(self) -> tuple[bool, ...]:
        """For each layer, whether it keeps per-request state in slots."""
        return layers_in_slots(self.config)

    def empty_state(
        self, num_pages: int, kv_quantization: KVQuantization | None = None, slots: int | None = None
    ) -> State:
        """Returns the layers' state of requests without tokens.

        Args:
            num_pages: pages of `contract.KV_BLOCK` tokens that the requests share.
            kv_quantization: the quantization of keys and values; None: they have the model's dtype.
            slots: the number of slots; only needed if the model `has_slots`.

        Raises:
            ValueError: a layer does not support such a state, such as quantized keys of its head size.
        """
        size = StateSize(num_pages, self.dtype, kv_quantization, slots)
        return empty_state(self.mesh, declarations(self.config), size)

    def empty_state_of_a_device(
        self, num_pages: int, kv_quantization: KVQuantization | None = None, slots: int | None = None
    ) -> State:
        """Returns one device's part of the state; see `empty_state`."""
        size = StateSize(num_pages, self.dtype, kv_quantization, slots)
        return empty_state_of_a_device(self.mesh, declarations(self.config), size)

    def empty_cache(self, batch: int, capacity: int, quantized: KVQuantization | None = None) -> KVCache:
        """Returns a cache for `batch` requests of up to `capacity` tokens each; see `KVCache.empty`."""
        return KVCache.empty(self.config, batch, capacity, self.dtype, quantized, self.mesh)

    def logits(self, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
        """Returns the logits of hidden states: of tokens or, in a model that pools, of classes.

        Raises:
            ValueError: the model gives embeddings.
        """
        if self.mesh is not None:
            return run(self, Call("logits", (P(),), P()), hidden)
        if self.score is not None:
            return self.score(hidden)
        pooling = self.config.pooling
        if pooling is None or not pooling.has_answers:
            return self.head.logits(hidden)
        answers = self.head.logits(hidden)[..., np.array(pooling.answer_ids)]
        return ops.add(answers[..., 1:], -answers[..., :1]) if pooling.has_contrast else answers

    def on_each_device[R](self, function: Callable[..., R], *args: Any, **options: Hashable) -> R:
        """Returns the result of a function of a decoder and further arguments, the same on every device.

        Each device that shares the model calls it with a decoder that has this device's weights.

        Args:
            function: a function of a decoder, `args` and `options` that `jax.jit` accepts.
            args: further arguments, which every device gets in full.
            options: further static arguments.
        """
        if self.mesh is None:
            return function(self, *args, **options)
        call = Call("on_each_device", (P(),) * len(args), P(), tuple(options.items()), (function,))
        return run(self, call, *args)

    def with_logits[R](
        self, function: Callable[..., R], hidden: Float[Array, "R D"], *args: Any, **options: Hashable
    ) -> R:
        """Returns the result of a function of rows' logits, without gathering logits that are sharded.

        Args:
            function: a function of `Logits`, `args` and `options` that `jax.jit` accepts. Every device calls it.
            hidden: hidden states of the rows.
            args: further arguments, which every device gets in full.
            options: further static arguments.
        """
        if self.mesh is None:
            return function(self.head.shared_logits(hidden), *args, **options)
        inputs = (P(),) * (1 + len(args))
        return run(self, Call("with_logits", inputs, P(), tuple(options.items()), (function,)), hidden, *args)

    def with_state[R](
        self, function: Callable[..., tuple[State, R]], state: State, *args: Any, **options: Hashable
    ) -> tuple[State, R]:
        """Returns the result of a function of a decoder, the layers' state and further arguments.

        Each device that shares the model calls it with a decoder that has this device's weights, and with its state.
        Loops over steps run within one call, so nothing is resharded between them.

        Args:
            function: a function of a decoder, the state, `args` and `options` that `jax.jit` accepts. It returns the
                state, and arrays that are the same on every device.
            state: the layers' state.
            args: further arguments, which every device gets in full.
            options: further static arguments.
        """
        if self.mesh is None:
            return function(self, state, *args, **options)
        specs = specs_of(self.mesh, declarations(self.config))
        inputs, outputs = (specs, *(P(),) * len(args)), (specs, P())
        return run(self, Call("with_state", inputs, outputs, tuple(options.items()), (function,)), state, *args)

    def logprobs(
        self, hidden: Float[Array, "*B D"], tokens: Int[Array, "*B"], distribution: Distribution = MODEL_DISTRIBUTION
    ) -> Float32[Array, "*B"]:
        """Returns the logprobs of given tokens after normalized hidden states, with the bits that an engine reports.

        By default they are the model's own; a distribution that tokens are drawn from may be given instead.
        """
        if self.mesh is None:
            return self.head.logprobs(hidden, tokens, distribution)
        return run(self, Call("logprobs", (P(), P()), P(), (("distribution", distribution),)), hidden, tokens)

    @property
    def head(self) -> Embedding:
        """The table that gives the logits of tokens: a separate head, or the embedding.

        Raises:
            ValueError: the model pools, and has no such head.
        """
        if (pooling := self.config.pooling) is not None and not pooling.has_answers:
            given = "embeddings" if pooling.gives_embeddings else "scores of classes"
            raise ValueError(f"Decoder: the model gives {given}, not logits of tokens; accepted: one that generates")
        return self.embedding if self.lm_head is None else self.lm_head


@functools.partial(compilation.jit, static_argnums=0)
def _layer(
    network: Network,
    weights: Weights,
    links: DeviceLinks | None,
    rows: tuple[Float[Array, "*N _"], ...],
    columns: DeviceColumns | None,
    queries: Queries,
    state: Any,
) -> tuple[Float[Array, "*N D"], DeviceColumns | None, Any]:
    """Runs a layer as a separate program, so that layers that differ only in their weights are traced once.

    Its rows are the residual stream `x` and, in some models, its second input. If devices share the model, the layer
    also gets this device's columns of `x`, to which it adds its own outputs. Otherwise it would have to slice them,
    which takes a kernel.
    """
    x, *second = rows
    with linked(links, x, columns):
        x, state = network.with_weights(weights)(x, queries, state, *second)
        return x, device_columns(x), state
