"""The context variables that tracing depends on, all made before anything is traced.

JAX's caches of traced and compiled functions have the values of all such variables in their keys. A variable that is
made later, such as by a module that is first imported while a kernel is traced, changes the key of everything that was
traced before: JAX then traces and compiles it again.
"""

import importlib
from collections.abc import Mapping
from typing import Final

import jax

_MADE_BY: Final[Mapping[str, str]] = {"tpu": "jax.experimental.pallas.fuser"}
"""Modules of JAX that make context variables, by the backend whose kernels import them."""

chosen_backend: Final = jax.make_user_context(None)
"""The backend of `use_backend`; None: `DETJAX_BACKEND` or the device decides."""

target: Final = jax.make_user_context(None)
"""The platform that programs are traced for; None: JAX's default."""

architecture: Final = jax.make_user_context(None)
"""The compute capability that kernels are traced for; None: the default device's."""

chosen_fusions: Final = jax.make_user_context(None)
"""The fusions that `without_fusions` switches off; None: `DETJAX_WITHOUT_FUSIONS` decides."""

pinned: Final = jax.make_user_context(False)
"""True while a program with the options of contracts is traced."""

chained: Final = jax.make_user_context(False)
"""True while a program that runs its kernels sequentially is traced."""

traced_for_rows: Final = jax.make_user_context(False)
"""True while a function is traced for rows, so that layers within it need not keep rows separate themselves."""


def complete(backend: str) -> None:
    """Makes the variables that JAX's libraries for a backend's kernels make."""
    if backend in _MADE_BY:
        importlib.import_module(_MADE_BY[backend])
