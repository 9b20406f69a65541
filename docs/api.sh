#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Writes the interface's HTML to a new folder. A public thing without documentation is an error.
#
# usage: api.sh DOXYGEN SOURCES VERSION FOLDER
set -eu
doxygen=$1 sources=$2 version=$3 folder=$4

case $folder in
/*) ;;
*) folder=$PWD/$folder ;;
esac
rm -rf "$folder"
cd "$sources"
{
    cat docs/Doxyfile
    printf '%s = "%s"\n' PROJECT_NUMBER "$version" OUTPUT_DIRECTORY "${folder%/*}" HTML_OUTPUT "${folder##*/}"
} | "$doxygen" -
