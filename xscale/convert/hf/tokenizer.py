"""Export a tokenizer to the files that `transformers` loads, and import one, so that the same text has the same ids."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xscale.checkpoint.load import read_state
from xscale.convert.hf.tokenizers_library import (
    convert_bytes,
    convert_sentencepiece,
    tokenizer_config,
)
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.file_safety import (
    check_name,
    decode_json,
    read_regular,
    remove_file,
    remove_folder,
)
from xscale.core.files.run_files import make_run_folder
from xscale.core.foreign import foreign_errors, quiet_panics, reason
from xscale.data.config import DataConfig
from xscale.data.corpus.prepared import open_tokenizer
from xscale.data.corpus.stored_tokenizer import FOLDER, open_stored_tokenizer, require_fingerprint
from xscale.data.tokenizer.file_bounds import check_bounds, check_ids, companion_ids
from xscale.data.tokenizer.huggingface import HuggingFace
from xscale.data.tokenizer.sentencepiece import FILE, SentencePiece
from xscale.data.tokenizer.template import file_with_prefix, template_of_file
from xscale.data.tokenizer.tokenizer import Tokenizer

XSCALE_TOKENIZER_FILE = "xscale_tokenizer.json"
"""The tokenizer's config in xscale, for a later import."""
JSON, CONFIG = "tokenizer.json", "tokenizer_config.json"
TRIALS, PIECES = 200, 12
"""Number of random texts on which both tokenizers are compared, and vocabulary pieces per text."""


def export_tokenizer(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Write the tokenizer into `folder`, beside the weights, as `transformers` loads it; returns messages."""
    config = tokenizer.config
    # A later import knows the begin of a text, whatever the template of its file is.
    section = encode(config) | {"add_bos": bool(tokenizer.prefix)}
    if isinstance(tokenizer, HuggingFace):
        return _copy_huggingface(tokenizer, section, folder)
    if isinstance(tokenizer, SentencePiece):
        (folder / FILE).write_bytes(tokenizer.processor.serialized_model_proto())
        section["file"] = FILE
        if tokenizer.is_foreign:
            return _copy_sentencepiece(tokenizer, section, folder)
        exported = convert_sentencepiece(tokenizer)
    elif config.kind == "byte":
        exported = convert_bytes(tokenizer)
    else:
        return [
            f"tokenizer: not exported, because '{config.kind}' has no counterpart in transformers"
        ]
    (folder / XSCALE_TOKENIZER_FILE).write_text(
        json.dumps(section, indent=2) + "\n", encoding="utf-8"
    )
    mismatches = find_mismatches(tokenizer, lambda text: exported.encode(text).ids)
    ties = sum(equal_score(tokenizer, xscale_ids, hf_ids) for xscale_ids, hf_ids in mismatches)
    if wrong := len(mismatches) - ties:
        remove_file(folder, XSCALE_TOKENIZER_FILE)
        return [
            f"tokenizer: not exported, because {wrong} of {TRIALS} random texts become other ids in transformers"
        ]
    text = (
        file_with_prefix(exported.to_str(), _begin(tokenizer))
        if tokenizer.prefix
        else exported.to_str()
    )
    (folder / JSON).write_text(text, encoding="utf-8")
    (folder / CONFIG).write_text(
        json.dumps(tokenizer_config(tokenizer), indent=2) + "\n", encoding="utf-8"
    )
    same = TRIALS - ties
    tied = f", {ties} other ids of the same unigram score" if ties else ""
    return [
        f"tokenizer: {same} random texts become the same ids{tied}; texts that contain a token's name, like </s> or "
        "<0x41>, or U+2581, may differ"
    ]


def _copy_sentencepiece(
    tokenizer: SentencePiece, section: dict[str, Any], folder: Path
) -> list[str]:
    """Write what `transformers` needs beside a model that was trained elsewhere, which it converts as it loads it."""
    named = {"pad": tokenizer.pad, "bos": tokenizer.bos, "eos": tokenizer.eos, "unk": tokenizer.unk}
    settings: dict[str, Any] = {
        f"{key}_token": tokenizer.piece(token) for key, token in named.items() if token is not None
    }
    settings |= {"add_bos_token": bool(tokenizer.prefix), "add_eos_token": False}
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / XSCALE_TOKENIZER_FILE).write_text(
        json.dumps(section, indent=2) + "\n", encoding="utf-8"
    )
    return [f"tokenizer: the run's own {FILE}; transformers converts it by the class of the model"]


def _begin(tokenizer: Tokenizer) -> list[tuple[str, int]]:
    """Return (text, id) of the tokens before a text."""
    return [(tokenizer.piece(token), token) for token in tokenizer.prefix]


def begins_alike(tokenizer: Tokenizer, encode_there: Callable[[str], list[int]]) -> bool:
    """Whether a text begins with the same ids by the template of another library's tokenizer."""
    ids = tokenizer.encode_prompt("a")
    return encode_there("a")[: len(ids)] == ids


def _copy_huggingface(tokenizer: HuggingFace, section: dict[str, Any], folder: Path) -> list[str]:
    """Copy a tokenizer.json of the tokenizers library, and the files next to it if it was imported with them.

    Its template is the one of training, where the config's `add_bos` is not that of the file.
    """
    companions = [tokenizer.file.with_name(name) for name in HuggingFace.COMPANIONS]
    files = {path.name: read_regular(path) for path in companions if path.is_file()}
    own_section = json.dumps(section | {"file": JSON}, indent=2).encode() + b"\n"
    files |= {JSON: read_regular(tokenizer.file), XSCALE_TOKENIZER_FILE: own_section}
    if template_of_file(tokenizer.file).prefix != tokenizer.prefix:
        files[JSON] = file_with_prefix(files[JSON].decode(), _begin(tokenizer)).encode()
        if CONFIG in files:
            settings = decode_json(files[CONFIG]) | {"add_bos_token": bool(tokenizer.prefix)}
            files[CONFIG] = json.dumps(settings, indent=2).encode() + b"\n"
    if CONFIG not in files:
        named = {"pad": tokenizer.pad, "bos": tokenizer.bos, "eos": tokenizer.eos}
        named["unk"] = None if tokenizer.unk == tokenizer.eos else tokenizer.unk
        named["mask"] = tokenizer.mask
        names = {
            f"{key}_token": tokenizer.piece(token)
            for key, token in named.items()
            if token is not None
        }
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **names,
        }
        files[CONFIG] = json.dumps(settings, indent=2).encode() + b"\n"
    for name, content in files.items():
        (folder / name).write_bytes(content)
    exported = load(folder)
    if wrong := len(
        find_mismatches(
            tokenizer, lambda text: exported(text, add_special_tokens=False)["input_ids"]
        )
    ):
        for name in files:
            remove_file(folder, name)
        return [
            f"tokenizer: not exported, because {wrong} of {TRIALS} random texts become other ids in transformers"
        ]
    if not begins_alike(tokenizer, lambda text: exported(text)["input_ids"]):
        for name in files:
            remove_file(folder, name)
        return ["tokenizer: not exported, because a text begins with other tokens in transformers"]
    return [f"tokenizer: {TRIALS} random texts become the same ids; it is the run's own {JSON}"]


