"""Preparation of tokenised data from a config: train the tokenizer, tokenise shards in parallel, merge; resumable.

`prepare` does it in one process with a pool of workers, `prepare_distributed` on the ranks of a job.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from xscale.core.errors import ConfigError, Problem, counted
from xscale.core.files.atomic_write import TEMPORARY_SUFFIX, reporting_full_disk
from xscale.core.files.file_lock import FileLock, LockedError
from xscale.core.files.file_safety import remove_empty_folder, remove_file, remove_folder
from xscale.data.config import DataConfig
from xscale.data.corpus.corpus_state import CorpusState
from xscale.data.corpus.manifest import MANIFEST
from xscale.data.corpus.merge_shards import merge_shards, skipped_sentence, unknown_sentence
from xscale.data.corpus.open_blend import open_blend
from xscale.data.corpus.prepared import PreparedData, open_prepared, open_tokenizer, prepared_folder
from xscale.data.corpus.shards import corpus_hash, plan_shards, prepare_shard
from xscale.data.corpus.stored_tokenizer import require_fingerprint
from xscale.data.corpus.train_tokenizer import train_tokenizer
from xscale.data.parallel_map import parallel_map
from xscale.data.progress import ProgressBar
from xscale.data.source.listing import left_out_sentence
from xscale.data.source.source import SOURCES, ByteRange, Source
from xscale.data.tokenizer.tokenizer import TOKENIZERS, Tokenizer


def prepare(
    config: DataConfig,
    *,
    processes: int | None = None,
    progress: bool = True,
    tokenizer: Tokenizer | None = None,
) -> PreparedData:
    """Tokenise the config's source unless that is done already, and open the result.

    `processes` defaults to `config.workers`, then to one per core. After an interruption the next call resumes from the
    finished shards. One process of a job calls this; the others call `open_prepared` (or `open_corpus`) afterwards.
    Concurrent calls of several jobs wait for each other.

    `config.prepared` and the datasets of `config.blend` are only checked; for a blend the first dataset is returned.
    With `tokenizer`, that of a run, none is trained, and data of another one is refused.

    ConfigError when the corpus is empty, binary, disappears or has changed, and when the disk is full.
    """
    if config.blend:
        return open_blend(config)[0][0]
    if config.prepared is not None:
        return open_prepared(config)
    folder = prepared_folder(config)
    if not (folder / MANIFEST).exists():
        # A missing corpus fails before anything is written.
        shards = _plan_and_tell(config, progress)
        with folder_lock(folder, progress):
            if not (folder / MANIFEST).exists():
                _tokenise(config, shards, processes, progress, tokenizer)
    else:
        check_unchanged(config, folder)
    return open_prepared(config)


def _plan_and_tell(config: DataConfig, progress: bool) -> list[list[ByteRange]]:
    """Plan the shards; with `progress`, print how many files the corpus has and which are left out."""
    source: Source = SOURCES.build(config.source)
    shards = plan_shards(config, source)
    if progress and (left_out := left_out_sentence(source.left_out.entry())):
        files = len({part.file for ranges in shards for part in ranges})
        print(f"data.source: {files:,} files; {left_out}", file=sys.stderr, flush=True)
    return shards


def _tokenise(
    config: DataConfig,
    shards: list[list[ByteRange]],
    processes: int | None,
    progress: bool,
    tokenizer: Tokenizer | None,
) -> None:
    begin_folder(config, progress, tokenizer)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    processes = processes or config.workers or cores
    total = sum(byte_range.size for ranges in shards for byte_range in ranges)
    with ProgressBar(
        f"tokenising with {counted(processes, 'process')}", total, shown=progress
    ) as bar:
        for size in parallel_map(
            prepare_shard,
            [(config, number, ranges) for number, ranges in enumerate(shards)],
            processes,
        ):
            bar.advance(size)
    finish_folder(config, progress)


def begin_folder(config: DataConfig, progress: bool, tokenizer: Tokenizer | None = None) -> None:
    """Delete leftover temporary files and train the tokenizer if it is missing. Requires the folder's lock.

    A `tokenizer` is copied into the folder instead of training one; ConfigError when the folder has another.
    """
    folder = prepared_folder(config)
    for leftover in folder.glob(f"*{TEMPORARY_SUFFIX}"):
        remove_file(leftover.parent, leftover.name)
    missing = TOKENIZERS.of(config.tokenizer).part.missing(config.tokenizer, folder)
    if tokenizer is None:
        if missing:
            train_tokenizer(config, progress=progress)
        return
    if missing:
        tokenizer.save(folder)
    require_run_tokenizer(open_tokenizer(config), tokenizer, folder)


def require_run_tokenizer(tokenizer: Tokenizer, of_run: Tokenizer, folder: Path) -> None:
    """Raise ConfigError when the tokenizer in the data folder `folder` is not the run's."""
    fix = "Give another data.folder, where the text is tokenised with the run's tokenizer, or another run.dir."
    require_fingerprint(tokenizer, of_run.fingerprint, folder, "the run was trained with", fix)


