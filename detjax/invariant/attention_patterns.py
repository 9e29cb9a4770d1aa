"""Recognizes equations that together are attention: two products, with scale, mask and softmax in between."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core

from detjax import ops
from detjax.contract import INPUT_DTYPES
from detjax.invariant import equations
from detjax.invariant.equations import Program, aval
from detjax.invariant.patterns import Softmax, Uses

_LOWEST_FILL: Final = -1e30
"""Largest fill value of a masked score: its `exp` is 0 next to any other score."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """The visible scores.

    Attributes:
        seen: booleans with some of the axes of the scores.
        axes: the axis of the scores for each axis of `seen`.
        is_negated: whether true means masked.
        fill: the value of masked scores.
    """

    seen: core.Var
    axes: tuple[int, ...]
    is_negated: bool
    fill: float


class Axes(NamedTuple):
    """The roles of the scores' axes, except for the last axis, which is keys.

    Axes that keys and values share are requests or heads; the others belong to queries alone. Queries whose axes are in
    this order need no transposition.

    Attributes:
        requests: axes of queries, keys and values.
        tokens: axes of queries alone.
        heads: further axes of queries, keys and values.
        shared: further axes of queries alone, which share a head of keys.
    """

    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    heads: tuple[int, ...]
    shared: tuple[int, ...]

    @classmethod
    def from_queries(cls, query_axes: Mapping[int, int], paired: Collection[int]) -> "Axes":
        """Returns the roles of axes, given the queries' axis of each, and the axes that keys and values have too."""
        order = sorted(query_axes, key=query_axes.__getitem__)
        runs = [tuple(run) for _, run in itertools.groupby(order, key=lambda axis: axis in paired)]
        if order and order[0] not in paired:
            runs.insert(0, ())
        if len(runs) > len(cls._fields):
            requests, tokens = (tuple(x for x in order if (x in paired) == kind) for kind in (True, False))
            return cls(requests, tokens, (), ())
        return cls(*runs, *[()] * (len(cls._fields) - len(runs)))


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """`softmax(q k^T * scale) v`.

    Attributes:
        q: the queries.
        k: the keys.
        v: the values.
        axes: the roles of the scores' axes.
        q_axes: axes of the queries in the order of `axes`, then columns.
        k_axes: axes of the keys in the order requests, keys, heads, columns.
        v_axes: axes of the values in the same order.
        scale: the factor of the scores.
        mask: the visible scores; None: all.
        out_axes: for each axis of the result, its index among `axes` followed by columns.
        result: the result.
        equations: the indices of its equations in the program; the last one computes the result.
    """

    q: core.Var
    k: core.Var
    v: core.Var
    axes: Axes
    q_axes: tuple[int, ...]
    k_axes: tuple[int, ...]
    v_axes: tuple[int, ...]
    scale: float
    mask: Mask | None
    out_axes: tuple[int, ...]
    result: core.Var
    equations: tuple[int, ...]

    @property
    def operands(self) -> dict[str, core.Var]:
        """The variables that the attention reads, by argument name."""
        operands = {"q": self.q, "k": self.k, "v": self.v}
        return operands if self.mask is None else operands | {"mask": self.mask.seen}

    def is_served(self, count: int) -> bool:
        """Returns whether the backend has attention for these shapes with `count` examples."""
        shapes = {
            name: jax.ShapeDtypeStruct((count, *aval(x).shape), aval(x).dtype) for name, x in self.operands.items()
        }
        try:
            jax.eval_shape(self, shapes)
        except NotImplementedError:
            return False
        return True

    def __call__(self, values: Mapping[str, Array]) -> Array:
        """Returns the result `[B, ...]` for q, k and v `[B, ...]`, and the mask `[B or 1, ...]`, if any."""
        q, k, v = (
            values[name].transpose(0, *(axis + 1 for axis in axes))
            for name, axes in (("q", self.q_axes), ("k", self.k_axes), ("v", self.v_axes))
        )
        sizes = iter(q.shape[1:])
        requests, tokens, heads, shared = ([next(sizes) for _ in axes] for axes in self.axes)
        requests = [q.shape[0], *requests]
        q = q.reshape(math.prod(requests), math.prod(tokens), math.prod((*heads, *shared)), -1)
        k, v = (x.reshape(math.prod(requests), x.shape[len(requests)], math.prod(heads), -1) for x in (k, v))
        seen = None
        if self.mask is not None:
            seen = _spread(self._seen(values["mask"]), (requests, (*heads, *shared), tokens, k.shape[1:2]))
        start = jnp.zeros(q.shape[0], jnp.int32)
        o = ops.dot_product_attention(q, k, v, q_start=start, mask=seen, causal=False, scale=self.scale)
        if seen is not None:
            sees_any = jnp.any(seen, axis=-1).swapaxes(1, 2)[..., None]
            o = jnp.where(sees_any, o, self._unseen_value(v, q.shape[2] // k.shape[2]))
        o = o.reshape(*requests, *tokens, *heads, *shared, -1)
        return o.transpose(0, *(axis + 1 for axis in self.out_axes))

    def _seen(self, seen: Array) -> Array:
        """Returns the mask with all axes of requests, heads, tokens and keys, of size 1 where it has none."""
        assert self.mask is not None
        sizes = [1] * (sum(map(len, self.axes)) + 1)
        for size, axis in zip(seen.shape[1:], self.mask.axes, strict=True):
            sizes[axis] = size
        order = (*self.axes.requests, *self.axes.heads, *self.axes.shared, *self.axes.tokens, len(sizes) - 1)
        seen = seen.reshape(seen.shape[0], *sizes).transpose(0, *(axis + 1 for axis in order))
        return ~seen if self.mask.is_negated else seen

    def _unseen_value(self, v: Array, shared: int) -> Array:
        """Returns the output of a query that sees no key: the mean of all values, as its scores are equal, or NaN."""
        assert self.mask is not None
        if math.isinf(self.mask.fill):
            return jnp.asarray(jnp.nan, v.dtype)
        mean = ops.dot_product_attention(jnp.zeros_like(v[:, :1]), jnp.zeros_like(v), v, causal=False)
        return jnp.repeat(mean, shared, axis=2)


def _spread(seen: Array, sizes: Sequence[Sequence[int]]) -> Array:
    """Returns a mask `[requests, heads, tokens, keys]`.

    Requests and heads keep size 1 where the mask does not depend on them.
    """
    shape, axis = [], 0
    for number, group in enumerate(sizes):
        part = seen.shape[axis : axis + len(group)]
        shape.append(tuple(part) if number < 2 and math.prod(part) == 1 else tuple(group))
        axis += len(group)
    seen = jnp.broadcast_to(seen, tuple(size for group in shape for size in group))
    return seen.reshape([math.prod(group) for group in shape])


def attentions(uses: Uses, softmaxes: Sequence[Softmax]) -> list[Attention]:
    """Returns the attentions of a program, given the result of `patterns.softmaxes` for it.

    Each is a product of two arrays whose float32 result is scaled by a number, masked by a `where` with -inf or a very
    low number, passed to softmax, rounded, and multiplied by a third array, with transpositions in between. No other
    equation reads an intermediate value.
    """
    matches = (_Match(uses, softmax).attention() for softmax in softmaxes)
    return [attention for attention in matches if attention is not None]


class _NoMatch(Exception):
    """The equations are not attention."""


class _Match:
    """Matches the equations around a softmax."""

    def __init__(self, uses: Uses, softmax: Softmax) -> None:
        self._uses, self._softmax = uses, softmax
        self._taken = set(softmax.equations)

    def attention(self) -> Attention | None:
        """Returns the attention that the softmax is part of, if any."""
        try:
            return self._attention()
        except _NoMatch:
            return None

    def _attention(self) -> Attention:
        mask, scores = self._mask(self._softmax.x)
        scale, order, product = self._product(scores)
        (contracted, paired_axes) = product.params["dimension_numbers"]
        free = [_free_axes(product, side) for side in (0, 1)]
        # The axes of the operands for each axis of the product, then for each axis of the scores.
        sources: list[tuple[int | None, int | None]] = [*zip(*paired_axes, strict=True)]
        sources += [(axis, None) for axis in free[0]] + [(None, axis) for axis in free[1]]
        *sources, keys = [sources[axis] for axis in order]
        _require(None in keys)
        side = 1 - keys.index(None)
        _require(len(free[side]) == 1 and len(contracted[0]) == 1)
        operands: list[Any] = product.invars
        q, k = operands[1 - side], operands[side]
        query_axes, key_axes = (
            {axis: n for axis, source in enumerate(sources) if (n := source[one]) is not None}
            for one in (1 - side, side)
        )
        paired = list(key_axes)
        axes = Axes.from_queries(query_axes, paired)

        last, v, value_axes, v_axis, out = self._values(paired, len(sources) + 1)
        v_free = [axis for axis in range(aval(v).ndim) if axis not in (*value_axes.values(), v_axis)]
        _require(len(v_free) == 1 and _have_one_dtype(q, k, v, last.outvars[0]))
        order = (*axes.requests, *axes.tokens, *axes.heads, *axes.shared)

        def page_axes(axis_of: Mapping[int, int], keys: int, columns: int) -> tuple[int, ...]:
            requests, heads = ([axis_of[axis] for axis in group] for group in (axes.requests, axes.heads))
            return (*requests, keys, *heads, columns)

        return Attention(
            q=q,
            k=k,
            v=v,
            axes=axes,
            q_axes=(*(query_axes[axis] for axis in order), contracted[1 - side][0]),
            k_axes=page_axes(key_axes, free[side][0], contracted[side][0]),
            v_axes=page_axes(value_axes, v_axis, v_free[0]),
            scale=scale,
            mask=mask,
            out_axes=tuple(len(order) if axis is None else order.index(axis) for axis in out),
            result=last.outvars[0],
            equations=(*sorted(self._taken), self._uses.makers[last.outvars[0]]),
        )

    # --- before the softmax -------------------------------------------------------------------------------------------

    def _mask(self, x: Any) -> tuple[Mask | None, Any]:
        """Returns the mask of the scores, if any, and the scores without it."""
        eqn = self._uses.maker(x)
        _require(eqn is not None and self._uses.count[x] == 2)
        assert eqn is not None
        selection = _Selection.from_equation(eqn, self._uses)
        if selection is None:
            return None, x
        self._taken.add(self._uses.makers[x])
        return selection

    def _product(self, x: Any) -> tuple[float, list[int], core.JaxprEqn]:
        """Returns the scale, the product's axis for each axis of the scores, and the product."""
        scale, order, readers = 1.0, list(range(aval(x).ndim)), 2 if x is self._softmax.x else 1
        while True:
            eqn = self._uses.maker(x)
            _require(eqn is not None and self._uses.count[x] == readers)
            assert eqn is not None
            self._taken.add(self._uses.makers[x])
            readers, name = 1, eqn.primitive.name
            if name == "dot_general":
                return scale, order, eqn
            if name == "transpose":
                order = [eqn.params["permutation"][axis] for axis in order]
                (x,) = eqn.invars
            elif name in ("mul", "div"):
                operands: list[Any] = eqn.invars
                numbers = [v for v in operands if _is_number(v)]
                others = [v for v in operands if not _is_number(v)]
                _require(len(numbers) == len(others) == 1 and (name == "mul" or others[0] is operands[0]))
                factor = float(numbers[0].val)
                _require(factor > 0 and math.isfinite(factor))
                scale = scale * factor if name == "mul" else scale / factor
                (x,) = others
            else:
                raise _NoMatch

    # --- after the softmax --------------------------------------------------------------------------------------------

    def _values(
        self, paired: Sequence[int], ndim: int
    ) -> tuple[core.JaxprEqn, Any, dict[int, int], int, list[int | None]]:
        """Matches the product with the values.

        Returns the product, the values, the values' axis for each paired axis, the values' axis of keys, and for each
        axis of the product the axis of the scores, None for columns.
        """
        p = self._softmax.result
        eqn = self._only_reader(p)
        if eqn.primitive.name == "convert_element_type":
            self._taken.add(self._uses.makers[eqn.outvars[0]])
            p = eqn.outvars[0]
            eqn = self._only_reader(p)
        _require(eqn.primitive.name == "dot_general")
        side = 0 if eqn.invars[0] is p else 1
        contracted, paired_axes = eqn.params["dimension_numbers"]
        _require(tuple(contracted[side]) == (ndim - 1,) and sorted(paired_axes[side]) == list(paired))
        v = eqn.invars[1 - side]
        free: list[list[int | None]] = [[axis for axis in range(ndim - 1) if axis not in paired], [None]]
        out = [*paired_axes[side], *free[side], *free[1 - side]]
        return eqn, v, dict(zip(paired_axes[side], paired_axes[1 - side], strict=True)), contracted[1 - side][0], out

    def _only_reader(self, x: Any) -> core.JaxprEqn:
        readers = self._uses.readers.get(x, [])
        _require(self._uses.count[x] == len(readers) == 1)
        return self._uses.eqns[readers[0]]


class _Selection(NamedTuple):
    """`where(mask, scores, fill)`."""

    mask: Mask
    scores: Any

    @classmethod
    def from_equation(cls, eqn: core.JaxprEqn, uses: Uses) -> "_Selection | None":
        """Returns the selection of scores by a mask that an equation computes: `select_n`, or a call of it."""
        atoms: dict[Any, Any] = {}
        if equations.is_call(eqn):
            body = Program.from_jaxpr(equations.body(eqn))
            if body.constants or len(body.results) != 1:
                return None
            atoms = dict(zip(body.inputs, eqn.invars, strict=True))
            inner = Uses.from_program(body)
            names = {one.primitive.name for one in body.eqns}
            selection = inner.maker(body.results[0])
            if selection is None or not names <= {"broadcast_in_dim", "select_n", "convert_element_type"}:
                return None
            eqn, uses = selection, inner
        if eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
            return None

        def origin(atom: Any) -> tuple[Any, tuple[int, ...]]:
            """Returns the array that an operand is broadcast from, and the operand's axes of its axes."""
            axes = tuple(range(aval(atom).ndim))
            while (maker := uses.maker(atom)) is not None:
                if maker.primitive.name == "broadcast_in_dim":
                    axes = tuple(axes[k] for k in maker.params["broadcast_dimensions"])
                elif maker.primitive.name != "convert_element_type" or axes:  # a number's type
                    break
                atom = maker.invars[0]
            return (atom if isinstance(atom, core.Literal) else atoms.get(atom, atom)), axes

        (seen, axes), *cases = map(origin, eqn.invars)
        fills = [index for index, (atom, _) in enumerate(cases) if _is_number(atom) and float(atom.val) <= _LOWEST_FILL]
        if isinstance(seen, core.Literal) or aval(seen).dtype != jnp.bool_ or len(fills) != 1:
            return None
        (fill,) = fills
        scores, scores_axes = cases[1 - fill]
        if isinstance(scores, core.Literal) or scores_axes != tuple(range(aval(eqn.outvars[0]).ndim)):
            return None
        mask = Mask(seen, axes, is_negated=fill == 1, fill=float(cases[fill][0].val))
        return cls(mask, scores)


def _require(holds: bool) -> None:
    if not holds:
        raise _NoMatch


def _free_axes(eqn: core.JaxprEqn, side: int) -> list[int]:
    contracted, paired = eqn.params["dimension_numbers"]
    return [axis for axis in range(aval(eqn.invars[side]).ndim) if axis not in (*contracted[side], *paired[side])]


def _is_number(atom: Any) -> bool:
    return isinstance(atom, core.Literal) and np.ndim(atom.val) == 0


def _have_one_dtype(*atoms: Any) -> bool:
    """Returns whether values are nonempty arrays of one dtype under contract."""
    first = aval(atoms[0]).dtype
    return str(first) in INPUT_DTYPES and all(
        isinstance(atom, core.Var) and aval(atom).dtype == first and math.prod(aval(atom).shape) for atom in atoms
    )
