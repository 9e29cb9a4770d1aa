"""Values of JAX's options other than those that they have."""

from typing import Any

import jax

TEXTS = {
    "jax_debug_log_modules": "jax._src.dispatch",
    "jax_dump_ir_modes": "jaxpr",
    "jax_hlo_source_file_canonicalization_regex": ".*/",
    "jax_persistent_cache_enable_xla_caches": "none",
    "jax_source_url_schema": "https://example.org/{file}",
}


def other_value(name: str) -> Any:
    """Returns a value that an option accepts and does not have."""
    kind, _, keywords = jax.config.meta[name]
    value = jax.config.values[name]
    if kind is bool:
        return not value
    if kind in (int, float):
        return (value or 0) + 1
    if kind in ("enum", "enum_class"):
        choices = [choice for choice in keywords.get("enum_values") or keywords["enum_class"] if choice != value]
        # What is only logged ends no process.
        return next((choice for choice in choices if choice == "log"), choices[0])
    return TEXTS.get(name, "other")
