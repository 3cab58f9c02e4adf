"""Bounds of a tokenizer.json from anyone: ids, lengths, and how much longer its steps can make a text.

A file of a few lines can ask for any memory: an id of four billion has a table of as many entries, and forty steps
that each double a text make a terabyte of a letter. What the steps can do is worked out before the library sees them.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

IDS = 1 << 24
"""Ids are below it."""
GROWTH = 1000
"""Characters that the steps may make of one; the known models' stay below 100."""
TEXT = 1000
"""Longest text that a step adds once, such as a prefix, and most entries of a template."""
WORD = 10_000
"""Longest word that the model takes apart, whose time is the square of it."""
STEPS = 100
"""Most steps of a section."""
SECTIONS = ("normalizer", "pre_tokenizer", "decoder")
KINDS = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "BertNormalizer": 36,
    "ByteLevel": 4,
    "Metaspace": 2,
}
"""Characters that a step makes of one, by its type (Unicode Standard Annex 15); a type that is not here makes one."""
ONCE = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer"}
"""Steps that change nothing when they come again."""


def check_bounds(content: Any) -> None:
    """Raise ValueError, with a clause, for the content of a tokenizer.json that is out of bounds."""
    if not isinstance(content, dict):
        raise ValueError("it is not an object of JSON")
    model = content.get("model")
    check_ids(_ids(content, model))
    if isinstance(model, Mapping):
        for key in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
            _require_short(model.get(key), f"model.{key}")
        _require_at_most(
            model.get("max_input_chars_per_word"), WORD, "model.max_input_chars_per_word"
        )
    for name in SECTIONS:
        growth = _growth(name, content.get(name))
        if growth > GROWTH:
            raise ValueError(f"its {name} can make more than {GROWTH} characters of one")
    for key in ("padding", "truncation"):
        settings = content.get(key)
        for name, value in settings.items() if isinstance(settings, Mapping) else ():
            _require_at_most(value if name != "strategy" else _fixed(value), IDS, f"{key}.{name}")
    if _entries(content.get("post_processor")) > TEXT:
        raise ValueError(f"its post_processor adds more than {TEXT} tokens")


def check_ids(ids: Iterator[Any]) -> None:
    """Raise ValueError for an id that is none, or not below `IDS`."""
    for token in ids:
        if type(token) is not int or not 0 <= token < IDS:
            raise ValueError(
                f"it has the token id {str(token)[:30]}, and ids are from 0 to {IDS - 1}"
            )


def companion_ids(name: str, content: Any) -> Iterator[Any]:
    """Yield the ids of a JSON file beside a tokenizer.json, by its name; none where it has none."""
    if not isinstance(content, Mapping):
        return
    if name in ("vocab.json", "added_tokens.json"):
        yield from content.values()
    elif isinstance(decoder := content.get("added_tokens_decoder"), Mapping):
        yield from (
            int(key) if str(key).isascii() and str(key).isdigit() else key for key in decoder
        )


def _ids(content: Mapping[str, Any], model: Any) -> Iterator[Any]:
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    added = content.get("added_tokens")
    tokens = (
        [token.get("id") for token in added if isinstance(token, Mapping)]
        if isinstance(added, list)
        else []
    )
    yield from chain(vocabulary.values() if isinstance(vocabulary, Mapping) else (), tokens)


def _fixed(strategy: Any) -> Any:
    return strategy.get("Fixed") if isinstance(strategy, Mapping) else None


def _require_short(value: Any, where: str) -> None:
    if isinstance(value, str) and len(value) > TEXT:
        raise ValueError(f"its {where} has {len(value)} characters, and may have {TEXT}")


def _require_at_most(value: Any, most: int, where: str) -> None:
    if isinstance(value, int | float) and value > most:
        raise ValueError(f"its {where} is {str(value)[:30]}, and may be {most}")


def _growth(section: str, step: Any) -> float:
    """Return how many characters the steps of a section can make of one."""
    growth, seen = 1.0, set()
    steps = list(_flat(step, 0))
    if len(steps) > STEPS:
        raise ValueError(f"its {section} has more than {STEPS} steps")
    for part in steps:
        kind = str(part.get("type"))
        for key in ("prepend", "content", "prefix", "suffix", "replacement"):
            _require_short(part.get(key), f"{section}.{key}")
        if kind not in ONCE or kind not in seen:
            growth *= _factor(kind, part)
        seen.add(kind)
    return growth


def _flat(step: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if not isinstance(step, Mapping) or depth > STEPS:
        return
    inner = [step.get(key) for key in ("normalizers", "pretokenizers", "decoders", "processors")]
    lists = [steps for steps in inner if isinstance(steps, list)]
    if lists:
        for part in lists[0]:
            yield from _flat(part, depth + 1)
    else:
        yield step


def _factor(kind: str, step: Mapping[str, Any]) -> float:
    content = step.get("content")
    if kind == "Replace" and isinstance(content, str):
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, Mapping) else None
        if isinstance(text, str) and text:
            return max(1.0, len(content) / len(text))
        # A regular expression may match between any two characters, and so does an empty text.
        return 1.0 + len(content)
    if kind == "Precompiled":
        return float(max(1, _longest_rule(step.get("precompiled_charsmap"))))
    return float(KINDS.get(kind, 1))


def _longest_rule(charsmap: Any) -> int:
    """Return the bytes of the longest text that SentencePiece's rules make of another; 0 where they are none.

    The rules are the size of a trie (4 bytes, little-endian), the trie, and the texts, each ended by a zero byte.
    """
    if not isinstance(charsmap, str):
        return 0
    try:
        content = base64.b64decode(charsmap, validate=True)
    except (binascii.Error, ValueError):
        return 0
    trie = int.from_bytes(content[:4], "little")
    return max(map(len, content[4 + trie :].split(b"\0")), default=0)


def _entries(processor: Any) -> int:
    count = 0
    for part in _flat(processor, 0):
        for key in ("single", "pair"):
            count += len(entries) if isinstance(entries := part.get(key), list) else 0
        for token in (
            tokens.values() if isinstance(tokens := part.get("special_tokens"), Mapping) else ()
        ):
            ids = token.get("ids") if isinstance(token, Mapping) else None
            count += len(ids) if isinstance(ids, list) else 0
    return count
