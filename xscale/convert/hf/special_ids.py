"""Special token ids, and generation settings, of an imported model, which its export has again."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale.checkpoint.load import read_state
from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.file_safety import (
    decode_json,
    read_regular,
)
from xscale.core.files.run_files import kind_of, make_run_folder, read_nested_run_file
from xscale.core.foreign import reason
from xscale.data.tokenizer.tokenizer import Tokenizer

ORIGIN, IDS, GENERATION = "transformers", "special_ids.json", "generation_config.json"
"""A run's subfolder for what is kept of an imported model, and its files: special token ids, generation settings."""
NULLABLE = ("pad_token_id", "bos_token_id", "eos_token_id")
ID_KEYS = (*NULLABLE, "sep_token_id", "decoder_start_token_id")


def keep_special_ids(
    source: Path, config: dict[str, Any], tokenizer: Tokenizer | None, run: Path
) -> None:
    """Store the special ids of an imported model's config.json in `run`, and its generation settings, for an export.

    `tokenizer` is the one that was imported with it. ConfigError when the generation settings cannot be read.
    """
    run.mkdir(parents=True, exist_ok=True)
    folder = make_run_folder(run, ORIGIN)
    ids = {
        key: config[key]
        for key in ID_KEYS
        if key in config and (key in NULLABLE or config[key] is not None)
    }
    fingerprint = None if tokenizer is None else tokenizer.fingerprint
    kept = {"ids": ids, "tokenizer_fingerprint": fingerprint}
    write_atomically(folder / IDS, json.dumps(kept, indent=1) + "\n")
    if (source / GENERATION).is_file():
        write_atomically(
            folder / GENERATION, json.dumps(_read_json(source / GENERATION), indent=2) + "\n"
        )


@dataclass(frozen=True)
class SpecialIds:
    """The special token ids of an imported model."""

    ids: dict[str, Any]
    """Keys of config.json."""
    had_tokenizer: bool
    """Whether its tokenizer was imported with it."""


def kept_special_ids(checkpoint: Path) -> SpecialIds | None:
    """Return the special ids of the imported model that a checkpoint's run began from.

    None: the run was not imported, or it was trained with another tokenizer than the imported one.
    """
    file = checkpoint.parent.parent / ORIGIN / IDS
    if kind_of(file) is None:
        return None
    kept = _read_json(file, read_nested_run_file)
    fingerprint = kept.get("tokenizer_fingerprint")
    if read_state(checkpoint).get("tokenizer_fingerprint") != fingerprint:
        return None
    ids = kept.get("ids", {})
    if not isinstance(ids, dict):
        raise ConfigError(
            str(file), "the file contains no special ids", "Copy it again, or delete it."
        )
    return SpecialIds(ids, fingerprint is not None)


def export_generation_config(checkpoint: Path, folder: Path, *, same_tokenizer: bool) -> list[str]:
    """Write the generation settings of the imported model into `folder`; returns messages."""
    file = checkpoint.parent.parent / ORIGIN / GENERATION
    if kind_of(file) is None:
        return []
    if not same_tokenizer:
        return [
            f"{GENERATION}: not exported, because the run was trained with another tokenizer than the imported one"
        ]
    text = json.dumps(_read_json(file, read_nested_run_file), indent=2) + "\n"
    (folder / GENERATION).write_text(text, encoding="utf-8")
    return []


def _read_json(file: Path, read: Callable[[Path], bytes] = read_regular) -> dict[str, Any]:
    try:
        content = decode_json(read(file))
    except (OSError, ValueError) as error:
        what = f"the file cannot be read: {reason(error)}"
        raise ConfigError(str(file), what, "Copy it again, or delete it.") from None
    if not isinstance(content, dict):
        raise ConfigError(
            str(file), "the file contains no JSON object", "Copy it again, or delete it."
        )
    return content


def special_ids(tokenizer: Tokenizer | ConfigError, data: dict[str, Any]) -> dict[str, int]:
    """Return the special token ids for config.json, of a tokenizer or its config's section; empty: they are unknown."""
    known: Any = tokenizer
    if isinstance(tokenizer, ConfigError):
        # Special ids are always the first ones, except in tokenizer.json files of other libraries.
        known = Tokenizer if data["tokenizer"]["kind"] != "huggingface" else None
    named = {"pad": known.pad, "bos": known.bos, "eos": known.eos} if known else {}
    return {f"{key}_token_id": token for key, token in named.items() if token is not None}
