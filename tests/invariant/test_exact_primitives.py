"""Every primitive that certificates call exact has one set of bits: what proofs rest on.

Each runs on rows of zeros of both signs, infinities, subnormal numbers, and NaN of several signs and payloads, compiled
by `jax.jit` and by `detjax.jit`, alone and among up to 1000 rows. Rows that a certificate leaves out are left out here.
CI runs each with two dtypes, one width and two batches, which change from primitive to primitive.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from benchmarks.studies.random_programs.programs import COMPILATIONS, MAX_ROWS, met, random_rows
from detjax.audit.certification.freedoms import Freedoms
from detjax.invariant import equations

BATCHES = (1, 2, 3, 17, 33, 129, 257)
FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int32", "uint8")
MESH = Mesh(np.array(jax.devices()[:1]), "devices")

type Function = Callable[[Array], Any]


def _other(x: Array) -> Array:
    """Numbers of the same row to meet."""
    return x[:, ::-1]


def _start(x: Array, extreme: float) -> np.ndarray:
    """The number by which JAX knows largest and smallest numbers."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return np.asarray(extreme * np.inf, x.dtype)
    limits = jnp.iinfo(x.dtype)
    return np.asarray(limits.max if extreme > 0 else limits.min, x.dtype)


def _windows(function: Any, extreme: float) -> Function:
    return lambda x: lax.reduce_window(jnp.abs(x), _start(x, extreme), function, (1, 4), (1, 1), "VALID")


def _scattered(function: str) -> Function:
    """Reduces every fourth position together by a scatter, for numbers of one sign."""

    def fn(x: Array) -> Array:
        groups = jnp.arange(x.shape[1]) % 4
        return jax.vmap(lambda row: getattr(jnp.ones(4, x.dtype).at[groups], function)(row))(jnp.abs(x))

    return fn


def _constrained(x: Array) -> Array:
    return lax.with_sharding_constraint(x, jax.NamedSharding(MESH, PartitionSpec()))


def _words(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _complex(x: Array) -> Array:
    return lax.complex(x.astype(jnp.float32), _other(x).astype(jnp.float32))


def _keys(x: Array) -> Array:
    seeds = jnp.abs(x[:, 0]).astype(jnp.uint32)
    return jax.vmap(lambda seed: jax.random.key(seed))(seeds)


ANY: dict[str, Function] = {
    "copy": lambda x: jnp.array(x, copy=True),
    "stop_gradient": lambda x: lax.stop_gradient(x),
    "optimization_barrier": lambda x: lax.optimization_barrier(x),
    "sharding_constraint": _constrained,
    "select_n": lambda x: jnp.where(jnp.arange(x.shape[1])[None] % 3 == 0, x, _other(x)),
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], 2, x.shape[1])),
    "reshape": lambda x: x.reshape(x.shape[0], 1, -1),
    "squeeze": lambda x: lax.squeeze(x[:, :1], (1,)),
    "transpose": lambda x: jnp.stack([x, x], axis=2).transpose(0, 2, 1),
    "concatenate": lambda x: jnp.concatenate([x, _other(x)], axis=1),
    "pad": lambda x: lax.pad(x, jnp.asarray(0, x.dtype), ((0, 0, 0), (1, 2, 0))),
    "slice": lambda x: x[:, 1:],
    "dynamic_slice": lambda x: lax.dynamic_slice_in_dim(x, jnp.argmax(jnp.arange(2)), 1, axis=1),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice_in_dim(x, x[:, :1], jnp.argmax(jnp.arange(2)), axis=1),
    "rev": lambda x: lax.rev(x, (1,)),
    "gather": lambda x: jnp.take_along_axis(x, jnp.broadcast_to(jnp.arange(2)[None], (x.shape[0], 2)), axis=1),
    "stack": lambda x: jnp.stack([x, _other(x)], axis=1),
    "unstack": lambda x: jnp.unstack(x, axis=1)[1],
    "pvary": lambda x: jax.shard_map(
        lambda x: lax.pcast(x, "devices", to="varying"),
        mesh=MESH,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec("devices"),
    )(x),
    "split": lambda x: lax.split(x, (1, x.shape[1] - 1), axis=1)[1],
    "tile": lambda x: lax.tile(x, (1, 2)),
    "sort": lambda x: (jnp.sort(x, axis=-1), jnp.argsort(x, axis=-1)),
    "argmax": lambda x: jnp.argmax(x, axis=-1),
    "argmin": lambda x: jnp.argmin(x, axis=-1),
    "top_k": lambda x: lax.top_k(x, 3),
    "eq": lambda x: x == _other(x),
    "ne": lambda x: x != _other(x),
    "lt": lambda x: x < _other(x),
    "le": lambda x: x <= _other(x),
    "gt": lambda x: x > _other(x),
    "ge": lambda x: x >= _other(x),
    "eq_to": lambda x: lax.eq_to_p.bind(x, _other(x)),
    "lt_to": lambda x: lax.lt_to_p.bind(x, _other(x)),
    "le_to": lambda x: lax.le_to_p.bind(x, _other(x)),
    "max": lambda x: jnp.maximum(x, _other(x)),
    "min": lambda x: jnp.minimum(x, _other(x)),
    "clamp": lambda x: lax.clamp(jnp.zeros_like(x), x, _other(x)),
    "reduce_max": lambda x: jnp.max(jnp.abs(x), axis=-1),
    "reduce_min": lambda x: jnp.min(jnp.abs(x), axis=-1),
    "cummax": lambda x: lax.cummax(jnp.abs(x), axis=1),
    "cummin": lambda x: lax.cummin(jnp.abs(x), axis=1),
    "reduce_window_max": _windows(lax.max, -1),
    "reduce_window_min": _windows(lax.min, 1),
    "scatter-max": _scattered("max"),
    "scatter-min": _scattered("min"),
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "sign": jnp.sign,
}
"""For numbers of every dtype."""

