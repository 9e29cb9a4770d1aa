"""The context variables of tracing are made before anything is traced, so nothing is traced or compiled twice."""

import subprocess
import sys

import pytest

SCRIPT = """
import importlib, pkgutil, sys
import jax
import detjax
from jax._src import config
from detjax.runtime import compilation

sizes = []

def traced(x):
    sizes.append(len(config.trace_context()))
    return x + 1

with detjax.use_backend("tpu"):
    compilation.lowered(detjax.jit(traced), 1.0)
fn = jax.jit(lambda x: x + 1)
first = fn.trace(1.0).jaxpr.jaxpr
for module in pkgutil.walk_packages(detjax.__path__, "detjax."):
    if {module.name.partition(".")[2].partition(".")[0]} & {"cli", "server", "__main__"}:
        continue
    try:
        importlib.import_module(module.name)
    except ImportError:  # an optional package is missing
        pass
assert {"detjax.pallas.nvidia", "detjax.pallas.tpu.attention", "detjax.invariant.transform"} <= {*sys.modules}
if "late" in sys.argv:
    jax.make_user_context(None)
print(len(config.trace_context()) - sizes[0], fn.trace(1.0).jaxpr.jaxpr is first)
"""


@pytest.mark.parametrize(("argument", "expected"), [("", "0 True"), ("late", "1 False")])
def test_no_module_makes_a_context_variable_after_the_first_trace(argument: str, expected: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, argument], capture_output=True, text=True, timeout=300, check=False
    )
    assert process.stdout.split("\n")[-2:-1] == [expected], process.stderr
