"""Checks what a release ships: `make wheel`.

Checks the sdist and the wheel in a folder with twine, installs the wheel into an empty environment outside the
checkout, and runs a user's first commands there: `detjax demo`, `generate`, `certify` and `serve`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_CERTIFIED: Final = """
import flax.linen as nn
import jax
import jax.numpy as jnp

import detjax

model = nn.Dense(8)
weights = model.init(jax.random.key(0), jnp.zeros((1, 16)))
forward = detjax.batch_invariant(model.apply, batch_axes=(None, 0))


def arguments():
    return weights, jax.random.normal(jax.random.key(1), (4, 16))
"""

SECONDS: Final = 600
"""Time that a server may take to start or to answer, which is generous."""

ENVIRONMENT: Final = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
"""The environment without what could make the checkout's packages importable."""


def run(*command: str | Path, folder: Path) -> str:
    """Runs a command in a folder without the checkout's packages, shows what it prints, and returns it."""
    print("$", *command, flush=True)
    result = subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=False, text=True, stdout=subprocess.PIPE)
    print(result.stdout, flush=True)
    result.check_returncode()
    return result.stdout


def check_server(detjax: Path, checkpoint: Path, folder: Path) -> None:
    """Starts a server, asks it for a completion, and ends it.

    Raises:
        RuntimeError: the server ends before it listens, or with another code than 0.
        urllib.error.URLError: it does not answer.
    """
    command, log = [detjax, "serve", checkpoint, "--port", "0", "--max-length", "64"], folder / "serve.log"
    print("$", *command, flush=True)
    with log.open("w") as out, subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=out, stderr=out) as server:
        try:
            deadline = time.monotonic() + SECONDS
            while (address := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())) is None:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"detjax serve did not listen:\n{log.read_text()}")
                time.sleep(0.5)
            body = json.dumps({"model": checkpoint.name, "prompt": "ROMEO:", "max_tokens": 4, "seed": 0}).encode()
            request = urllib.request.Request(f"{address[0]}/v1/completions", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                print(json.loads(answer.read())["choices"][0]["text"].encode())
        finally:
            server.terminate()
    if server.returncode != 0:
        raise RuntimeError(f"detjax serve ended with code {server.returncode}:\n{log.read_text()}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", required=True, help="the uv executable that creates the environment")
    parser.add_argument("--python", required=True, help="the Python of the environment")
    parser.add_argument("--constraint", type=Path, required=True, help="a lock file with the versions to install")
    parser.add_argument("dist", type=Path, help="the folder with one sdist and one wheel")
    options = parser.parse_args(arguments)
    (wheel,), (sdist,) = options.dist.glob("*.whl"), options.dist.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel.resolve(), sdist.resolve(), folder=options.dist)
    with tempfile.TemporaryDirectory(prefix="detjax-wheel-") as name:
        folder = Path(name)
        run(options.uv, "venv", "--quiet", "--python", options.python, "env", folder=folder)
        python, detjax = folder / "env/bin/python", folder / "env/bin/detjax"
        install = (options.uv, "pip", "install", "--quiet", "--python", python, "--constraint")
        package = f"detjax[server,structured] @ {wheel.resolve().as_uri()}"
        run(*install, options.constraint.resolve(), package, folder=folder)
        print_folder = "import detjax, pathlib; print(pathlib.Path(detjax.__file__).parent)"
        installed = Path(run(python, "-c", print_folder, folder=folder).strip())
        if not installed.is_relative_to(folder.resolve()):
            raise RuntimeError(f"detjax is imported from {installed}; accepted: the environment in {folder}")
        run(detjax, "demo", "--asks", "100", folder=folder)
        checkpoint = installed / "demo" / "checkpoint"
        run(detjax, "generate", "--model", checkpoint, "--prompt", "ROMEO:", "--max-tokens", "8", folder=folder)
        (folder / "certified.py").write_text(_CERTIFIED)
        axes = ("--batch-axes", "[null, 0]", "--require", "proven")
        run(detjax, "certify", "certified:forward", "--args", "certified:arguments", *axes, folder=folder)
        check_server(detjax, checkpoint, folder)
    print(f"{wheel.name} runs outside of the checkout")


if __name__ == "__main__":
    main(sys.argv[1:])
