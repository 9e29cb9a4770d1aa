"""An operation finds the module of the backend that serves, and loads no other."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys

import pytest

import detjax
from detjax import ops
from detjax.ops.dispatch import Operation
from detjax.runtime import backends

OPERATIONS = {
    value.name: value
    for module in pkgutil.iter_modules(ops.__path__, "detjax.ops.")
    for value in vars(importlib.import_module(module.name)).values()
    if isinstance(value, Operation)
}

WHOLE = {name: operation for name, operation in OPERATIONS.items() if not operation.part_of}

USE_EVERY_KIND_OF_OPERATION = """
import sys
import jax.experimental.layout, flax.nnx
loaded = set(sys.modules)
import jax, jax.numpy as jnp
import detjax
from detjax import ops

def use(x):
    x = ops.embed(jnp.zeros(2, jnp.int32), x)
    x = ops.rms_norm(ops.matmul(x, jnp.ones((8, 8))), jnp.ones(8), eps=1e-6)
    ops.top_logprobs(x, 2)
    ops.rope(x[:, None], jnp.arange(2), ops.RotaryEmbedding(8, 1e4))
    return ops.dot_product_attention(x[None, :, None], x[None, :, None], x[None, :, None])

for backend in ("portable", "stock"):
    with detjax.use_backend(backend):
        jax.eval_shape(use, jnp.ones((4, 8)))
print("modules:", *sys.modules.keys() - loaded)
"""


def test_operations_on_a_cpu_load_no_kernel_of_a_chip() -> None:
    run = [sys.executable, "-c", USE_EVERY_KIND_OF_OPERATION]
    answer = subprocess.run(run, capture_output=True, text=True, check=True)
    loaded = set(answer.stdout.rpartition("modules:")[2].split())
    assert {"detjax.ops.attention", "detjax.portable.attention", "detjax.stock.attention"} <= loaded
    chips = re.compile(r"detjax\.pallas|jax\.experimental\.(pallas|mosaic)|jax\._src\.pallas\.mosaic")
    assert not [name for name in loaded if chips.match(name)]


def test_every_operation_has_a_module_on_every_backend() -> None:
    assert {"matmul", "rms_norm", "softmax", "attention", "sample", "embed", "psum"} <= set(WHOLE)
    for operation in WHOLE.values():
        assert set(operation.modules) == {*backends.BACKENDS, backends.STOCK}, operation.name


def test_a_part_is_served_where_its_backend_serves_what_it_is_a_part_of() -> None:
    parts = {name: operation for name, operation in OPERATIONS.items() if operation.part_of}
    assert "vocabulary_blocks" in parts
    for part in parts.values():
        assert WHOLE.keys() >= set(part.part_of), part.name
        assert backends.STOCK not in part.modules, part.name
        for backend in ("portable", "stock"):
            with detjax.use_backend(backend):
                assert part.is_served() == (backend in part.modules), part.name


def test_a_part_is_not_served_where_another_backend_serves_what_it_is_a_part_of() -> None:
    modules = dict.fromkeys(("portable", "hopper"), "detjax.portable.vocabulary_blocks")
    part = Operation("vocabulary_blocks", modules, part_of=("sample", "log_softmax"))
    with detjax.use_backend("hopper"):
        assert part.is_served()
        with detjax.without_fusions("sample"):
            assert not part.is_served()


@pytest.mark.parametrize("operation", WHOLE.values(), ids=WHOLE)
def test_stock_provides_whole_operations_and_the_portable_backend_kernels(operation: Operation) -> None:
    with detjax.use_backend("stock"):
        assert callable(getattr(operation.module(), operation.name))
    with detjax.use_backend("portable"):
        assert not hasattr(operation.module(), "DIFFERENTIATED_BY_JAX")


def test_no_operation_asks_for_the_stock_backend_by_name() -> None:
    for module in pkgutil.iter_modules(ops.__path__, "detjax.ops."):
        source = inspect.getsource(importlib.import_module(module.name))
        assert not re.search(r"backends\.STOCK|== [\"']stock[\"']", source), module.name


def test_call_passes_operands_and_options_to_whichever_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = Operation("softmax", {"portable": "detjax.portable.softmax", "stock": "detjax.stock.softmax"})
    monkeypatch.setattr("detjax.stock.softmax.softmax", lambda *args, **options: ("stock", args, options))
    with detjax.use_backend("portable"):
        assert operation.call(lambda *args, **options: ("contract", args, options), 1, eps=2) == (
            "contract",
            (1,),
            {"eps": 2},
        )
    with detjax.use_backend("stock"):
        assert operation.call(lambda *_: None, 1, eps=2) == ("stock", (1,), {"eps": 2})
