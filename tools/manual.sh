#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Writes a manual page to standard output, generated from the tool's own help: the page of the tool, or with
# COMMAND that of its command.
#
# usage: manual.sh HELP2MAN INCLUDE VERSION FATTN [COMMAND]
set -eu
help2man=$1 include=$2 version=$3 fattn=$4 command=${5-}

page=fattn${command:+-$command}
if [ -n "$command" ]; then
    summary=$("$fattn" --help | sed -n "s/^  $command  *//p")
else
    summary='exact attention: the tool of the fattn library'
fi
if [ -z "$summary" ]; then
    echo "manual.sh: fattn --help knows no command \"$command\"" >&2
    exit 1
fi

# help2man takes name, package and version from a line like GNU programs' --version, and passes the program to a
# shell.
exec "$help2man" --no-info --include "$include" --name "$summary" \
    --version-string "$page (fattn) $version" "'$fattn'${command:+ $command}"