OF_FLOATS: dict[str, Function] = {
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": lambda x: (lax.round(x), lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)),
    "is_finite": lax.is_finite,
    "reduce_precision": lambda x: lax.reduce_precision(x, 4, 2),
    "nextafter": lambda x: lax.nextafter(x.astype(jnp.float32), _other(x).astype(jnp.float32)),
    "bitcast_convert_type": _words,
    "complex": _complex,
    "conj": lambda x: lax.conj(_complex(x)),
    "real": lambda x: lax.real(_complex(x)),
    "imag": lambda x: lax.imag(_complex(x)),
}

OF_INTEGERS: dict[str, Function] = {
    "and": lambda x: x & _other(x),
    "or": lambda x: x | _other(x),
    "xor": lambda x: x ^ _other(x),
    "not": lambda x: ~x,
    "shift_left": lambda x: lax.shift_left(x, jnp.asarray(3, x.dtype)),
    "shift_right_logical": lambda x: lax.shift_right_logical(x, jnp.asarray(3, x.dtype)),
    "shift_right_arithmetic": lambda x: lax.shift_right_arithmetic(x, jnp.asarray(3, x.dtype)),
    "population_count": lax.population_count,
    "clz": lax.clz,
    "reduce_and": lambda x: lax.reduce_and_p.bind(x, axes=(1,)),
    "reduce_or": lambda x: lax.reduce_or_p.bind(x, axes=(1,)),
    "reduce_xor": lambda x: lax.reduce_xor_p.bind(x, axes=(1,)),
    "iota": lambda x: x + lax.iota(x.dtype, x.shape[1])[None],
    "random_seed": _keys,
    "random_bits": lambda x: jax.vmap(lambda key: jax.random.bits(key, (3,)))(_keys(x)),
    "random_fold_in": lambda x: jax.vmap(lambda key: jax.random.fold_in(key, 7))(_keys(x)),
    "random_split": lambda x: jax.vmap(lambda key: jax.random.split(key, 2))(_keys(x)),
}

DTYPES = {
    **dict.fromkeys(ANY, (*FLOATS, *INTEGERS)),
    **dict.fromkeys(OF_FLOATS, FLOATS),
    **dict.fromkeys(OF_INTEGERS, INTEGERS),
}
# This type has no infinity.
DTYPES |= dict.fromkeys(
    ("reduce_window_max", "reduce_window_min"), tuple(name for name in DTYPES["max"] if name != "float8_e4m3fn")
)
CASES = {**ANY, **OF_FLOATS, **OF_INTEGERS}


def test_every_primitive_that_is_called_exact_has_a_case() -> None:
    assert CASES.keys() == equations.EXACT.keys()
    assert all(len(reason) > 5 for reason in equations.EXACT.values())


