"""The entries of the API reference: every public name of the modules below."""

import importlib
import importlib.util
import inspect
import types
from typing import Final

MODULES: Final = {
    "api/index.md": ("detjax",),
    "api/ops.md": ("detjax.ops",),
    "api/models.md": ("detjax.models",),
    "api/engine.md": ("detjax.engine",),
    "api/audit.md": ("detjax.audit",),
    "api/layers.md": ("detjax.models.nnx", "detjax.models.linen"),
    "api/rl.md": (
        "detjax.rl.functional",
        "detjax.rl.trainer.trainer",
        "detjax.rl.trainer.step",
        "detjax.rl.rollouts",
        "detjax.rl.rewards",
        "detjax.rl.trainer.losses",
        "detjax.rl.policy_gradients.advantages",
        "detjax.rl.trainer.microbatches",
        "detjax.rl.trainer.optimizers",
    ),
    "api/server.md": ("detjax.server",),
    "api/contract.md": ("detjax.contract", "detjax.operands.options"),
}
"""The modules of each page of the reference."""

PLACEHOLDER: Final = "<!-- public names -->"


def public_names(module: str) -> list[str]:
    """Returns the names of functions and classes that a module defines or reexports."""
    loaded = importlib.import_module(module)
    names = []
    for name, value in vars(loaded).items():
        if name.startswith("_") or isinstance(value, types.ModuleType):
            continue
        origin = getattr(value, "__module__", None)
        # Only packages reexport names; a module's imports are private.
        is_package = hasattr(loaded, "__path__")
        if (
            callable(value)
            and isinstance(origin, str)
            and (origin.startswith("detjax") if is_package else origin == module)
        ):
            names.append(name)
    return sorted(names, key=str.lower)


def path_of(module: str, name: str) -> str:
    """Returns the path of an entry: in the module, or in the defining module if a submodule has the same name."""
    is_package = hasattr(importlib.import_module(module), "__path__")
    if is_package and importlib.util.find_spec(f"{module}.{name}") is not None:
        return f"{getattr(importlib.import_module(module), name).__module__}.{name}"
    return f"{module}.{name}"


def expanded(text: str, page: str) -> str:
    """Returns a page of the reference with an entry for each public name in place of the placeholder."""
    entries = []
    for module in MODULES[page]:
        if len(MODULES[page]) > 1:
            entries.append(f"## {module}\n")
            if summary := inspect.getdoc(importlib.import_module(module)):
                entries.append(summary.split("\n\n")[0] + "\n")
        level = 3 if len(MODULES[page]) > 1 else 2
        for name in public_names(module):
            entries.append(f"::: {path_of(module, name)}\n    options:\n      heading_level: {level}\n")
    return text.replace(PLACEHOLDER, "\n".join(entries))


def expected_anchors() -> dict[str, set[str]]:
    """Returns the required anchors of each page of the reference."""
    return {
        page: {path_of(module, name) for module in modules for name in public_names(module)}
        for page, modules in MODULES.items()
    }
