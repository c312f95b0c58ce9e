"""`quire completion`: a script that lets a shell complete commands, options and their values.

The script is a table of what the parsers of all commands declare, so it names no option that does
not exist; it calls nothing when a key is pressed.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from quire.cli.parser import Parser

EXAMPLES = """\
examples:
  quire completion bash

Where the output goes: for bash ~/.local/share/bash-completion/completions/quire, for zsh the file
_quire in a folder of $fpath, for fish ~/.config/fish/completions/quire.fish.
"""
_BASH = """\
_quire() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}}
  local words= name=${{COMP_WORDS[1]}}
  case $name in {groups}) if (( COMP_CWORD > 2 )); then name+=" ${{COMP_WORDS[2]}}"; fi ;; esac
  if (( COMP_CWORD == 1 )); then
    words={commands}
  else
    case "$name $prev" in
{values}
    esac
    if [[ -z $words ]]; then
      case $name in
{options}
      esac
    fi
    if [[ -n $words && $words == --* && $cur != -* && -n $cur ]]; then words=; fi
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _quire quire
"""


_FISH_FLAGS = ("-a", "-d", "-f", "-l", "-x")


class CompletedOption(NamedTuple):
    """One option of a command. `values` are all that it takes, where they are few; `flag` is empty
    for what stands without one."""

    flag: str
    takes_value: bool
    values: tuple[str, ...]
    help: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SCRIPTS), help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(SCRIPTS[args.shell](_declared()), end="")
    return 0


def _declared() -> dict[str, list[CompletedOption]]:
    """Return the options of every command, by its name."""
    from quire.cli.main import COMMANDS

    found = {}
    for name, command in COMMANDS.items():
        parser = Parser(f"quire {name}", command.help)
        import_module(command.module).add_arguments(parser)
        found[name] = list(_options(parser))
    return found


def _options(parser: argparse.ArgumentParser) -> Iterator[CompletedOption]:
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        values = tuple(str(each) for each in action.choices or ())
        for flag in action.option_strings or [""]:
            if not flag or flag.startswith("--"):
                yield CompletedOption(flag, action.nargs != 0, values, str(action.help or ""))


def _groups(commands: Mapping[str, object]) -> dict[str, list[str]]:
    """Return the second words of commands of two, by the first."""
    groups: dict[str, list[str]] = {}
    for name in commands:
        first, _, second = name.partition(" ")
        if second:
            groups.setdefault(first, []).append(second)
    return groups


def _bash(declared: Mapping[str, list[CompletedOption]]) -> str:
    groups = _groups(declared)
    firsts = dict.fromkeys(name.split()[0] for name in declared)
    values, flags = [], []
    for name, options in declared.items():
        first = [value for option in options if not option.flag for value in option.values]
        flags.append((name, first + [option.flag for option in options if option.flag]))
        taking = [option for option in options if option.flag and option.takes_value]
        values += [(f"{name} {option.flag}", option.values) for option in taking]
    flags += groups.items()
    return _BASH.format(
        groups="|".join(groups),
        commands=shlex.quote(" ".join(firsts)),
        values="\n".join(_bash_case(*each) for each in values),
        options="\n".join(_bash_case(*each) for each in flags),
    )


def _bash_case(pattern: str, words: Sequence[str]) -> str:
    """Return a line that offers `words`; where there are none, the shell offers files."""
    action = f"words={shlex.quote(' '.join(words))}" if words else "COMPREPLY=(); return"
    return f"      {shlex.quote(pattern)}) {action} ;;"


def _zsh(declared: Mapping[str, list[CompletedOption]]) -> str:
    """Return the script for bash behind zsh's own interpreter of such scripts."""
    setup = "#compdef quire\nautoload -U +X bashcompinit && bashcompinit\n"
    return setup + _bash(declared)


def _fish(declared: Mapping[str, list[CompletedOption]]) -> str:
    from quire.cli.main import COMMANDS

    lines = []
    for name, options in declared.items():
        first, _, second = name.partition(" ")
        condition = f"__fish_seen_subcommand_from {first}"
        if second:
            others = " ".join(_groups(declared)[first])
            own = f"{condition}; and not __fish_seen_subcommand_from {others}"
            lines.append(_fish_line(own, "-f", "-a", second, "-d", COMMANDS[name].help))
            lines.append(_fish_line("__fish_use_subcommand", "-f", "-a", first))
            condition += f"; and __fish_seen_subcommand_from {second}"
        else:
            lines.append(
                _fish_line("__fish_use_subcommand", "-f", "-a", first, "-d", COMMANDS[name].help)
            )
        for option in options:
            if not option.flag:
                if option.values:
                    lines.append(_fish_line(condition, "-f", "-a", " ".join(option.values)))
                continue
            values = ("-x", "-a", " ".join(option.values)) if option.values else ()
            text = option.help.replace("%%", "%").split("\n")[0]
            lines.append(_fish_line(condition, "-l", option.flag[2:], *values, "-d", text))
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))


def _fish_line(condition: str, *words: str) -> str:
    quoted = " ".join(word if word in _FISH_FLAGS else _fish_quote(word) for word in words)
    return f"complete -c quire -n {_fish_quote(condition)} {quoted}"


def _fish_quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
"""What prints the script, by the shell's name."""