def _rows(dtype: str, width: int) -> np.ndarray:
    seed = zlib.crc32(f"{dtype} {width}".encode())
    if jnp.issubdtype(dtype, jnp.floating):
        return random_rows(seed, dtype, width)
    return np.random.default_rng(seed).integers(0, 256, (MAX_ROWS, width)).astype(dtype)


def _arrays(results: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(results)
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


def _bits(x: np.ndarray) -> np.ndarray:
    """The bytes of each row."""
    return np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8).reshape(len(x), -1)


def _moved(fn: Function, x: np.ndarray, compilation: str) -> list[int]:
    """The batches in which a row has other bits than among all rows."""
    moved = _moved_of({"": fn}, {"": x}, compilation, {"": ()}, BATCHES)
    return [count for count, _ in moved]


def _moved_of(
    functions: dict[str, Function], rows: dict[str, np.ndarray], compilation: str, exclusions: Any, batches: Any
) -> list[tuple[int, str]]:
    """The same of several functions, each of rows of its own and without those that a proof leaves out."""
    run = COMPILATIONS[compilation](lambda rows: {name: fn(rows[name]) for name, fn in functions.items()})
    expected = {name: _arrays(results) for name, results in run(rows).items()}
    left_out = {name: met([rows[name], *results], exclusions[name]) for name, results in expected.items()}
    moved = []
    for count in batches:
        for name, results in run({name: x[:count] for name, x in rows.items()}).items():
            pairs = zip(_arrays(results), expected[name], strict=True)
            if any((_bits(made) != _bits(full)[:count])[~left_out[name][:count]].any() for made, full in pairs):
                moved.append((count, name))
    return moved


def _primitives(jaxpr: core.Jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for body in equations.bodies(eqn):
            yield from _primitives(body)


FEW, MANY = pytest.param(None, id="few"), pytest.mark.nightly


@pytest.mark.parametrize("width", [FEW, *(pytest.param(width, marks=MANY) for width in (33, 16, 128, 3))])
@pytest.mark.parametrize("name", CASES)
def test_an_exact_primitive_has_one_set_of_bits(name: str, width: int | None) -> None:
    if width is not None:
        _check(name, width, BATCHES, DTYPES[name])
        return
    number = list(CASES).index(name)
    first = [dtype for dtype in DTYPES[name] if dtype == "float32"]
    others = [dtype for dtype in DTYPES[name] if dtype not in first]
    batch = BATCHES[1 + number % (len(BATCHES) - 1)]
    _check(name, 33, (1, batch), [*first, others[number % len(others)]])


def _check(name: str, width: int, batches: Sequence[int], dtypes: Sequence[str]) -> None:
    rows = {dtype: _rows(dtype, width) for dtype in dtypes}
    exclusions, seen = {}, set()
    for dtype, x in rows.items():
        jaxpr = jax.make_jaxpr(CASES[name])(x[:2])
        freedoms = Freedoms(jaxpr, is_pinned=True)
        seen |= set(_primitives(jaxpr))
        assert not freedoms.why, (dtype, freedoms.why)
        exclusions[dtype] = freedoms.exclusions
    assert name in seen
    for compilation in COMPILATIONS:
        assert _moved_of(dict.fromkeys(rows, CASES[name]), rows, compilation, exclusions, batches) == [], compilation


@pytest.mark.parametrize("compilation", COMPILATIONS)
def test_what_is_a_risk_or_left_out_is_known_to_move(compilation: str) -> None:
    """The control: the comparison finds what it is to find."""
    x = np.random.default_rng(0).standard_normal((MAX_ROWS, 33)).astype(np.float32)
    signs_of_zero: tuple[Function, ...] = (
        lambda x: jnp.max(jnp.where(x > 0, jnp.zeros_like(x), -jnp.zeros_like(x)), -1),
        lambda x: jnp.max(-jax.nn.relu(x), -1),
        lambda x: jnp.max(x.astype(jnp.bfloat16) * jnp.bfloat16(3.1), -1),
    )
    for fn in signs_of_zero:
        assert _moved(fn, x, compilation)
    nan = (
        np.random.default_rng(1)
        .choice(np.array([0x7FC00000, 0xFFC00000, 0x7FC00001], np.uint32), x.shape)
        .view(np.float32)
    )
    assert _moved(lambda x: x + _other(x), nan, compilation)
    z = x[:, :1] + 1j * x[:, 1:2]
    assert any(_moved(lambda z, k=k: z * (1.3 + 0.1j * k), z.astype(np.complex64), compilation) for k in range(4))
