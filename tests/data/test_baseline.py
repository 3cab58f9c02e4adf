"""The order-2 byte model against its definition, counted slowly."""

import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from xscale.data import baseline
from xscale.data.baseline import order2_bits_per_byte
from xscale.evaluate import evaluate
from xscale.evaluate.evaluate import order2_baseline


def slow(train: list[bytes], validation: list[bytes]) -> float:
    grams: Counter[bytes] = Counter()
    for document in train:
        padded = b"\0\0" + document
        grams.update(padded[at : at + 3] for at in range(len(document)))
    total = sum(grams.values())
    bits, size = 0.0, 0
    for document in validation:
        padded = b"\0\0" + document
        for at in range(len(document)):
            *context, byte = padded[at : at + 3]
            chance = (sum(count for gram, count in grams.items() if gram[2] == byte) + 1) / (total + 256)
            for length in (1, 2):
                tail = bytes(context[2 - length :])
                after = Counter[int]()
                for gram, count in grams.items():
                    if gram[2 - length : 2] == tail:
                        after[gram[2]] += count
                if after:
                    chance = (after[byte] + len(after) * chance) / (after.total() + len(after))
            bits -= math.log2(chance)
            size += 1
    return bits / size


def test_it_is_what_it_says() -> None:
    draw = random.Random(0)
    documents = [bytes(draw.choices(b"abc\n", [5, 2, 2, 1], k=draw.randint(1, 30))) for _ in range(12)]
    validation = [*documents[9:], b"xab", b""]
    wanted = slow(documents[:9], validation)
    assert order2_bits_per_byte(documents[:9], validation) == pytest.approx(wanted, rel=1e-12)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [b"abcabd", b"abd", b"", b"bbbb"] * 3
    whole = order2_bits_per_byte(iter(documents), iter(documents))
    monkeypatch.setattr(baseline, "BLOCK", 8)
    assert order2_bits_per_byte(iter(documents), iter(documents)) == pytest.approx(whole, rel=1e-12)


def test_it_learns_what_there_is_to_learn() -> None:
    draw = random.Random(1)
    noise = [bytes(draw.choices(range(16), k=size)) for size in (200_000, 20_000)]
    assert order2_bits_per_byte(noise[:1], noise[1:]) == pytest.approx(4, abs=0.05)
    assert order2_bits_per_byte([b"ab" * 5000], [b"ab" * 500]) < 0.05


def test_a_run_reads_the_first_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole documents up to the bound, over the parts of a blend."""
    documents = [bytes([97 + index % 3]) * 10 for index in range(9)]

    def split(*texts: bytes) -> SimpleNamespace:
        return SimpleNamespace(texts=lambda tokenizer: iter(texts))

    parts = [SimpleNamespace(train=split(*documents[:2]), validation=split(b"abc"))]
    parts.append(SimpleNamespace(train=split(*documents[2:]), validation=None))
    corpus: Any = SimpleNamespace(sets=parts, tokenizer=None, pairs=False)
    assert order2_baseline(corpus) == order2_bits_per_byte(documents, [b"abc"])
    monkeypatch.setattr(evaluate, "BASELINE_BYTES", 35)
    assert order2_baseline(corpus) == order2_bits_per_byte(documents[:4], [b"abc"])
    assert order2_baseline(corpus) != order2_bits_per_byte(documents, [b"abc"])
