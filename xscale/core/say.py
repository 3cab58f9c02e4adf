"""Lines of a command that quote files, which may be from anyone."""

import sys
import unicodedata


def say(text: str) -> None:
    """Print `text` line by line, and escape in each what a terminal would carry out instead of showing it."""
    print(shown(text), flush=True)


def say_aside(text: str) -> None:
    """Print `text` as `say` does, on standard error."""
    print(shown(text), file=sys.stderr, flush=True)


def shown(text: str) -> str:
    """Return `text` with its control and format characters escaped, but for newlines and tabs."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter if _is_shown(letter) else ascii(letter)[1:-1] for letter in text)


def _is_shown(letter: str) -> bool:
    return letter in "\n\t" or letter.isprintable() or unicodedata.category(letter) == "Zs"
