#!/usr/bin/env bash
# Prints the path of a Python that requirements.lock supports, or the version to ask for if the machine has none.
set -euo pipefail

# A name on PATH proves nothing: version managers put shims there for versions that are not selected, and these fail.
working_path() {
  "$1" -c 'import sys
if not (3, 12) <= sys.version_info[:2] < (3, 14):
    sys.exit(1)
print(sys.executable)' </dev/null 2>/dev/null
}

if [[ -n ${PYTHON:-} ]]; then
  working_path "$PYTHON" && exit
  version=$("$PYTHON" --version 2>&1) || version="does not run"
  echo "PYTHON=$PYTHON: $version; accepted: Python 3.12 or 3.13. Name one of these, or leave PYTHON unset." >&2
  exit 1
fi

for name in python3.12 python3.13 python3; do
  working_path "$name" && exit
done

for minor in 3.12 3.13; do
  for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
    while read -r python; do
      working_path "$python" && exit
    done < <(printf '%s\n' "$root/versions/$minor".*[0-9]/bin/python | sort --version-sort --reverse)
  done
done

echo 3.12
