"""`xscale checkpoint ls | show | verify | diff | prune | consolidate`: print results; each returns the exit status."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xscale.checkpoint.disk import format_bytes
from xscale.core.errors import EXIT_DONE, EXIT_FAULT, ConfigError, counted
from xscale.core.say import say as say_shown

Say = Callable[[str], None]


def ls(folder: Path, *, as_json: bool = False, say: Say = say_shown) -> int:
    """Print one line per checkpoint, oldest first."""
    from xscale.checkpoint.tools import tools

    rows = tools.ls(folder)
    if as_json:
        say(_json([asdict(row) for row in rows]))
        return EXIT_DONE
    if not rows:
        say(f"{folder}: no checkpoints")
    for row in rows:
        when = (
            ""
            if row.written is None
            else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.written))
        )
        ranks = "" if row.world is None else f"{row.world} rank{'s' if row.world > 1 else ''}"
        tail = row.reason or row.written_by
        say(
            f"{row.step:>9}  {row.status:<10} {format_bytes(row.size):>10}  {ranks:<9} {when:<19}  {tail}".rstrip()
        )
    return EXIT_DONE


def show(path: Path, *, only: str = "", as_json: bool = False, say: Say = say_shown) -> int:
    """Print step, trainer state and tensors of a checkpoint, or of the newest of a run."""
    from xscale.checkpoint.tools import tools

    shown = tools.show(path)
    if as_json:
        say(_json(asdict(shown)))
        return EXIT_DONE
    row = shown.row
    ranks = "an unknown number of ranks" if row.world is None else counted(row.world, "rank")
    facts = [row.status, format_bytes(row.size), ranks, row.written_by]
    say(f"{row.path}: step {row.step}, {', '.join(facts)}")
    say(f"state: {json.dumps(shown.state)}")
    tensors = [tensor for tensor in shown.tensors if tensor.name.startswith(only)]
    name_width = max((len(tensor.name) for tensor in tensors), default=0)
    for tensor in tensors:
        shape = "x".join(str(size) for size in tensor.shape) or "scalar"
        say(
            f"{tensor.name:<{name_width}}  {tensor.dtype:<9} {shape:<18} {format_bytes(tensor.size):>10}"
        )
    say(f"{len(tensors)} tensors, {format_bytes(sum(tensor.size for tensor in tensors))}")
    return EXIT_DONE


def verify(path: Path, *, as_json: bool = False, say: Say = say_shown) -> int:
    """Read every byte; exit status 1 when a checkpoint is bad."""
    from xscale.checkpoint.tools import tools

    rows = tools.verify(path)
    if as_json:
        say(_json([asdict(row) for row in rows]))
    else:
        for row in rows:
            say(
                f"{row.path}: {row.status}, {format_bytes(row.size)}{': ' + row.reason if row.reason else ''}"
            )
    return EXIT_DONE if all(row.status == "good" for row in rows) else EXIT_FAULT


def diff(
    first: Path, second: Path, *, only: str = "", as_json: bool = False, say: Say = say_shown
) -> int:
    """Print the differences; exit status 1 if there are any, as for `diff`."""
    from xscale.checkpoint.tools import tools

    differences = tools.diff(first, second, only=only)
    if as_json:
        say(_json(asdict(differences)))
        return EXIT_DONE if differences.none else EXIT_FAULT
    for key, old, new in differences.config:
        say(f"config {key}: {old!r} -> {new!r}")
    for key, old, new in differences.state:
        say(f"state {key}: {old!r} -> {new!r}")
    for name in differences.only_first:
        say(f"- {name}")
    for name in differences.only_second:
        say(f"+ {name}")
    for tensor in differences.tensors:
        line = f"~ {tensor.name}: {tensor.what} {tensor.first} -> {tensor.second}"
        counted = f", {tensor.elements} differ by up to {tensor.largest:.3g}"
        say(line + counted if tensor.what == "numbers" else line)
    say(f"{differences.same} tensors are equal bit for bit, {len(differences.tensors)} are not")
    return EXIT_DONE if differences.none else EXIT_FAULT


def prune(
    folder: Path,
    *,
    keep_last: int | None,
    keep_every: int | None = None,
    bad: bool = False,
    dry: bool = False,
    say: Say = say_shown,
) -> int:
    """Delete checkpoints that are not kept; `dry` only prints them."""
    from xscale.checkpoint.tools import tools

    if keep_last is None and not bad:
        raise ConfigError("--keep-last", "nothing to prune", "Give --keep-last, --bad or both.")
    if keep_last is not None and keep_last < 1:
        raise ConfigError("--keep-last", f"must be at least 1, got {keep_last}")
    deleted = tools.prune(folder, keep_last, keep_every, bad_too=bad, dry=dry)
    for path in deleted:
        say(f"{path}: {'would be deleted' if dry else 'deleted'}")
    if not deleted:
        say(f"{folder}: nothing to delete")
    return EXIT_DONE


def consolidate(
    path: Path, out: Path, *, only: str = "model.", keep_prefix: bool = False, say: Say = say_shown
) -> int:
    """Merge the shards of a checkpoint into one safetensors file."""
    from xscale.checkpoint import manifest
    from xscale.checkpoint.tools import consolidate as consolidation
    from xscale.checkpoint.tools.tools import find_checkpoint

    path = find_checkpoint(path)
    digest = consolidation.consolidate(path, out, only=only, keep_prefix=keep_prefix)
    say(
        f"{out}: step {manifest.read(path).step}, {format_bytes(digest.size)}, SHA-256 {digest.value}"
    )
    return EXIT_DONE


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, default=str)
