#!/bin/sh
# The Debian packages that tests and bench need beside Python's: ip and tc, for two hosts on one machine.
set -e
command -v tc >/dev/null && command -v ip >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get -qq update && apt-get -qq install -y iproute2 >/dev/null
else
    echo "ip and tc are missing: install iproute2 (apt-get install iproute2)" >&2
fi
