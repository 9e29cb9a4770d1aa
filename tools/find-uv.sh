#!/usr/bin/env bash
# Prints the path of a uv that runs: the one on PATH, or one that it installs into .tools/uv first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if uv --version >/dev/null 2>&1; then
  command -v uv
  exit
fi

home=$PWD/.tools/uv
if "$home/bin/uv" --version >/dev/null 2>&1; then
  echo "$home/bin/uv"
  exit
fi

# A system's Python may lack ensurepip and then cannot make the environment, so the next one is tried.
for python in "$(tools/find-python.sh)" python3 /usr/bin/python3; do
  command -v "$python" >/dev/null || continue
  rm -rf "$home"
  if "$python" -m venv "$home" >&2 && "$home/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.11' >&2; then
    echo "$home/bin/uv"
    exit
  fi
done
echo "uv is not on PATH and could not be installed into .tools/uv (see above). Install uv, then run again." >&2
exit 1
