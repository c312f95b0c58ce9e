#!/bin/sh
# Installs Chromium from the system's packages, for the tests that look at the page of `quire serve` as a user does. Where
# that is not possible (no root, no apt, no network) it says so and the tests skip themselves.
set -u
for name in chromium chromium-browser google-chrome-stable google-chrome; do
  command -v "$name" >/dev/null 2>&1 && exit 0
done
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
  echo "No Chromium, and no way to install it without apt-get and root: the page's browser test will be skipped." >&2
  exit 0
fi
{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 \
  || echo "Chromium could not be installed: the page's browser test will be skipped." >&2
