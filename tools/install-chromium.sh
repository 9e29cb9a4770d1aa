#!/usr/bin/env bash
# Installs Chromium and its driver, which the tests of the server's page need, on Debian and Ubuntu machines. On other
# machines, and without root, it says so, and the tests are skipped.
set -euo pipefail

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
  exit
fi
if ! command -v apt-get >/dev/null || [[ $(id -u) != 0 ]]; then
  echo "Chromium and chromedriver are not on PATH and cannot be installed here: the page's tests will be skipped." >&2
  exit
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --yes --no-install-recommends chromium chromium-driver >/dev/null
