# SPDX-License-Identifier: Apache-2.0
#
# Sourced by tools/test and tools/demo: installs Debian packages that they need.

# install_missing LOG PACKAGE...: installs those that are missing, as root or with sudo. Does nothing on systems
# other than Debian. Fails with a sentence on stderr.
install_missing() {
    local log=$1 missing=() package root=()
    shift
    command -v dpkg-query >/dev/null && command -v apt-get >/dev/null || return 0
    for package; do
        [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
            missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || {
            echo "neither root nor sudo; please install: ${missing[*]}" >&2
            return 1
        }
        root=(sudo)
    fi
    echo "installing ${missing[*]}"
    if ! { "${root[@]}" apt-get -qq update &&
        "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends \
            "${missing[@]}"; } >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        echo "installing failed, see $log" >&2
        return 1
    fi
}

# install_wanted LOG PACKAGE...: the same for packages that are optional. If this system's package lists lack one, it
# says so and goes on.
install_wanted() {
    local log=$1 package there=()
    shift
    command -v apt-cache >/dev/null || return 0
    for package; do
        if apt-cache show "$package" >/dev/null 2>&1; then
            there+=("$package")
        else
            echo "no package $package here: tests that need it will be skipped"
        fi
    done
    install_missing "$log" "${there[@]}"
}
