"""An operation finds the module of the backend that serves, and loads no other."""

import re
import subprocess
import sys

import pytest

LOADED_MODULES = """
import sys
{imports}
print("modules:", *sys.modules)
"""

USE_EVERY_KIND_OF_OPERATION = """
import jax.numpy as jnp
import detjax
from detjax import ops
with detjax.use_backend({backend!r}):
    x = ops.embed(jnp.zeros(2, jnp.int32), jnp.ones((4, 8)))
    x = ops.rms_norm(ops.matmul(x, jnp.ones((8, 8))), jnp.ones(8), eps=1e-6)
    ops.top_logprobs(x, 2)
    ops.rope(x[:, None], jnp.arange(2), ops.RotaryEmbedding(8, 1e4))
    ops.dot_product_attention(x[None, :, None], x[None, :, None], x[None, :, None])
"""


def loaded_modules(imports: str) -> set[str]:
    """The names of all modules that a fresh process has loaded after `imports`."""
    program = LOADED_MODULES.format(imports=imports)
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    return set(answer.stdout.rpartition("modules:")[2].split())


@pytest.mark.parametrize("backend", ["portable", "stock"])
def test_operations_on_a_cpu_load_no_kernel_of_a_chip(backend: str) -> None:
    loaded = loaded_modules(USE_EVERY_KIND_OF_OPERATION.format(backend=backend))
    assert "detjax.ops.attention" in loaded
    chips = re.compile(r"detjax\.pallas|jax\.experimental\.(pallas|mosaic)|jax\._src\.pallas\.mosaic")
    brought_by_jax = loaded_modules("import jax.experimental.layout, flax.nnx")
    assert not [name for name in loaded - brought_by_jax if chips.match(name)]
