#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Writes a manual page to standard output, generated from the tool's own help: the page of the tool, or with
# COMMAND that of its command. Its environment variables are those of the table in BUILDING, docs/BUILDING.md.
#
# usage: manual.sh HELP2MAN INCLUDE BUILDING VERSION FATTN [COMMAND]
set -eu
help2man=$1 include=$2 building=$3 version=$4 fattn=$5 command=${6-}

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

sections=$(mktemp)
trap 'rm -f "$sections"' EXIT
{
    cat "$include" # whose last section is the one of the environment
    # A paragraph for each row of the table: | `NAME` | values | meaning |
    sed -n '/^| `FATTN_/s/`\([^`]*\)`/\\fB\1\\fR/gp' "$building" |
        awk -F ' *[|] *' '{ printf ".TP\n%s\n%s:\n%s.\n", $2, $3, $4 }'
} >"$sections"

# help2man takes name, package and version from a line like GNU programs' --version, and passes the program to a
# shell.
"$help2man" --no-info --include "$sections" --name "$summary" \
    --version-string "$page (fattn) $version" "'$fattn'${command:+ $command}"
