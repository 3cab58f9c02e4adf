"""A cache of the answers of `xscale plan`, which imports torch and so takes longer than a submission should.

The key is a hash of the query, the code and the package versions. An entry holds a hash of every config file that the
answer depends on (or whose absence it depends on) and is valid while they are unchanged. Errors are not cached.
"""

import hashlib
import importlib.util
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xscale_launch.files import read_regular, remove_file, write_run_file
from xscale_launch.nodes import preflight
from xscale_launch.typed_json import decode_json

CODE = ("xscale", "xscale_kernels")
MAX_ANSWERS = 500
"""Answers in the folder; the oldest beyond this number are deleted."""


@dataclass(frozen=True)
class CacheEntry:
    """An answer as it is in a file of the cache."""

    when: float
    """Seconds since the epoch when the answer was given."""
    files: dict[str, str]
    """Hash of each config file; empty for one that did not exist."""
    answer: dict[str, Any]


class PlanCache:
    """The cache as one call of the launcher uses it."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """Hash the code and list the packages, once."""
        self._folder, self._environment = folder(variables), environment_key(variables)
        self.seconds_ago = 0.0
        """Age of the oldest answer that was loaded."""
        self.latest = self._folder
        """The file of the last answer that was loaded."""

    def load(self, query: Sequence[str]) -> dict[str, Any] | None:
        """Return the valid answer to `query`; None if there is none."""
        name = key(query, self._environment)
        cached = load(self._folder, name)
        if cached is None:
            return None
        self.seconds_ago, self.latest = (
            max(self.seconds_ago, cached.seconds_ago),
            self._folder / f"{name}.json",
        )
        return cached.answer

    def store(self, query: Sequence[str], answer: dict[str, Any]) -> None:
        """Store an answer for the next call."""
        store(self._folder, key(query, self._environment), answer)


@dataclass(frozen=True)
class CachedAnswer:
    """An answer and its age."""

    answer: dict[str, Any]
    seconds_ago: float


def folder(variables: Mapping[str, str]) -> Path:
    """Return the cache folder, below XDG_CACHE_HOME or ~/.cache."""
    return Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xscale" / "plans"


def environment_key(variables: Mapping[str, str]) -> list[Any]:
    """Return everything that an answer depends on besides the query and the config files."""
    specs = [importlib.util.find_spec(name) for name in CODE]
    roots = [
        Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None
    ]
    return [
        str(Path.cwd()),
        variables.get("PYTHONPATH", ""),
        preflight.packages(),
        [preflight.digest(root) for root in roots],
    ]


def key(query: Sequence[str], environment: Sequence[Any]) -> str:
    """Hash everything that an answer depends on except the config files."""
    return hashlib.sha256(json.dumps([list(query), *environment]).encode()).hexdigest()[:32]


def load(cache: Path, name: str) -> CachedAnswer | None:
    """Return the entry `name`; None if there is none, or if a config file was changed, created or deleted since."""
    try:
        entry: CacheEntry = decode_json(read_regular(cache / f"{name}.json"), CacheEntry)
    except (OSError, ValueError):
        return None
    if any(_content(Path(file)) != content for file, content in entry.files.items()):
        return None
    return CachedAnswer(entry.answer, max(0.0, time.time() - entry.when))


def store(cache: Path, name: str, answer: dict[str, Any]) -> None:
    """Store an answer, unless it depends on a plugin's code. A cache folder that cannot be written is not an error."""
    if answer.get("plugins") or "files" not in answer:
        return
    entry = CacheEntry(
        time.time(), {file: _content(Path(file)) for file in answer["files"]}, answer
    )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        part = cache / f"{name}.{time.time_ns()}.part"
        write_run_file(part, json.dumps(asdict(entry)))
        part.replace(cache / f"{name}.json")
        for old in sorted(cache.glob("*.json"), key=lambda path: path.stat().st_mtime)[
            :-MAX_ANSWERS
        ]:
            remove_file(cache, old.name)
    except OSError:
        return


def _content(file: Path) -> str:
    """Hash the file; empty if it does not exist."""
    try:
        return hashlib.sha256(read_regular(file)).hexdigest()
    except OSError:
        return ""
