"""The run folder: its config and name, whether this run may use or resume it, and the same config on all ranks."""

import errno
import os
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from xscale.checkpoint.files import LOCK_FILE
from xscale.checkpoint.load import read_config as read_checkpoint_config
from xscale.checkpoint.search import newest_on_this_process
from xscale.core.compose import dump
from xscale.core.config import encode
from xscale.core.errors import ConfigError, FaultError, Problem
from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.file_errors import disk_reason, disk_remedy
from xscale.core.files.file_lock import FileLock, LockedError
from xscale.core.files.file_safety import (
    check_name,
    remove_empty_folder,
    remove_file,
    remove_folder,
)
from xscale.core.files.run_files import IrregularFileError, kind_of, read_run_file
from xscale.core.foreign import reason
from xscale.core.yaml_reader import parse
from xscale.data.corpus.stored_tokenizer import FOLDER as TOKENIZER
from xscale.run.config_changes import (
    LISTED,
    REPEATABLE,
    differences,
    flatten,
    one_line,
    problems_of,
    with_defaults,
    with_new_names,
)
from xscale.run.run_entries import check_entries
from xscale.settings.settings import Settings

CONFIG, CHECKPOINTS, NAME = "config.yaml", "checkpoints", "name"
INTERRUPTED = "interrupted"
"""File of a run folder whose last step is saved, and whose end was cut short."""


