"""The files of a corpus: which ones files, folders and globs stand for, and what is left out for which reason.

- A file that is named is read, whatever its name is; also one whose name has brackets.
- A folder stands for all files below it, at any depth, that end in one of the source's endings (in any case of letters)
  and are not hidden: no name on the way begins with a dot.
- `*`, `?` and `[...]` of a glob match names, and `**` folders at any depth. They match no hidden names, unless the
  pattern's own part begins with a dot. What a glob matches is read whatever it ends in; a folder that it matches is not
  entered.
- Linked files and linked folders are read as others. Each real folder is entered once and each real file is read once,
  by the first of its names, those that are no links first.
- A pointer of Git LFS is not the file that it stands for, and ends the listing.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from xscale.core.errors import ConfigError, Problem
from xscale.core.files.file_safety import is_lfs_pointer

HIDDEN, ENDING, BROKEN, SPECIAL = "hidden", "of another ending", "broken links", "no regular files"
TWICE, EMPTY, FOLDER = "other names of a file", "empty", "folders that a glob matches"
NAMED = 3
"""Files that are named for a reason, and in an error."""


@dataclass
class LeftOut:
    """Files and folders of a corpus that are not read, by reason."""

    names: dict[str, dict[str, None]] = field(default_factory=dict)
    """Reason -> their names, in the order in which they were met."""

    def add(self, reason: str, path: "Path | str") -> None:
        # A name that is not UTF-8 is shown by its bytes.
        name = os.fsencode(path).decode("utf-8", "backslashreplace")
        self.names.setdefault(reason, {})[name] = None

    def entry(self) -> dict[str, list[Any]]:
        """Return reason -> [count, first names], as JSON data for a manifest; empty: nothing is left out."""
        return {
            reason: [len(names), list(names)[:NAMED]]
            for reason, names in sorted(self.names.items())
        }


def left_out_sentence(entry: dict[str, list[Any]]) -> str:
    """Describe what `LeftOut.entry` has; empty for nothing."""
    clauses = [
        f"{count} {reason} ({', '.join(names)}{', ...' if count > len(names) else ''})"
        for reason, (count, names) in entry.items()
    ]
    return f"left out: {'; '.join(clauses)}" if clauses else ""


def find_files(
    patterns: Sequence[str], endings: tuple[str, ...], path: str, left_out: LeftOut | None = None
) -> list[Path]:
    """List the files of `patterns` (files, folders, globs), in order, each real file once; the rules are above.

    `path` is the key of the patterns, for messages; `left_out` gets what is not read. ConfigError when one matches
    nothing, when a folder cannot be read, and for pointers of Git LFS.
    """
    if not patterns:
        raise ConfigError(
            path, "no file, folder or glob is given", "Write for example: paths: [corpus/**/*.txt]."
        )
    left_out = LeftOut() if left_out is None else left_out
    files: dict[str, Path] = {}
    problems: list[Problem] = []
    for pattern in patterns:
        location = Path(pattern).expanduser()
        matches = _Walk(endings, left_out).matches(location)
        if not matches:
            problems.append(_nothing(pattern, location, endings, path, left_out))
        reals = real_paths(matches)
        new: dict[str, Path] = {}
        # A file's own name comes before those that links give it.
        for file in sorted(matches, key=lambda file: (reals[file] != os.path.abspath(file), file)):
            real = reals[file]
            if files.get(real, new.setdefault(real, file)) != file:
                left_out.add(TWICE, file)
        files |= {
            real: file
            for real, file in sorted(new.items(), key=lambda item: item[1])
            if real not in files
        }
    if problems:
        raise ConfigError(problems)
    _refuse_pointers(files.values(), path, left_out)
    return list(files.values())


def real_paths(files: Iterable[Path]) -> dict[Path, str]:
    """Return the path without links of each file; each folder is looked up once."""
    folders: dict[Path, str] = {}
    reals: dict[Path, str] = {}
    for file in files:
        if file.is_symlink():
            reals[file] = os.path.realpath(file)
        else:
            if file.parent not in folders:
                folders[file.parent] = os.path.realpath(file.parent)
            reals[file] = os.path.join(folders[file.parent], file.name)
    return reals


def _nothing(
    pattern: str, location: Path, endings: tuple[str, ...], path: str, left_out: LeftOut
) -> Problem:
    """Describe a pattern that matches no file."""
    what = (
        f"the folder '{pattern}' contains no file"
        if location.is_dir()
        else f"'{pattern}' matches no file"
    )
    if location.is_symlink() and not location.exists():
        what = f"'{pattern}' is a broken link"
    among = f" that ends in {', '.join(endings)}" if location.is_dir() and endings else ""
    said = left_out_sentence(left_out.entry())
    fix = f"Looked from {Path.cwd()}; give an existing file, folder or glob."
    return Problem(path, what + among + (f"; {said}" if said else ""), fix)


@dataclass
class _Walk:
    """The files that one pattern stands for."""

    endings: tuple[str, ...]
    left_out: LeftOut

    def matches(self, location: Path) -> list[Path]:
        if location.is_dir():
            return [file for file in self._files_below(location) if self._has_ending(file)]
        if location.exists():
            return [location]
        parts = location.relative_to(location.anchor).parts
        return list(self._glob(Path(location.anchor) if location.is_absolute() else Path(), parts))

    def _has_ending(self, file: Path) -> bool:
        wanted = tuple(ending.lower() for ending in self.endings)
        if wanted and not file.name.lower().endswith(wanted):
            self.left_out.add(ENDING, file)
            return False
        return True

    def _files_below(self, root: Path) -> Iterator[Path]:
        """Yield the files below a folder that are not hidden."""
        for folder, entries in self._folders(root):
            for entry in entries:
                if not _is_folder(entry) and self._is_file(folder / entry.name, entry):
                    yield folder / entry.name

    def _folders(self, root: Path) -> Iterator[tuple[Path, list["os.DirEntry[str]"]]]:
        """Yield `root` and the folders below it that are not hidden, with their entries that are not hidden.

        Each real folder is entered once: at first those that no link leads to.
        """
        entered: set[str] = set()
        waiting = [root]
        while waiting:
            links: list[Path] = []
            while waiting:
                folder = waiting.pop()
                real = os.path.realpath(folder)
                if real in entered:
                    continue
                entered.add(real)
                entries = [
                    entry
                    for entry in self._entries(folder)
                    if not self._is_hidden(folder, entry.name)
                ]
                yield folder, entries
                below = [entry for entry in entries if _is_folder(entry)]
                links += [folder / entry.name for entry in below if entry.is_symlink()]
                waiting += [folder / entry.name for entry in below if not entry.is_symlink()]
            waiting = sorted(links, reverse=True)

    def _entries(self, folder: Path) -> list["os.DirEntry[str]"]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            fix = "Allow it, or leave the folder out of the source's paths."
            raise ConfigError(
                str(folder), f"the folder cannot be read: {error.strerror}", fix
            ) from None

    def _is_hidden(self, folder: Path, name: str) -> bool:
        if name.startswith("."):
            self.left_out.add(HIDDEN, folder / name)
            return True
        return False

    def _is_file(self, path: Path, entry: "os.DirEntry[str] | None" = None) -> bool:
        """Whether a path that is no folder is a regular file; `entry`: its entry in the folder."""
        # An entry knows that without a look, except of a link.
        is_plain = entry is not None and entry.is_file(follow_symlinks=False)
        if is_plain or path.is_file():
            return True
        # The target of a link is missing, or the links lead to themselves.
        self.left_out.add(SPECIAL if path.exists() else BROKEN, path)
        return False

    def _glob(self, folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
        """Yield the files below `folder` that match the rest of a pattern."""
        part, *further = parts or ("",)
        if part == "**" and not further:
            yield from self._files_below(folder)
        elif part == "**":
            for below, _ in self._folders(folder):
                yield from self._glob(below, tuple(further))
        elif folder.is_dir():
            for name in self._names(folder, part):
                path = folder / name
                if further:
                    yield from self._glob(path, tuple(further))
                elif path.is_dir():
                    self.left_out.add(FOLDER, path)
                elif self._is_file(path):
                    yield path

    def _names(self, folder: Path, part: str) -> list[str]:
        """Return the names in a folder that match a part of a pattern."""
        if not any(letter in part for letter in "*?["):
            return [part] if os.path.lexists(folder / part) else []
        names = [entry.name for entry in self._entries(folder) if fnmatchcase(entry.name, part)]
        return [name for name in names if part.startswith(".") or not self._is_hidden(folder, name)]


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    """Whether an entry is a folder or a link to one; links that lead to themselves are none."""
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


def _refuse_pointers(files: Iterable[Path], path: str, left_out: LeftOut) -> None:
    """Raise ConfigError for pointers of Git LFS; count empty files."""
    pointers = []
    for file in files:
        try:
            if not file.stat().st_size:
                left_out.add(EMPTY, file)
            elif is_lfs_pointer(file):
                pointers.append(str(file))
        except OSError:
            # Reading the file says what is wrong with it.
            continue
    if pointers:
        more = f" and {len(pointers) - NAMED} more" if len(pointers) > NAMED else ""
        what = f"{', '.join(pointers[:NAMED])}{more}: a pointer of Git LFS, and not the file that it stands for"
        raise ConfigError(
            path, what, "Fetch the files (git lfs pull), or leave them out of the source's paths."
        )