def tokenizer_of(checkpoint: Path, data: dict[str, Any]) -> Tokenizer | ConfigError:
    """Open the tokenizer of a checkpoint, whose config has the section `data`: that of its run, or of the data folder.

    Returned is the reason when there is none. ConfigError when it is another than the checkpoint was trained with, or a
    file of it changed.
    """
    run = checkpoint.parent.parent
    tokenizer = open_stored_tokenizer(run)
    if tokenizer is None:
        try:
            tokenizer = open_tokenizer(decode(DataConfig, data))
        except ConfigError as error:
            return error
    fingerprint = read_state(checkpoint).get("tokenizer_fingerprint")
    fix = f"Put the run's tokenizer into {run / FOLDER}."
    require_fingerprint(
        tokenizer, fingerprint, run / FOLDER, "the checkpoint was trained with", fix
    )
    return tokenizer


def restore_tokenizer(source: Path, run: Path) -> dict[str, Any] | None:
    """Copy the tokenizer that an earlier export wrote to `source` into a run; its config, or None if there is none.

    ConfigError when the file is damaged, or names a file that is not in its folder.
    """
    description = source / XSCALE_TOKENIZER_FILE
    if not description.is_file():
        return None
    try:
        section = decode_json(read_regular(description))
        if not isinstance(section, dict):
            raise ValueError("it is not an object of JSON")
        if file := section.get("file"):
            name = check_name(str(file))
            content = read_regular(source / name)
            run.mkdir(parents=True, exist_ok=True)
            write_atomically(make_run_folder(run, FOLDER) / name, content)
            section["file"] = str(run / FOLDER / name)
    except (OSError, ValueError) as error:
        what = f"this is not the description of a tokenizer: {reason(error)}"
        raise ConfigError(
            str(description), what, "Export the run again, or remove the file."
        ) from None
    return section