def open_folder(settings: Settings) -> Path:
    """Make the run folder. ConfigError where it has a run that this one cannot resume, or an entry that leaves it."""
    folder = Path(settings.run.dir)
    try:
        problems = check_entries(folder, settings.run.allow_links)
    except OSError as error:
        problems = [
            Problem(
                "run.dir", f"{folder} cannot be read: {error.strerror}", "Choose another folder."
            )
        ]
    if problems:
        raise ConfigError(problems)
    before = read_config(folder)
    if before is not None:
        started = any((folder / CHECKPOINTS).glob("step-*"))
        if started and settings.run.fresh:
            what = f"{folder} contains a run, and run.fresh refuses to resume it"
            raise ConfigError("run.dir", what, "Choose another folder, or leave run.fresh out.")
        # A version that knew fewer keys did as their defaults say.
        known = with_defaults(before)
        if started and (
            changed := differences(known, encode(settings), settings.run.allow_changed)
        ):
            raise ConfigError(problems_of(changed, f"{folder} contains another run"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot create the folder {folder}: {disk_reason(error, folder)}"
        fix = f"{disk_remedy(error, folder)}, or choose another."
        raise ConfigError("run.dir", what, fix) from None
    return folder


def unwritable(folder: Path, error: OSError) -> ConfigError | FaultError:
    """The error of a run whose folder cannot be written: the user's where a right is missing, else the disk's."""
    what = f"{error.filename2 or error.filename or folder} cannot be written: {disk_reason(error, folder)}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) or isinstance(
        error, IrregularFileError
    ):
        return ConfigError("run.dir", what, "Let this user write there, or choose another folder.")
    fix = f"{disk_remedy(error, folder)}, and start the same command again, which resumes the run."
    return FaultError(f"{what}. {fix}")


WRITTEN_FIRST = (LOCK_FILE, TOKENIZER, NAME)
"""Entries of the folder that are written before a run can be refused for the last time."""


@contextmanager
def removed_if_refused(folder: Path, is_rank0: bool) -> Iterator[None]:
    """Remove what the block wrote to the run folder where it ends with a ConfigError and no run has begun there.

    Rank 0 removes the entries, and each rank the folder that it made, if that is empty.
    """
    existed = folder.exists()
    earlier = {name for name in WRITTEN_FIRST if os.path.lexists(folder / name)}
    try:
        yield
    except ConfigError:
        if is_rank0:
            _remove_entries(folder, earlier)
        if not existed:
            path = folder.resolve()
            remove_empty_folder(path.parent, path.name)
        raise


def _remove_entries(folder: Path, earlier: Collection[str]) -> None:
    """Remove WRITTEN_FIRST except `earlier`; nothing where there is a run or another process has the lock."""
    if not any(os.path.lexists(folder / name) for name in WRITTEN_FIRST if name not in earlier):
        return
    with suppress(LockedError, OSError), FileLock(folder / LOCK_FILE) as lock:
        lock.acquire()
        if any(os.path.lexists(folder / name) for name in (CONFIG, CHECKPOINTS)):
            return
        if TOKENIZER not in earlier:
            remove_folder(folder, TOKENIZER)
        if NAME not in earlier:
            remove_file(folder, NAME)
        if LOCK_FILE not in earlier:
            lock.remove()


def finished_step(settings: Settings, folder: Path) -> int | None:
    """The step of the run's newest checkpoint where nothing is left to do, else None. Not collective."""
    if is_interrupted(folder):
        return None
    newest = newest_on_this_process(folder / CHECKPOINTS)
    return newest[0] if newest is not None and newest[0] >= settings.train.steps else None


def mark_end(folder: Path, *, interrupted: bool) -> None:
    """Note whether a stop signal cut short what follows the last save, such as samples: then it is not finished.

    ConfigError or FaultError where that cannot be written: another start would take the run for finished.
    """
    text = b"A stop signal came after the last step: the end of the run is repeated.\n"
    try:
        if interrupted:
            write_atomically(folder / INTERRUPTED, text)
        elif is_interrupted(folder):
            remove_file(folder, INTERRUPTED)
    except OSError as error:
        raise unwritable(folder, error) from None


def is_interrupted(folder: Path) -> bool:
    """Whether the end of the run was cut short. A folder of that name, or a special file, is none of ours."""
    path = folder / INTERRUPTED
    return path.is_symlink() or path.is_file()


def check_finished(settings: Settings, folder: Path, step: int) -> None:
    """Raise ConfigError where the run finished with other values than those of `settings`. Not collective.

    Nothing would be trained with the new ones, and a sweep that gives all its runs one folder would seem to succeed.
    """
    old, new = (
        flatten(data, "")
        for data in (with_defaults(read_config(folder) or encode(settings)), encode(settings))
    )
    keys = [key.lstrip(".") for key in dict.fromkeys((*new, *old)) if old.get(key) != new.get(key)]
    changed = [
        key for key in keys if key.partition(".")[0] not in REPEATABLE and key not in REPEATABLE
    ]
    if not changed:
        return
    values = [
        f"{key} was {one_line(old.get(f'.{key}'))} and is now {one_line(new.get(f'.{key}'))}"
        for key in changed
    ]
    more = f" and {len(values) - LISTED} more" if len(values) > LISTED else ""
    what = f"the run in {folder} finished at step {step}, and would ignore that {', '.join(values[:LISTED])}{more}"
    fix = f"Give another run.dir, or train.steps above {step} to train on with the new values."
    error = ConfigError("run.dir", what, fix)
    error.same_on_all_ranks = True
    raise error


def write_config(settings: Settings, folder: Path) -> None:
    """Write the resolved config, from which the run can be rebuilt."""
    write_atomically(folder / CONFIG, dump(encode(settings)))


def keep_config(config: dict[str, Any], folder: Path, step: int) -> None:
    """Keep the config that the run had up to `step` as config.step-N.yaml; one that is there already stays."""
    file = folder / f"config.step-{step}.yaml"
    if kind_of(file) is None:
        write_atomically(file, dump(config))


def run_name(folder: Path) -> str:
    """A unique name of this run folder; a folder that replaces it gets another."""
    file = folder / NAME
    if kind_of(file) is None:
        write_atomically(file, uuid.uuid4().hex)
    try:
        # The name becomes that of a folder in memory, which is removed at the end of the run.
        return check_name(read_run_file(file).decode())
    except (OSError, ValueError) as error:
        what = f"the file does not hold the name of a run: {reason(error)}"
        raise ConfigError(str(file), what, "Remove the file; the run gets another name.") from None


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config of the run in `folder`, old keys under their new names; None where there is no run.

    Without config.yaml it is that of the newest checkpoint. Not collective.
    """
    file = folder / CONFIG
    # A pipe or a broken link is a run's config that cannot be read, not a folder without a run.
    if not os.path.lexists(file):
        newest = newest_on_this_process(folder / CHECKPOINTS)
        return None if newest is None else with_new_names(read_checkpoint_config(newest[1]))
    try:
        text = read_run_file(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        what = f"the file cannot be read: {reason(error)}"
        raise ConfigError(str(file), what, "Restore it, or choose another run.dir.") from None
    data = parse(text, str(file))
    if not isinstance(data, dict):
        raise ConfigError(
            str(file),
            "the file is not a run's config",
            "Remove the file, or choose another run.dir.",
        )
    return with_new_names(data)
