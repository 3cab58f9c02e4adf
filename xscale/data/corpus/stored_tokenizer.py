"""The tokenizer in a run folder: a run trains, evaluates and generates with it wherever the folder is copied to."""

import json
from pathlib import Path
from typing import Any

from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.file_safety import decode_json
from xscale.core.files.run_files import kind_of, make_run_folder, read_run_file, require_own_files
from xscale.core.foreign import reason
from xscale.data.config import DataConfig
from xscale.data.corpus.prepared import begin_differs, open_tokenizer
from xscale.data.tokenizer.tokenizer import TOKENIZERS, Tokenizer

FOLDER = "tokenizer"
"""Subfolder of the run folder."""
DESCRIPTION = "fingerprint.json"
"""File with the tokenizer's config and fingerprint."""


def store_tokenizer(tokenizer: Tokenizer, run: Path) -> None:
    """Copy the tokenizer into the run folder `run`, unless it is there. Raises OSError."""
    folder = run / FOLDER
    description = {
        "tokenizer": encode(tokenizer.config) | {"add_bos": bool(tokenizer.prefix)},
        "fingerprint": tokenizer.fingerprint,
        "vocabulary": tokenizer.vocabulary,
    }
    if (
        kind_of(folder / DESCRIPTION) is not None
        and _description(folder).get("fingerprint") == tokenizer.fingerprint
    ):
        return
    make_run_folder(run, FOLDER)
    tokenizer.save(folder)
    # Last: a folder with a description is complete.
    write_atomically(folder / DESCRIPTION, json.dumps(description, indent=1) + "\n")


def open_stored_tokenizer(run: Path) -> Tokenizer | None:
    """Open the tokenizer in the run folder `run`; None where it has none. ConfigError when a file of it changed.

    A run of before there was `add_bos` had no token before a text, whatever its file says, and keeps that.
    """
    folder = run / FOLDER
    if kind_of(folder / DESCRIPTION) is None:
        return None
    try:
        require_own_files(folder)
    except OSError as error:
        what = f"the run's tokenizer cannot be read: {reason(error)}"
        raise ConfigError(str(error.filename or folder), what, "Copy the folder again.") from None
    description = _description(folder)
    fix = "Copy the folder again from where the run was trained."
    try:
        section, fingerprint = (
            {"add_bos": False, **description["tokenizer"]},
            description["fingerprint"],
        )
        config = decode(DataConfig, {"tokenizer": section}).tokenizer
    except (KeyError, TypeError, ConfigError):
        raise ConfigError(
            str(folder / DESCRIPTION), "this is not the description of a tokenizer", fix
        ) from None
    part = TOKENIZERS.of(config).part
    tokenizer: Tokenizer = part(part.in_folder(config, folder), folder)
    require_fingerprint(tokenizer, fingerprint, folder, "the folder's description says", fix)
    return tokenizer


def open_run_tokenizer(run: Path, config: DataConfig, fingerprint: str | None) -> Tokenizer:
    """Open the tokenizer of the run in `run`: its own copy, or that of `config` for a run that has none.

    `fingerprint` is that of the run's checkpoint; None: it has none. ConfigError when there is no tokenizer, or another
    than the checkpoint was trained with. Nothing is trained or written.
    """
    stored = open_stored_tokenizer(run)
    tokenizer = _configured_tokenizer(run, config) if stored is None else stored
    if (
        stored is None
        and fingerprint is not None
        and begin_differs(tokenizer, fingerprint) is not None
    ):
        part = tokenizer.config.model_copy(update={"add_bos": False})
        tokenizer = _configured_tokenizer(run, config.model_copy(update={"tokenizer": part}))
    where = getattr(tokenizer, "file", None) or run / FOLDER
    fix = f"Put the run's tokenizer into {run / FOLDER}, or give its data folder as data.folder."
    require_fingerprint(tokenizer, fingerprint, where, "the run's checkpoint was trained with", fix)
    return tokenizer


def _configured_tokenizer(run: Path, config: DataConfig) -> Tokenizer:
    """Open the tokenizer of `config`, for a run that has no copy of its own, such as one that was imported without."""
    try:
        return open_tokenizer(config)
    except ConfigError as error:
        what = f"the run has no tokenizer, and that of its config cannot be opened: {error.problems[0].what}"
        fix = (
            f"Set data.tokenizer in {run / 'config.yaml'} to the model's: kind huggingface or sentencepiece, and its "
            f"file. Or put it into {run / FOLDER}."
        )
        raise ConfigError(str(run), what, fix) from None


def require_fingerprint(
    tokenizer: Tokenizer, fingerprint: str | None, where: Path, whose: str, fix: str
) -> None:
    """Raise ConfigError when the tokenizer is not the one with `fingerprint`, if that is known."""
    if fingerprint is None or fingerprint == tokenizer.fingerprint:
        return
    if (
        isinstance(fingerprint, str)
        and (begin := begin_differs(tokenizer, fingerprint)) is not None
    ):
        raise ConfigError(str(where), *begin)
    what = f"this tokenizer has the fingerprint {tokenizer.fingerprint}, and {whose} {fingerprint}"
    raise ConfigError(str(where), what, fix)


def with_tokenizer(config: DataConfig, tokenizer: Tokenizer) -> DataConfig:
    """`config` with the files of an opened tokenizer, if it names a file that is not there, and with its begin of a
    text, if it names none."""
    section, stored = config.tokenizer, tokenizer.config
    file = getattr(section, "file", None)
    if file and not Path(file).exists():
        return config.model_copy(update={"tokenizer": stored})
    if section.add_bos is None and stored.add_bos is not None and section.kind == stored.kind:
        section = section.model_copy(update={"add_bos": stored.add_bos})
    return config.model_copy(update={"tokenizer": section})


def _description(folder: Path) -> dict[str, Any]:
    try:
        description = decode_json(read_run_file(folder / DESCRIPTION))
    except (OSError, ValueError) as error:
        what = f"the description of the tokenizer cannot be read: {reason(error)}"
        raise ConfigError(str(folder / DESCRIPTION), what, "Copy the folder again.") from None
    return description if isinstance(description, dict) else {}
