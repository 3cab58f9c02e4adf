"""The template of a tokenizer.json: the special tokens that its post-processor puts before and after one text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from xscale.core.files.file_safety import decode_json, read_regular

PREFIX_OF = {"BertProcessing": "cls", "RobertaProcessing": "cls"}
"""Post-processors that put one token before a text and one behind it: the key of the former."""


@dataclass(frozen=True)
class Template:
    """Ids before and after a text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


def read_template(post_processor: Any) -> Template:
    """Read the section `post_processor` of a tokenizer.json; None: it adds no token.

    ValueError when its template of one text does not have the text once.
    """
    kind = post_processor.get("type") if isinstance(post_processor, Mapping) else None
    if kind == "Sequence":
        templates = [read_template(part) for part in post_processor["processors"]]
        return next((template for template in templates if template != Template()), Template())
    if kind in PREFIX_OF:
        return Template((int(post_processor["cls"][1]),), (int(post_processor["sep"][1]),))
    if kind != "TemplateProcessing":
        return Template()
    places = [number for number, part in enumerate(post_processor["single"]) if "Sequence" in part]
    if len(places) != 1:
        raise ValueError(f"its template of one text has the text {len(places)} times")
    ids = [_ids(part, post_processor["special_tokens"]) for part in post_processor["single"]]
    before, after = ids[: places[0]], ids[places[0] + 1 :]
    return Template(
        tuple(token for part in before for token in part),
        tuple(token for part in after for token in part),
    )


def _ids(part: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> Sequence[int]:
    name = part["SpecialToken"]["id"] if "SpecialToken" in part else None
    return [] if name is None else [int(token) for token in special_tokens[name]["ids"]]


def template_of_file(file: Path) -> Template:
    """Return the template of a tokenizer.json; none for a file that is missing or damaged, which opening it says."""
    try:
        status = file.stat()
        return _template_of_version(file, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Template()


@lru_cache(maxsize=8)
def _template_of_version(file: Path, modified: int, size: int) -> Template:
    """Files of large vocabularies have many megabytes, and each shard of a corpus asks for the template."""
    return read_template(decode_json(read_regular(file)).get("post_processor"))


def with_prefix(post_processor: Any, tokens: Sequence[tuple[str, int]]) -> Any:
    """Return a post-processor that puts `tokens` (text, id) before a text, instead of its own first ones.

    What it puts behind a text, and between and behind two texts, stays.
    """
    kind = post_processor.get("type") if isinstance(post_processor, Mapping) else None
    if kind == "Sequence":
        parts = list(post_processor["processors"])
        adding = [number for number, part in enumerate(parts) if read_template(part) != Template()]
        if adding:
            parts[adding[0]] = with_prefix(parts[adding[0]], tokens)
        else:
            parts.append(with_prefix(None, tokens))
        return {**post_processor, "processors": parts}
    if kind in PREFIX_OF:
        post_processor = _as_template(post_processor)
    elif kind != "TemplateProcessing":
        text = [_sequence("A", 0)]
        template = {
            "type": "TemplateProcessing",
            "single": text,
            "pair": [*text, _sequence("B", 1)],
        }
        added = with_prefix({**template, "special_tokens": {}}, tokens)
        # Byte-level files mend offsets in a post-processor that adds nothing.
        return (
            added if kind is None else {"type": "Sequence", "processors": [post_processor, added]}
        )
    before = [_special(text, 0) for text, _ in tokens]
    names = dict(post_processor["special_tokens"])
    names |= {text: {"id": text, "ids": [token], "tokens": [text]} for text, token in tokens}
    bodies = {key: before + _from_text(post_processor[key]) for key in ("single", "pair")}
    return {**post_processor, **bodies, "special_tokens": names}


def _from_text(parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the parts of a template from the first text on."""
    first = next((number for number, part in enumerate(parts) if "Sequence" in part), 0)
    return list(parts[first:])


def _as_template(post_processor: Mapping[str, Any]) -> dict[str, Any]:
    """Write the post-processor of BERT or RoBERTa as a template."""
    (first, first_id), (last, last_id) = post_processor["cls"], post_processor["sep"]
    single = [_special(first, 0), _sequence("A", 0), _special(last, 0)]
    is_bert = post_processor["type"] == "BertProcessing"
    between = [] if is_bert else [_special(last, 0)]
    second = int(is_bert)
    tokens = ((first, first_id), (last, last_id))
    names = {text: {"id": text, "ids": [token], "tokens": [text]} for text, token in tokens}
    pair = [*single, *between, _sequence("B", second), _special(last, second)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": names}


def _special(text: str, number: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": text, "type_id": number}}


def _sequence(name: str, number: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": number}}


def file_with_prefix(text: str, tokens: Sequence[tuple[str, int]]) -> str:
    """Return the text of a tokenizer.json whose template begins with `tokens` (text, id), and with nothing else."""
    data = decode_json(text)
    return json.dumps(
        {**data, "post_processor": with_prefix(data.get("post_processor"), tokens)},
        ensure_ascii=False,
    )
