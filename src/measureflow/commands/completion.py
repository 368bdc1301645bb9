"""Completion for bash, zsh and fish, as scripts that know the commands and options of this version.

They stand alone, and ask the program for nothing: starting Python and JAX takes seconds, and a TAB must not.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

#: Where each shell looks for it, as a user would write it there.
INSTALL = {
    "bash": "measureflow completion bash > ~/.local/share/bash-completion/completions/measureflow",
    "zsh": "measureflow completion zsh > ~/.zfunc/_measureflow   (with fpath+=~/.zfunc before compinit)",
    "fish": "measureflow completion fish > ~/.config/fish/completions/measureflow.fish",
}


class Option(NamedTuple):
    """One option: what it is called, what it says of itself, and what may follow it."""

    name: str
    help: str
    takes_value: bool
    values: tuple[str, ...]


class Command(NamedTuple):
    """One command, its options, and the words that may stand where its first argument does."""

    name: str
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...]


def commands_of(
    root: Any, values: Mapping[str, Sequence[str]], words: Mapping[str, Sequence[str]]
) -> list[Command]:
    """The commands of a parser, `root` being a group of click. `values` are those of options by their names,
    `words` those of arguments by their command."""
    found = []
    for name, command in root.commands.items():
        options = [
            Option(option, _plain(one.help or ""), not one.is_flag, tuple(values.get(option, ())))
            for one in command.params
            if one.param_type_name == "option"
            for option in one.opts
            if option.startswith("--")
        ]
        options.append(Option("--help", "Show what the command does.", False, ()))
        found.append(
            Command(
                name, _plain(command.help or ""), tuple(options), tuple(str(w) for w in words.get(name, ()))
            )
        )
    return found


def script(shell: str, commands: Sequence[Command]) -> str:
    """The script for a shell."""
    return _SCRIPTS[shell](commands)


def _plain(text: str) -> str:
    """The first sentence, without what shells read as more than a letter."""
    first = " ".join(text.split()).partition(". ")[0].rstrip(".")
    return first.translate(str.maketrans("'\"`\\$[]:", "’’’  (),"))


def _bash(commands: Sequence[Command]) -> str:
    cases = []
    for command in commands:
        free = "|".join(option.name for option in command.options if option.takes_value and not option.values)
        lines = [
            f"{option.name}) words='{' '.join(option.values)}';;"
            for option in command.options
            if option.values
        ]
        lines += [f"{free}) ;;"] if free else []
        names = " ".join(option.name for option in command.options)
        lines.append(f"*) options='{names}' words='{' '.join(command.words)}';;")
        cases.append(
            f"    {command.name}) case $previous in\n      " + "\n      ".join(lines) + "\n      esac;;\n"
        )
    names = " ".join(command.name for command in commands)
    return (
        "# Completion of measureflow in bash.\n"
        "_measureflow() {\n"
        "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} options= words=\n"
        "  if [ $COMP_CWORD -eq 1 ]; then\n"
        f"    options='--version --help' words='{names}'\n"
        "  else case ${COMP_WORDS[1]} in\n"
        f"{''.join(cases)}"
        "  esac; fi\n"
        "  # Options only where one is begun, so that files come up otherwise.\n"
        "  if [[ $current == -* ]]; then words=$options; fi\n"
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))\n'
        "}\n"
        "complete -o default -F _measureflow measureflow\n"
    )


def _zsh(commands: Sequence[Command]) -> str:
    described = "\n".join(f"    '{command.name}:{command.help}'" for command in commands)
    cases = []
    for command in commands:
        specs = [f"'*{option.name}[{option.help}]{_zsh_value(option)}'" for option in command.options]
        specs.append(f"'1:word:({' '.join(command.words)})'" if command.words else "'*:file:_files'")
        cases.append(f"    {command.name}) _arguments \\\n      " + " \\\n      ".join(specs) + ";;\n")
    return (
        "#compdef measureflow\n"
        "# Completion of measureflow in zsh.\n"
        "_measureflow() {\n"
        f"  local -a commands\n  commands=(\n{described}\n  )\n"
        "  if (( CURRENT == 2 )); then _describe command commands; return; fi\n"
        "  local command=${words[2]}\n"
        "  shift words\n  (( CURRENT-- ))\n"
        f"  case $command in\n{''.join(cases)}  esac\n"
        "}\n"
        '_measureflow "$@"\n'
    )


def _zsh_value(option: Option) -> str:
    if not option.takes_value:
        return ""
    return f":value:({' '.join(option.values)})" if option.values else ":value:_files"


def _fish(commands: Sequence[Command]) -> str:
    lines = ["# Completion of measureflow in fish."]
    for command in commands:
        seen = f"complete -c measureflow -n '__fish_seen_subcommand_from {command.name}'"
        lines.append(
            f"complete -c measureflow -f -n __fish_use_subcommand -a {command.name} -d '{command.help}'"
        )
        if command.words:
            lines.append(f"{seen} -f -a '{' '.join(command.words)}'")
        for option in command.options:
            value = (
                f" -x -a '{' '.join(option.values)}'"
                if option.values
                else " -r"
                if option.takes_value
                else ""
            )
            lines.append(f"{seen} -l {option.name[2:]}{value} -d '{option.help}'")
    return "\n".join(lines) + "\n"


_SCRIPTS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