def finish_folder(config: DataConfig, progress: bool) -> None:
    """Merge the finished shards and delete them; print what was skipped or is unknown. Requires the folder's lock."""
    manifest = merge_shards(config)
    if manifest.skipped and progress:
        print(f"data.source: {skipped_sentence(manifest.skipped)}", file=sys.stderr, flush=True)
    if manifest.unknown and progress:
        what = f"{unknown_sentence(manifest)}: the tokenizer has no token for a part of this text"
        print(f"data.tokenizer: {what}", file=sys.stderr, flush=True)
    remove_folder(prepared_folder(config), "shards")


def missing_files(config: DataConfig) -> list[Problem]:
    """List the files of the config that are missing or no data: prepared data, or else the corpus and the tokenizer.

    Reads no text.
    """
    folder, part = prepared_folder(config), TOKENIZERS.of(config.tokenizer).part
    needed: list[Callable[[], object]] = []
    for item in config.blend:
        single = config.model_copy(update={"prepared": item.prepared, "blend": ()})
        needed.append(partial(open_prepared, single))
    if config.prepared is not None:
        needed.append(partial(open_prepared, config))
    elif not config.blend and not (folder / MANIFEST).exists():
        needed.append(SOURCES.build(config.source).byte_ranges)
        if not part.missing(config.tokenizer, folder):
            needed.append(partial(TOKENIZERS.build, config.tokenizer, folder))
    problems: list[Problem] = []
    for look in needed:
        try:
            look()
        except ConfigError as error:
            problems += error.problems
    return problems


def check_unchanged(config: DataConfig, folder: Path) -> None:
    """Raise ConfigError when the corpus exists and is not the one that was prepared; a missing corpus is fine."""
    manifest = open_prepared(config).manifest
    assert manifest is not None
    if SOURCES.of(config.source).traits.download:
        # Prepared data needs no network; a dataset that changed since then is another revision.
        return
    try:
        ranges = SOURCES.build(config.source).byte_ranges()
    except ConfigError:
        return
    is_same_files = corpus_hash(ranges) == manifest.corpus
    if not is_same_files or not CorpusState(**manifest.state).is_of(ranges):
        how = "edited" if is_same_files else "added, removed or resized"
        what = f"the corpus changed (files were {how}) since it was prepared"
        fix = f"To train on what was prepared set data.prepared={folder}; to prepare it anew remove that folder."
        raise ConfigError("data.source", what, fix)


LOCK_FILE = "lock"


@contextmanager
def folder_lock(folder: Path, progress: bool) -> Iterator[None]:
    """Hold the lock of the folder; with `progress`, print a line when another process has it.

    Data that is refused before any shard is written leaves neither the lock's file nor the folder nor those that it is
    in, if they are new.
    """
    path, had_lock = folder.resolve(), (folder / LOCK_FILE).exists()
    new_folders = [above for above in (path, *path.parents) if not above.exists()]
    with FileLock(folder / LOCK_FILE) as lock:
        with reporting_full_disk(folder):
            try:
                lock.acquire()
            except LockedError as error:
                if progress:
                    holder = str(error) or "another process"
                    print(
                        f"waiting for {holder}, which prepares {folder}",
                        file=sys.stderr,
                        flush=True,
                    )
                lock.acquire(math.inf)
        try:
            yield
        except ConfigError:
            remove_empty_folder(folder, "shards")
            if not had_lock and os.listdir(folder) == [LOCK_FILE]:
                lock.remove()
                for new in new_folders:
                    remove_empty_folder(new.parent, new.name)
            raise


T = TypeVar("T")


class OnAll(Protocol):
    """Does work on each rank and returns every rank's result; all ranks raise the same error when one fails."""

    def __call__(self, work: Callable[[], T], /) -> list[T]: ...


def prepare_distributed(
    config: DataConfig, rank: int, world: int, on_all: OnAll, progress: bool = True
) -> PreparedData:
    """Do what `prepare` does on `world` ranks, with the same bytes as result. Collective.

    Rank 0 trains the tokenizer, each rank tokenises every `world`-th shard, rank 0 merges them. When a rank fails there
    is no manifest, so that nothing opens incomplete data; the next call resumes from the finished shards.
    """
    if config.blend or config.prepared is not None:
        return prepare(config, progress=False)
    progress = progress and rank == 0
    with contextlib.ExitStack() as lock:
        started = on_all(lambda: rank == 0 and _lock_and_begin(config, lock, progress))
        if any(started):
            on_all(lambda: _prepare_shards(config, rank, world, progress))
            on_all(lambda: finish_folder(config, progress) if rank == 0 else None)
    return open_prepared(config)


def _lock_and_begin(config: DataConfig, lock: contextlib.ExitStack, progress: bool) -> bool:
    """Lock the folder until `lock` closes and train the tokenizer; False when the data is prepared already."""
    folder = prepared_folder(config)
    if (folder / MANIFEST).exists():
        check_unchanged(config, folder)
        return False
    _plan_and_tell(config, progress)
    lock.enter_context(folder_lock(folder, progress))
    if (folder / MANIFEST).exists():
        return False
    begin_folder(config, progress)
    return True


def _prepare_shards(config: DataConfig, rank: int, world: int, progress: bool) -> None:
    local_shards: list[tuple[int, list[Any]]] = list(enumerate(plan_shards(config)))[rank::world]
    total = sum(byte_range.size for _, ranges in local_shards for byte_range in ranges)
    with ProgressBar(f"tokenising on {world} ranks; rank 0", total, shown=progress) as bar:
        for number, ranges in local_shards:
            bar.advance(prepare_shard(config, number, ranges))
