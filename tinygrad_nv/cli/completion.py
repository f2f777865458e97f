"""`tinygrad-nv completion SHELL`: a script that completes commands, options and their choices.

Protocol: `script` reads the command line's parsers, so every option is in it. `source <(tinygrad-nv
completion bash)` or zsh's, `tinygrad-nv completion fish | source`. Words that are no option are completed as
files.
"""
from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

PROGRAM = "tinygrad-nv"
USE = "__fish_use_subcommand"
_Parsers = argparse._SubParsersAction


def script(top: argparse.ArgumentParser, shell: str) -> str:
    """The script of a shell."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](list(_commands(top)))


Commands = list[tuple[tuple[str, ...], str, argparse.ArgumentParser]]


def _commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = (), words: str = ""
              ) -> Iterator[tuple[tuple[str, ...], str, argparse.ArgumentParser]]:
    """Every command with its words and its help, the program itself first."""
    yield path, words, parser
    for action in parser._actions:
        if not isinstance(action, _Parsers): continue
        helps = {each.dest: each.help or "" for each in action._choices_actions}
        for name, command in action.choices.items():
            yield from _commands(command, (*path, name), helps.get(name, ""))


def _next(parser: argparse.ArgumentParser) -> list[str]:
    """Lists the words that can follow a command: subcommands, choices of its arguments, options."""
    found: list[str] = []
    for action in parser._actions:
        if action.option_strings: continue
        found += [str(choice) for choice in action.choices or ()]
    return found + [option for action in parser._actions for option in action.option_strings]


def _choices(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """The values of options that have few."""
    return {option: [str(choice) for choice in action.choices] for action in parser._actions
            for option in action.option_strings if action.choices is not None}


def _cases(commands: Commands) -> str:
    """Shell code: `offered` and `values` after the command `path`."""
    lines = ["  case \"$path\" in"]
    for path, _, parser in commands:
        lines.append(f"    {shlex.quote(' '.join(path))})")
        lines.append(f"      offered={shlex.quote(' '.join(_next(parser)))}")
        if values := _choices(parser):
            lines.append('      case "$before" in')
            lines += [f"        {option}) values={shlex.quote(' '.join(choices))} ;;"
                      for option, choices in values.items()]
            lines.append("      esac")
        lines.append("      ;;")
    return "\n".join([*lines, "  esac"])


def _match_commands(commands: Commands) -> str:
    return "|".join(shlex.quote(" ".join(path)) for path, _, _ in commands if path)


def _bash(commands: Commands) -> str:
    return f"""# bash completion of {PROGRAM}
_tinygrad_nv() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} path='' offered='' values=''
  local next i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    next="${{path:+$path }}${{COMP_WORDS[i]}}"
    case "$next" in {_match_commands(commands)}) path="$next" ;; *) break ;; esac
  done
{_cases(commands)}
  if [[ -n "$values" ]]; then COMPREPLY=($(compgen -W "$values" -- "$current"))
  else COMPREPLY=($(compgen -W "$offered" -- "$current")); fi
}}
complete -o default -F _tinygrad_nv {PROGRAM}
"""


def _zsh(commands: Commands) -> str:
    return f"""#compdef {PROGRAM}
# zsh completion of {PROGRAM}
_tinygrad_nv() {{
  local current=${{words[CURRENT]}} before=${{words[CURRENT-1]}} path='' offered='' values='' next
  local -a typed; typed=("${{(@)words[2,CURRENT-1]}}")
  for next in "${{typed[@]}}"; do
    next="${{path:+$path }}$next"
    case "$next" in {_match_commands(commands)}) path="$next" ;; *) break ;; esac
  done
{_cases(commands)}
  if [[ -n "$values" ]]; then compadd -- ${{=values}}
  else compadd -- ${{=offered}}; [[ "$current" == -* ]] || _files; fi
}}
compdef _tinygrad_nv {PROGRAM}
"""


def _fish(commands: Commands) -> str:
    lines = [f"# fish completion of {PROGRAM}"]
    for path, _, parser in commands:
        seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in path) or USE
        for action in parser._actions:
            words = shlex.quote((action.help or "").split("(default")[0].replace("%%", "%").strip())
            start = f"complete -c {PROGRAM} -n {shlex.quote(seen)}"
            if isinstance(action, _Parsers):
                names = {each.dest: each.help or "" for each in action._choices_actions}
                lines += [f"{start} -f -a {name} -d {shlex.quote(names.get(name, ''))}"
                          for name in action.choices]
            elif not action.option_strings:
                if not action.choices: continue
                lines.append(f"{start} -f -a {shlex.quote(' '.join(map(str, action.choices)))}")
            else:
                options = " ".join(f"-l {o[2:]}" if o.startswith("--") else f"-s {o[1:]}"
                                   for o in action.option_strings)
                takes = "" if action.nargs == 0 else " -r"
                values = f" -f -a {shlex.quote(' '.join(map(str, action.choices)))}" if action.choices else ""
                lines.append(f"{start} {options}{takes}{values} -d {words}")
    return "\n".join(lines) + "\n"
