"""Checks types with pyright, in the files that it has not seen with the same imports: `python tools/check_types.py`.

The argument is another project's configuration, such as tests/pyrightconfig.json; default: pyproject.toml. What pyright
says about a file depends on the file, on the project's files that it imports, directly or not, and on the packages.
`.types_cache` remembers the files without errors by a hash of all of these.
"""

import ast
import hashlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

CACHE: Final = Path(".types_cache")
DEFAULT: Final = "pyproject.toml"


def files_of(project: Path) -> list[Path]:
    """Returns the Python files that a project's configuration includes."""
    text, parent = project.read_text(), project.parent
    settings = tomllib.loads(text)["tool"]["pyright"] if project.suffix == ".toml" else json.loads(text)
    paths = [parent / name for name in settings["include"]]
    return sorted(
        file
        for path in paths
        for file in (path.rglob("*.py") if path.is_dir() else [path])
        if not any(part.startswith(".") or part == "__pycache__" for part in file.parts)
    )


def imports_of(file: Path) -> Iterator[Path]:
    """Yields the project's files that an import of a file may name, each a module or the `__init__.py` of a package."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                modules = [part for alias in names for part in _packages(alias.name.split("."))]
                folders = [Path(), file.parent]
            case ast.ImportFrom(module=module, names=names, level=level):
                parts = module.split(".") if module else []
                modules = [parts, *([*parts, alias.name] for alias in names)]
                folders = [file.parents[level - 1]] if level else [Path(), file.parent]
            case _:
                continue
        for folder in folders:
            for parts in modules:
                path = folder.joinpath(*parts)
                yield from (one for one in (path.with_name(f"{path.name}.py"), path / "__init__.py") if one.is_file())


def _packages(parts: list[str]) -> list[list[str]]:
    return [parts[: count + 1] for count in range(len(parts))]


def keys(files: Sequence[Path], base: str) -> dict[Path, str]:
    """Returns a hash for each file of all that its types depend on. `base` says what all of them depend on."""
    imports: dict[Path, set[Path]] = {}
    hashes: dict[Path, str] = {}
    unread = set(files)
    while unread:
        file = unread.pop()
        imports[file], hashes[file] = set(imports_of(file)), hashlib.sha256(file.read_bytes()).hexdigest()
        unread |= imports[file] - imports.keys()

    def key(file: Path) -> str:
        reached, new = {file}, {file}
        while new:
            new = set[Path]().union(*(imports[one] for one in new)) - reached
            reached |= new
        parts = [base, str(file), *(f"{one} {hashes[one]}" for one in sorted(reached))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    return {file: key(file) for file in files}


def main(arguments: list[str]) -> int:
    """Runs pyright on the files that may have other errors than before, and returns its exit code."""
    project = Path(arguments[0] if arguments else DEFAULT)
    packages = sorted(f"{one.name} {one.version}" for one in distributions())
    base = "\n".join([sys.version, project.read_text(), Path(__file__).read_text(), *packages])
    cache = CACHE / "-".join(project.parts)
    clean = set(cache.read_text().split()) if cache.exists() else set[str]()
    files = keys(files_of(project), base)
    changed = [file for file, key in files.items() if key not in clean]
    if changed:
        command = [Path(sys.executable).with_name("pyright"), "--project", project, "--pythonpath", sys.executable]
        if len(changed) < len(files):
            command += changed
        if code := subprocess.run(command, check=False).returncode:
            return code
    CACHE.mkdir(exist_ok=True)
    cache.write_text("\n".join(files.values()))
    print(f"Types: {len(changed)} of {len(files)} files of {project} were checked")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
