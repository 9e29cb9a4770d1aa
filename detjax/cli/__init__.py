"""The command line: one module per command, with a function of the same name. The module's docstring is the help text.

A command is imported only when it runs, so a missing package affects only the commands that need it. `options` turns
the fields of dataclasses into options.
"""

import ast
import importlib.util
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Annotated, Final, NoReturn

from cyclopts import Parameter

from detjax.cli import options
from detjax.invariant.arguments import NoArray
from detjax.runtime import device_memory
from detjax.runtime.compilation import EnvironmentContradiction
from detjax.version import __version__

COMMANDS: Final = (
    *("demo", "generate", "train", "serve", "verify", "certify", "divergence", "trace", "bisect", "fingerprint"),
    "quantize",
    "merge",
)
_EXTRAS: Final = {
    "serve": ("server", "prometheus_client", "pydantic", "starlette", "uvicorn"),
    "train": ("rl", "orbax"),
}
"""The extra that a command needs, and the packages that the extra installs."""
_EXPECTED_ERRORS: Final = (ValueError, NotImplementedError, OSError, EnvironmentContradiction, NoArray)

app = options.new_app(
    "detjax",
    help="LLM inference in JAX whose bits do not depend on the other requests in a batch.",
    version=f"detjax {__version__}",
    version_flags="--version",
)
app.register_install_completion_command(help="Install completion for this shell.")


def _refusal(name: str, extra: str, package: str) -> Callable[..., None]:
    """Returns the stand-in for a command whose package is not installed."""

    def refuse(*_: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> None:
        raise ValueError(f"detjax {name} needs {package}: pip install 'detjax[{extra}]'")

    return refuse


for _order, _name in enumerate(COMMANDS):
    _help = ast.get_docstring(ast.parse(resources.files(__name__).joinpath(f"{_name}.py").read_bytes())) or ""
    _extra, *_packages = _EXTRAS.get(_name, ("",))
    _missing = next((package for package in _packages if importlib.util.find_spec(package) is None), None)
    _command = f"{__name__}.{_name}:{_name}" if _missing is None else _refusal(_name, _extra, _missing)
    app.command(_command, name=_name, help=options.unwrapped(_help), sort_key=_order)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and exits with its exit code. `arguments` defaults to the process's command line."""
    device_memory.use_most()
    options.run(app, arguments, _EXPECTED_ERRORS)
