#!/bin/sh
# The Debian packages that tests and bench need beside Python's: ip and tc, for two hosts on one machine, and a browser, in which
# the plan's page is tested.
set -e
missing=
command -v tc >/dev/null && command -v ip >/dev/null || missing=iproute2
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null ||
    missing="${missing:+$missing }chromium"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # The names are split on purpose.
    apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y $missing >/dev/null
else
    echo "missing for some of the tests: $missing (apt-get install $missing)" >&2
fi
