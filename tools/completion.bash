# SPDX-License-Identifier: Apache-2.0
# Bash completion for the program fattn: commands, options and their values. It gets them from the program,
# by --help and `fattn info`, so it offers what this build supports.

# _fattn_options PROGRAM COMMAND: a line for each option: its name and the help's name for its value, empty
# for a switch: "--causal", "--dir fwd|bwd,..."
_fattn_options()
{
    "$1" "$2" --help 2>/dev/null | sed -En 's/^  (--[a-z0-9-]+)(\[=[^]]*])?(( [^ ]+)?)( .*)?$/\1\3/p'
}

# _fattn_devices PROGRAM: the values of --device
_fattn_devices()
{
    echo auto
    "$1" info 2>/dev/null | sed -En 's/^device +(([a-z]+):[0-9]+) .*/\2\n\1/p'
}

# _fattn_kernels PROGRAM [DEVICE]: kernels of all devices or of this one
_fattn_kernels()
{
    "$1" info 2>/dev/null | awk -v device="$2" '
        $1 == "device" { mine = device == "" || $2 == device || index($2, device ":") == 1 }
        mine && $2 ~ /^(forward|backward)$/ { print $1 }'
}

# _fattn_values PROGRAM OPTION VALUE DEVICE: the values of an option, given the help's name for its value
_fattn_values()
{
    case $2,$3 in
    --device,*) _fattn_devices "$1" ;;
    --kernel,*) _fattn_kernels "$1" "$4" ;;
    *'|'*) tr '|' '\n' <<<"${3%,...}" ;;
    esac
}

_fattn()
{
    COMPREPLY=()
    # The command line up to the cursor; COMP_WORDS would cut words at "=" and ":".
    local -a words
    read -ra words <<<"${COMP_LINE:0:COMP_POINT}"
    [[ ${COMP_LINE:0:COMP_POINT} != *[[:space:]] ]] || words+=('')
    local program=${1/#\~/$HOME} last=$((${#words[@]} - 1))
    local word=${words[last]} before=${words[last - 1]} command=${words[1]}

    if ((last == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "--help --version $("$program" --help 2>/dev/null |
            sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p')" -- "$word")
        return
    fi

    # "--name=value" is an option and the start of its value.
    local joined=
    if [[ $word == --*=* ]]; then
        joined=${word%%=*}= before=${word%%=*} word=${word#*=}
    fi
    local name value kind= device= names=() given=" ${words[*]:2:last-2} "
    while read -r name value; do
        [[ $name != "$before" ]] || kind=$value
        [[ $given == *" $name"[\ =]* ]] || names+=("$name")
    done < <(_fattn_options "$program" "$command")
    [[ ! $given =~ \ --device[\ =]([^\ ]+) ]] || device=${BASH_REMATCH[1]}

    if [[ $kind == FILE.npy ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -X '!*.npy' -- "$word"; compgen -d -- "$word")
    elif [[ $kind ]]; then
        local list=
        [[ $kind != *,... || $word != *,* ]] || list=${word%,*},
        mapfile -t COMPREPLY < <(compgen -P "$list" \
            -W "$(_fattn_values "$program" "$before" "$kind" "$device")" -- "${word##*,}")
    elif [[ ! $joined ]]; then
        mapfile -t COMPREPLY < <(compgen -W "${names[*]}" -- "$word")
    fi

    # Text up to the last of bash's own word breaks is already on the line and is removed from the result.
    local whole=$joined$word breaks=${COMP_WORDBREAKS//[!:=]/} stays
    stays=${breaks:+${whole%"${whole##*[$breaks]}"}}
    local i
    for i in "${!COMPREPLY[@]}"; do
        COMPREPLY[i]=$joined${COMPREPLY[i]}
        COMPREPLY[i]=${COMPREPLY[i]#"$stays"}
    done
}

complete -F _fattn fattn
