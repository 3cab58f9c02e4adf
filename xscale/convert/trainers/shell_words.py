"""Options that a shell script gives to a program, read without running it: `--key value`, arrays and variables."""

import re
import shlex
from dataclasses import dataclass
from typing import Any

NAME = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-([^{}]*))?\}|([A-Za-z_]\w*))")
NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
ENDS = frozenset("\n;&|<>")
ROUNDS = 8
"""Variables of variables that are followed."""
CHARACTERS = 10_000
"""Longest value."""


@dataclass(frozen=True)
class ShellValue:
    """A value that only the shell knows, such as `$1` or `$((A * B))`."""

    text: str


def shell_options(text: str) -> dict[str, Any]:
    """Return the options of all commands of the script: name -> number, truth, text, list or `ShellValue`.

    ValueError if its quotes do not close.
    """
    variables: dict[str, str] = {}
    options: dict[str, Any] = {}
    for words in _statements(text):
        if len(words) == 1 and (match := NAME.fullmatch(words[0])):
            variables[match[1]] = match[2]
        options |= _options(words, variables)
    return options


def _statements(text: str) -> list[list[str]]:
    """Words of each statement; those of an array are one statement."""
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"(?m)^[ \t]*#.*\n?", "", text)
    text = re.sub(r"(?m)^([^'\"\n]*?)[ \t]#.*$", r"\1", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();&|<>\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    statements: list[list[str]] = [[]]
    depth = 0
    for word in lexer:
        if not set(word) <= set("();&|<>\n"):
            statements[-1].append(word)
            continue
        for sign in word:
            depth = max(0, depth + (sign == "(") - (sign == ")"))
            if sign == ")" or (sign in ENDS and not depth):
                statements.append([])
    return [words for words in statements if words]


def _options(words: list[str], variables: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if match := NAME.fullmatch(words[0]):
        # The words of a variable that holds options.
        words = [match[2], *words[1:]]
    words = [part for word in words for part in (word.split() if " --" in f" {word}" else [word])]
    name = ""
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, has_value, value = word.removeprefix("--").partition("=")
            options[name] = _value(value, variables) if has_value else True
        elif name and word != "--":
            value = _value(word, variables)
            if options[name] is True:
                options[name] = value
            elif isinstance(options[name], list):
                options[name].append(value)
            else:
                options[name] = [options[name], value]
    return options


def _value(word: str, variables: dict[str, str]) -> Any:
    for _ in range(ROUNDS):
        replaced = VARIABLE.sub(lambda match: _variable(match, variables), word)[:CHARACTERS]
        if replaced == word:
            break
        word = replaced
    if "$" in word or "`" in word:
        return ShellValue(word)
    if NUMBER.fullmatch(word):
        return int(word) if re.fullmatch(r"[-+]?\d{1,18}", word) else float(word)
    return {"true": True, "false": False}.get(word.lower(), word)


def _variable(match: re.Match[str], variables: dict[str, str]) -> str:
    name = match[1] or match[3]
    value = variables.get(name, match[2])
    # An empty one may be set by the shell that runs it.
    return match[0] if value in (None, "") else str(value)
