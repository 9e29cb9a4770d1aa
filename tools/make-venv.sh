#!/usr/bin/env bash
# Makes .venv with the packages of requirements.lock and an editable detjax. It always starts from nothing, because an
# interrupted run may have left packages that look installed and are not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(tools/find-python.sh)
uv=$(tools/find-uv.sh)
quiet=--quiet
[[ ! -t 2 ]] || quiet=  # a terminal gets to see the downloads

rm -rf .venv
if ! "$uv" venv --quiet --python "$python" .venv; then
  echo "detjax needs Python 3.12 or 3.13. None was found as \$PYTHON, on PATH or among pyenv's versions, and none could be" \
    "downloaded. Install one, or name one: make PYTHON=/path/to/python3.12 ..." >&2
  exit 1
fi
echo "Setting up .venv with $(.venv/bin/python --version)"
"$uv" pip sync $quiet --python .venv/bin/python --require-hashes requirements.lock
"$uv" pip install $quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
"$uv" pip check --quiet --python .venv/bin/python || {
  echo "requirements.lock does not satisfy pyproject.toml: run 'make lock'." >&2
  exit 1
}