def find_mismatches(
    tokenizer: Tokenizer, encode_there: Callable[[str], list[int]]
) -> list[tuple[list[int], list[int]]]:
    """Encode random texts, made of vocabulary pieces, with both tokenizers; (our ids, their ids) where they differ."""
    draw = random.Random(0)
    table = [
        text
        for piece in tokenizer.token_bytes()
        if (text := piece.decode("utf-8", errors="ignore"))
    ]
    mismatches = []
    for _ in range(TRIALS):
        text = "".join(draw.choices([*table, "é", "漢", "\U0001d11e"], k=PIECES))
        ids, ids_there = tokenizer.encode(text), encode_there(text)
        if ids != ids_there:
            mismatches.append((ids, ids_there))
    return mismatches


def equal_score(tokenizer: Tokenizer, first: list[int], second: list[int]) -> bool:
    """Return whether a unigram model gives two segmentations of one text the same score, up to float32 rounding.

    SentencePiece sums scores in float32 and the tokenizers library in float64, so that rounding decides between them:
    four dashes can be `---` and `-`, or `-` and `---`.
    """
    if not isinstance(tokenizer, SentencePiece) or tokenizer.config.model != "unigram":
        return False
    if tokenizer.decode(first) != tokenizer.decode(second):
        return False
    scores = [
        math.fsum(tokenizer.processor.GetScore(token) for token in ids) for ids in (first, second)
    ]
    return math.isclose(*scores, rel_tol=1e-6)


def load(source: Path) -> Any:
    """Load the tokenizer in a folder with `transformers`. ConfigError when it cannot be read."""
    from transformers import AutoTokenizer

    for name in (JSON, CONFIG, "vocab.json", "added_tokens.json"):
        if not (file := source / name).is_file():
            continue
        with foreign_errors(file, "the file is no part of a tokenizer"):
            # A length without an end is an integer of 31 digits in many of them.
            content = decode_json(read_regular(file), any_integer=True)
            check_bounds(content) if name == JSON else check_ids(companion_ids(name, content))
    with foreign_errors(source, "transformers cannot read it"), quiet_panics():
        return AutoTokenizer.from_pretrained(
            str(source), local_files_only=True, trust_remote_code=False
        )


FILES = (
    JSON,
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
"""A folder with a tokenizer has one of these files; without any, the library constructs a default tokenizer."""


def import_tokenizer(source: Path, run: Path, vocabulary: int) -> tuple[dict[str, Any] | None, str]:
    """Store the tokenizer in `source` in a run folder; returns its config, or None, and a message for the user.

    It is stored only if both libraries give the same ids for random texts. `vocabulary`: rows of the embedding.
    """
    hint = f"set data.tokenizer, or data.prepared, to one of {vocabulary} ids"
    if not any((source / name).is_file() for name in FILES):
        return None, f"tokenizer: {source} has none; {hint}"
    folder = run / FOLDER
    try:
        with foreign_errors(source, "transformers cannot use its tokenizer"), quiet_panics():
            section, ids = _store(source, folder, vocabulary)
    except ConfigError as error:
        remove_folder(folder.parent, folder.name)
        return None, f"tokenizer: not imported ({error.problems[0].what}); {hint}"
    rows = f" (the embedding has {vocabulary} rows)" if ids < vocabulary else ""
    return (
        section,
        f"tokenizer: imported, {ids} ids{rows}; {TRIALS} random texts become the same ids",
    )


def _store(source: Path, folder: Path, vocabulary: int) -> tuple[dict[str, Any], int]:
    hf_tokenizer = load(source)
    hf_tokenizer.save_pretrained(str(folder))
    ids = max(hf_tokenizer.get_vocab().values()) + 1
    if ids > vocabulary:
        raise ConfigError(str(source), f"it has {ids} ids, but the embedding has {vocabulary} rows")
    section = {"kind": "huggingface", "file": str(folder / JSON), "vocabulary": vocabulary}
    # A tokenizer without an end-of-text token may have a separator, and one without a beginning-of-text token [CLS].
    names = {"eos": hf_tokenizer.eos_token or hf_tokenizer.sep_token}
    names |= {"bos": hf_tokenizer.bos_token or hf_tokenizer.cls_token}
    names |= {"pad": hf_tokenizer.pad_token, "mask": hf_tokenizer.mask_token}
    section |= {key: name for key, name in names.items() if name is not None}
    tokenizer = open_tokenizer(decode(DataConfig, {"tokenizer": section}))
    if wrong := len(
        find_mismatches(
            tokenizer, lambda text: hf_tokenizer(text, add_special_tokens=False)["input_ids"]
        )
    ):
        raise ConfigError(
            str(source), f"{wrong} of {TRIALS} random texts become other ids in xscale"
        )
    if not begins_alike(tokenizer, lambda text: hf_tokenizer(text)["input_ids"]):
        raise ConfigError(str(source), "a text begins with other tokens in xscale")
    return section, ids
