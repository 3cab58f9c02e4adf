"""Grammars of hostile input: each draws a file's content from a generator, so that a seed stands for a case."""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

import yaml

WORDS = ("model", "train", "data", "kind", "stack", "depth", "steps", "use", "decoder", "byte", "lr", "1e-3", "", "yes")
ODD_TEXTS = (
    *("", " ", "\0", "\x1b[2J", "\u202e", "\ud800", "a\nb", "../../x", "/dev/zero", "~", "$HOME", "{}", "[", "%s%n"),
    *("null", "NaN", "1e999", "0x", "2026-02-30", "12:30", "010", "<script>", "x" * 5000, "é" * 300, "posix.system"),
)
ODD_NUMBERS = (
    *(0, -1, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 4 * 10**9, 2**53 + 1, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30),
    *(0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
)


def odd_value(random: Random, depth: int = 0) -> Any:
    """Draw a value that few readers expect."""
    kind = random.randrange(12 if depth < 3 else 8)
    if kind < 3:
        return random.choice(ODD_NUMBERS)
    if kind < 6:
        return random.choice(ODD_TEXTS)
    if kind < 8:
        return random.choice((None, True, False))
    if kind == 8:
        return deep(random.choice((3, 50, 200, 2000)))
    if kind == 9:
        return [odd_value(random, depth + 1) for _ in range(random.choice((0, 1, 2, 5)))]
    if kind == 10:
        return {odd_key(random): odd_value(random, depth + 1) for _ in range(random.choice((0, 1, 2, 5)))}
    return [random.choice(ODD_NUMBERS)] * random.choice((1, 100, 3000))


def deep(levels: int) -> str:
    """Return what stands for a list in a list, so many times: Python's writers cannot write it."""
    return f"DEEP{levels}"


def _with_deep(text: str) -> str:
    return re.sub(r"[\"']?DEEP(\d+)[\"']?", lambda match: "[" * int(match[1]) + "1" + "]" * int(match[1]), text)


def odd_key(random: Random) -> str:
    return random.choice((*WORDS, *ODD_TEXTS[:20]))


def places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the place of every value in JSON data."""
    items = data.items() if isinstance(data, dict) else enumerate(data[:20]) if isinstance(data, list) else ()
    return [place for key, value in items for place in ((*at, key), *places(value, (*at, key)))]


def mutated(random: Random, data: Any) -> Any:
    """Return JSON data with one to four values changed, deleted, repeated or put elsewhere."""
    data = json.loads(json.dumps(data))
    for _ in range(random.choice((1, 1, 2, 4))):
        known = places(data)
        if not known:
            return odd_value(random)
        *above, key = random.choice(known)
        holder = data
        for name in above:
            holder = holder[name]
        change = random.randrange(8)
        if change < 4:
            holder[key] = odd_value(random)
        elif change == 4:
            del holder[key]
        elif change == 5:
            holder[key] = value_at(data, random.choice(known))
        elif change == 6 and isinstance(holder, dict):
            holder[odd_key(random)] = odd_value(random)
        elif isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] = random.choice(
                (-holder[key], holder[key] * 1000, holder[key] + 1, str(holder[key]), holder[key] / 3)
            )
        else:
            holder[key] = [holder[key], holder[key]]
    return data


def value_at(data: Any, place: tuple[Any, ...]) -> Any:
    """Return a copy of what lies at a place; a part of it may be put into itself, so a copy."""
    for key in place:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return json.loads(json.dumps(data))


def json_bytes(random: Random, data: Any) -> bytes:
    """Write JSON data that was mutated, one in four times with its bytes torn, repeated or replaced."""
    content = _dumped(mutated(random, data))
    return torn(random, content) if random.randrange(4) == 0 else content


def _dumped(data: Any) -> bytes:
    return _with_deep(json.dumps(data)).encode()


def torn(random: Random, content: bytes) -> bytes:
    """Cut, repeat or replace a few bytes, or all of them."""
    if not content:
        return b"\xff"
    first, last = sorted((random.randrange(len(content)), random.randrange(len(content))))
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: content[:first],
        lambda: content[:first] + content[last:],
        lambda: content[:first] + random.randbytes(random.choice((1, 4, 40))) + content[first + 1 :],
        lambda: content[:first] + content[first:last] * 3 + content[last:],
        lambda: content[:first] + b"[" * 50_000 + content[first:],
        lambda: content[:first] + b"9" * 6000 + content[first:],
        lambda: content.decode(errors="replace").encode("utf-16"),
        lambda: random.randbytes(random.choice((0, 1, 300))),
    )
    return random.choice(kinds)()


def yaml_text(random: Random, data: Any) -> str:
    """Write a config that was mutated, one in two times with the syntax of YAML used oddly."""
    text = _with_deep(yaml.safe_dump(mutated(random, data), sort_keys=False, allow_unicode=True))
    for _ in range(random.choice((0, 0, 1, 2))):
        lines = text.splitlines() or [""]
        at = random.randrange(len(lines))
        lines.insert(at, random.choice(ODD_LINES))
        text = "\n".join(lines)
    return torn(random, text.encode(errors="replace")).decode(errors="replace") if random.randrange(8) == 0 else text


ODD_LINES = (
    *("a: &a [*a]", "<<: *a", "b: &b {c: *b}", "? [1, 2]\n: 3", "- 1", "---", "...", "%YAML 1.1", "%TAG ! tag:x,2000:"),
    *("d: !!python/object/apply:os.system ['true']", "e: !!binary aGk=", "f: !!timestamp 2026-02-30", "g: !!set {a}"),
    *("h: 010", "i: 0o777", "j: 12:30:45", "k: 2026-02-30", "l: 1_000", "m: yes", "n: " + "9" * 6000, "o: .inf"),
    *("p: " + "[" * 3000, "q: " + "{a: " * 3000, "\tx: 1", "train: {steps: 1, steps: 2}", "use: [a, b]", "use: 3"),
    *("use: /dev/zero", "use: [" + "model/tiny, " * 700 + "]", "use: c", "use: ../../etc/passwd", "model.stack: 1"),
    *("plugins: ['']", "plugins: ['.']", "plugins: ['..x']", "plugins: [no.such]", "plugins: 3", "plugins: [3]"),
    *("r: |\n  text", "s: >-\n text", "t: 'open", 'u: "\\ud800"', "v: \x07", "w: *undefined", "key " * 300 + ": 1"),
)
