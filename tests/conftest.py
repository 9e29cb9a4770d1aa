"""Settings for every test: typed arrays are checked, JAX converts and broadcasts nothing silently."""

import jaxtyping

with jaxtyping.install_import_hook("detjax", "beartype.beartype"):
    import detjax  # noqa: F401

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
