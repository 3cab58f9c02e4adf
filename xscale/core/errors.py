"""The two kinds of failure: the user's (a sentence, exit status 2) and ours (a traceback)."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from xscale.core.choices import Choice, untried

EXIT_DONE = 0
EXIT_FAULT = 1
EXIT_USER = 2
EXIT_TOO_LARGE = 3
"""The run that was planned does not fit into the memory of its devices."""
EXIT_REQUEUE = 75
"""The run stopped on purpose and can resume: the launcher may requeue it."""


WORD_CHARACTERS = 100
"""Longest word that is compared with known ones: the comparison takes the square of it."""


PROBLEMS = 120
"""Most problems that an error lists; it counts the others."""
SENTENCE_CHARACTERS = 2000
"""Longest part of a message: it may quote what a file holds."""
PATH_CHARACTERS = 500
"""Longest path in a message: an override from anyone may be one."""


def counted(count: int, noun: str) -> str:
    """Return `1 process`, `2 processes`: a count with its noun, which is given in the singular."""
    return (
        f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"
    )


def plain(text: str, limit: int = SENTENCE_CHARACTERS) -> str:
    """Return `text` on one line, cut after `limit` characters, and control characters escaped.

    What a message quotes may be from anyone: a terminal would carry out its escapes.
    """
    cut = text[: limit + 1]
    if not cut.isprintable():
        cut = "".join(
            letter if letter.isprintable() else ascii(letter)[1:-1]
            for letter in " ".join(cut.splitlines())
        )
    return cut if len(text) <= limit else f"{cut[:limit]}..."


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the user's request."""

    path: str
    """Dotted path of the config key, or the file, at fault; empty for the whole config."""
    what: str
    """The fault, as a clause."""
    fix: str = ""
    """A sentence that says how to fix it."""
    unknown_kind: str = field(default="", compare=False)
    """The name that is no part of the family: another family may have it."""
    unknown_key: str = field(default="", compare=False)
    """The key that no section has: a part may have it."""
    choices: tuple[Choice, ...] = field(default=(), compare=False, repr=False)
    """Changes that may end it, of which the solver keeps those that do, and says them in `fix`."""
    is_solved: bool = field(default=False, compare=False, repr=False)
    """Whether the solver has tried the choices: `fix` says those that work, or that none does."""

    @property
    def advice(self) -> str:
        """The sentences on how to end it; choices that no solver has tried are said as they are."""
        said = "" if self.is_solved else untried(self.choices, self.path)
        return " ".join(text for text in (said, self.fix) if text)

    def __str__(self) -> str:
        path = plain(self.path, PATH_CHARACTERS)
        what = plain(self.what)
        fix = plain(self.advice)
        text = f"{path}: {what}" if path else what
        return f"{text}. {fix}" if fix else text


class FaultError(Exception):
    """The run cannot continue, and it is not the user's mistake: a sentence, exit status 1, no traceback."""


class NoticeWarning(UserWarning):
    """A sentence for the user about what a command does; the command line prints it as one line."""


class ConfigError(Exception):
    """The user's request cannot be done; lists every problem, each with a fix."""

    def __init__(
        self, problems: Problem | Iterable[Problem] | str, what: str = "", fix: str = ""
    ) -> None:
        """`ConfigError(path, what, fix)` for one problem, `ConfigError(problems)` for several."""
        if isinstance(problems, str):
            problems = Problem(problems, what, fix)
        self.same_on_all_ranks = False
        """Whether every rank of the run finds the same, so that one of them may speak for all."""
        every = (problems,) if isinstance(problems, Problem) else tuple(problems)
        omitted = len(every) - PROBLEMS
        self.problems = (
            every
            if omitted <= 0
            else (*every[: PROBLEMS - 1], Problem("", f"{omitted + 1} more problems"))
        )
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type, tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


def _close(word: str, names: Iterable[str]) -> list[str]:
    if len(word) > WORD_CHARACTERS:
        return []
    return difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)


def near_name(word: str, known: Iterable[str]) -> str:
    """The known name that `word` may misspell; empty if there is none."""
    return next(iter(_close(word, known)), "")


def is_near(word: str, known: Iterable[str]) -> bool:
    """Whether `word` looks like a misspelling of one of the names."""
    return bool(near_name(word, known))


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence for a misspelt `word`: the nearest known name, or all of them."""
    names = sorted(known)
    close = _close(word, names)
    if close:
        return f"Did you mean '{close[0]}'?"
    return f"Known: {', '.join(names)}." if names else ""
