"""Records the programs that XLA compiles meanwhile."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def compiled_programs() -> Iterator[list[str]]:
    """A context with a list that gets the name of each function that is compiled in it."""
    names: list[str] = []

    def note(event: str, *_: object, fun_name: str = "", **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
