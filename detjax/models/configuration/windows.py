"""The keys of `config.json` for sliding windows: the layers that have one, and its width."""

from typing import Any, Final

from detjax.models.configuration.json_object import JsonObject

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
_DEFAULT_WINDOW: Final = 4096

type Windows = tuple[int | None, ...]
"""The sliding window of each layer, in tokens; None: all earlier tokens."""


def read_uniform_windows(file: JsonObject, layers: int, model_type: str, *, has_window: bool = False) -> Windows:
    """Returns `sliding_window` for every layer, or no windows.

    Raises:
        CheckpointError: the window is out of range, or `layer_types` says otherwise.
    """
    window = _read_window(file) if has_window else None
    types = [FULL if window is None else SLIDING] * layers
    named = file.get("layer_types")
    if named is not None and named != types:
        check_layer_types(file, named, layers)
        raise file.error("layer_types", f"{types[0]} for every layer, as {model_type} has no other layers here")
    return (window,) * layers


def read_windows_of_some_layers(file: JsonObject, layers: int, *, first: int = 28) -> Windows:
    """Returns `sliding_window` for the layers that `layer_types` names, or for all layers from `max_window_layers` on.

    `first` is the default of `max_window_layers`.

    Raises:
        CheckpointError: a value is out of range, or `layer_types` does not match the layers or the window.
    """
    window = _read_window(file) if file.boolean("use_sliding_window", False) else None
    first = file.integer("max_window_layers", first, minimum=0)
    types = [SLIDING if window is not None and index >= first else FULL for index in range(layers)]
    return read_named_windows(file, window, types)


def read_named_windows(file: JsonObject, window: int | None, types: list[str]) -> Windows:
    """Returns the window for the layers that `layer_types` names, by default for those that `types` names.

    Raises:
        CheckpointError: `layer_types` does not match the layers or the window.
    """
    layers, named = len(types), file.get("layer_types")
    if named is not None and named != types:
        check_layer_types(file, named, layers)
        if window is None:
            raise file.error("layer_types", f"{FULL} for every layer, because the model has no sliding window")
        types = named
    return tuple(window if name == SLIDING else None for name in types)


def read_alternating_windows(file: JsonObject, layers: int, pattern: int, *, window: int = _DEFAULT_WINDOW) -> Windows:
    """Returns `sliding_window` for the layers that `layer_types` names, or for all but the last of every `pattern`.

    `window` is the default of `sliding_window`.

    Raises:
        CheckpointError: the window is out of range or null, or `layer_types` does not match the layers.
    """
    window = file.integer("sliding_window", None if "sliding_window" in file.raw else window)
    named = file.get("layer_types")
    if named is None:
        named = _alternating_types(layers, pattern)
    check_layer_types(file, named, layers)
    return tuple(window if name == SLIDING else None for name in named)


def pattern_of(windows: Windows) -> int | None:
    """Returns the pattern that gives these layers their windows in `read_alternating_windows`; None if none does."""
    patterns = range(1, len(windows) + 2)
    return next((n for n in patterns if _alternating_types(len(windows), n) == _types(windows)), None)


def write_alternating_windows(windows: Windows) -> dict[str, Any]:
    """Returns the keys of `config.json` that `read_alternating_windows` reads."""
    return {"sliding_window": first_window(windows) or _DEFAULT_WINDOW, "layer_types": _types(windows)}


def write_windows_of_some_layers(windows: Windows) -> dict[str, Any]:
    """Returns the keys of `config.json` that `read_windows_of_some_layers` reads."""
    first = next((index for index, window in enumerate(windows) if window is not None), len(windows))
    return {
        "sliding_window": first_window(windows),
        "use_sliding_window": any(window is not None for window in windows),
        "max_window_layers": first,
        "layer_types": _types(windows),
    }


def first_window(windows: Windows) -> int | None:
    """Returns the window of the first layer with a window; None if no layer has one."""
    return next((window for window in windows if window is not None), None)


def _alternating_types(layers: int, pattern: int) -> list[str]:
    return [SLIDING if (index + 1) % pattern else FULL for index in range(layers)]


def _types(windows: Windows) -> list[str]:
    return [FULL if window is None else SLIDING for window in windows]


def _read_window(file: JsonObject) -> int | None:
    # null means no window; a missing key has transformers' default.
    return file.optional_integer("sliding_window", minimum=1) if "sliding_window" in file.raw else _DEFAULT_WINDOW


def check_layer_types(file: JsonObject, named: Any, layers: int, other: str = SLIDING) -> None:
    """Raises `CheckpointError` unless `layer_types` names full attention or one other type for each layer."""
    if not isinstance(named, list) or len(named) != layers or any(name not in (other, FULL) for name in named):
        raise file.error("layer_types", f"a list with {other} or {FULL} for each of {layers} layers")
