"""What bash, zsh and fish need to complete the command lines of roll: a function that asks roll at each Tab, and the
commands that undo it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shell:
    """The commands of one shell."""

    install: str
    """Defines the completion. `@ASK@` is the command that prints the words for the variable `COMP_LINE`."""
    uninstall: str

    def installation(self, python: str, module: str, flag: str, name: str) -> str:
        """Return the commands that define the completion; `name` is the shell's."""
        asked = f"{shlex.quote(python)} -m {module} {flag} query={name}"
        return self.install.replace("@ASK@", asked).replace("@MODULE@", module)


BASH = Shell(
    """\
_roll_before="$(complete -p python python3 roll 2> /dev/null)"
_roll_complete() {
    local line="${COMP_LINE:0:$COMP_POINT}" IFS=$'\\n'
    case "$line" in
        *"-m @MODULE@ "* | roll\\ * | */roll\\ *) ;;
        *) COMPREPLY=(); return ;;
    esac
    COMPREPLY=($(COMP_LINE="$line" @ASK@ 2> /dev/null))
}
COMP_WORDBREAKS="${COMP_WORDBREAKS//[=:@]/}"
complete -o nospace -o default -F _roll_complete python python3 roll
""",
    """\
complete -r python python3 roll
eval "$_roll_before"
unset -f _roll_complete
unset _roll_before
""",
)
ZSH = Shell(
    """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
typeset -gA _roll_before=(python "${_comps[python]-}" python3 "${_comps[python3]-}")
_roll_complete() {
    local line="${BUFFER[1,CURSOR]}"
    if [[ "$line" != *"-m @MODULE@ "* && "$line" != (|*/)roll\\ * ]]; then
        ${_roll_before[$service]:-_default}
        return
    fi
    local -a found=("${(@f)$(COMP_LINE="$line" @ASK@ 2> /dev/null)}")
    found=("${(@)found:#}")
    if (( $#found )); then compadd -S '' -- "${found[@]}"; else _default; fi
}
compdef _roll_complete python python3 roll
""",
    """\
compdef -d python python3 roll
[[ -n "${_roll_before[python]}" ]] && compdef "${_roll_before[python]}" python
[[ -n "${_roll_before[python3]}" ]] && compdef "${_roll_before[python3]}" python3
unfunction _roll_complete
unset _roll_before
""",
)
FISH = Shell(
    """\
function __roll_is_asked
    string match -q -r -- '-m @MODULE@ |^(\\S*/)?roll ' (commandline -cp)
end
function __roll_complete
    COMP_LINE=(commandline -cp) @ASK@ 2> /dev/null
end
for __roll_command in python python3 roll
    complete -c $__roll_command -n __roll_is_asked -f -a '(__roll_complete)'
end
""",
    """\
functions -e __roll_complete
function __roll_is_asked
    return 1
end
complete -e -c roll
""",
)
SHELLS: Mapping[str, Shell] = {"bash": BASH, "zsh": ZSH, "fish": FISH}
