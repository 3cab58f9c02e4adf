"""TinyBERT's augmentation against the algorithm of its paper in literal loops; the masked model is arithmetic."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from xscale.data.tokenizer.huggingface import FILE, HuggingFace
from xscale_tinybert.augment import Augmentation, Augmenter, MaskedWord, ModelInput, NumberedText
from xscale_tinybert.word_vectors import WordVectors
from xscale_tinybert.words import WORD, WordText, WordVocabulary

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "a", "dog", "cat", "fox", "sees", "likes", "red", "blue", "quick", "runs", "and", "of", "old"]
SUFFIXES = ["##s", "##ly", "##ing"]
VOCABULARY = [*SPECIAL, *WORDS, *SUFFIXES, ",", ".", "'"]
CLS, SEP, MASK = 2, 3, 4
VECTORS = {
    "quickly": [1.0, 0.1, 0.0],
    "slowly": [0.9, 0.2, 0.1],
    "dogs": [0.0, 1.0, 0.2],
    "cats": [0.1, 2.0, 0.3],
    "foxes": [0.0, 0.7, 0.5],
    "fast": [3.0, 0.0, -0.1],
    "nothing": [0.0, 0.0, 0.0],
}
TEXTS = [
    "The quick dog, the old fox and quickly a cat.",
    "dogs sees unseen",
    "",
    "red",
    "the cat likes the dog and the dog likes the cats",
]


def word_pieces(folder: Path) -> HuggingFace:
    """A tokenizer as BERT's, of lower case, whose words are in this file."""
    made = Library(models.WordPiece(vocab={piece: row for row, piece in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / FILE))
    names = {"eos": "[SEP]", "bos": "[CLS]", "pad": "[PAD]", "mask": "[MASK]"}
    config = HuggingFace.Config(vocabulary=320, file=str(folder / FILE), **names)
    return HuggingFace(config, folder)


def vectors() -> WordVectors:
    return WordVectors(list(VECTORS), np.array(list(VECTORS.values()), dtype=np.float32))


def score(ids: Sequence[int], position: int, token: int) -> float:
    """A logit that depends on all tokens and the position."""
    total = sum((place + 3) * (identity + 1) for place, identity in enumerate(ids))
    return float(np.sin(total * (token + 1) + position))


def fill_masks(words: Sequence[MaskedWord], count: int) -> list[list[int]]:
    answers = []
    for word in words:
        assert word.ids[word.position] == MASK
        assert MASK not in word.ids[: word.position] + word.ids[word.position + 1 :]
        ranked = sorted(word.allowed.tolist(), key=lambda token: -score(word.ids, word.position, token))
        answers.append(sorted(ranked[:count]))
    return answers


def augmenter(folder: Path, settings: Augmentation, window: int = 64, **fields: Any) -> Augmenter:
    fields = {"vectors": vectors(), "fill_masks": fill_masks, **fields}
    return Augmenter(word_pieces(folder), ModelInput((CLS,), MASK, (SEP,), window), settings=settings, **fields)


def pieces_of(word: str) -> list[str]:
    """Greedy longest pieces, as WordPiece has them."""
    pieces, rest_of_word = [], word.lower()
    while rest_of_word:
        marked = "##" if pieces else ""
        lengths = [size for size in range(len(rest_of_word), 0, -1) if marked + rest_of_word[:size] in VOCABULARY]
        if not lengths:
            return ["[UNK]"]
        pieces.append(marked + rest_of_word[: lengths[0]])
        rest_of_word = rest_of_word[lengths[0] :]
    return pieces


def cosine(one: list[float], other: list[float]) -> float:
    norms = sum(value * value for value in one) ** 0.5 * sum(value * value for value in other) ** 0.5
    return sum(a * b for a, b in zip(one, other, strict=True)) / norms if norms else 0.0


Logits = Callable[[list[int], int], Sequence[float]]
"""Ids that a masked model reads, and a position -> its logits of all tokens there."""


def arithmetic(ids: list[int], position: int) -> list[float]:
    return [score(ids, position, token) for token in range(len(VOCABULARY))]


def algorithm_1(
    text: str, example: int, number: int, settings: Augmentation, logits_of: Logits = arithmetic
) -> list[str]:
    """Algorithm 1 of Jiao et al. 2020, a line each; the text's words are separated by single spaces, and by commas."""
    new_texts = []
    tokens = text.replace(",", " ,").replace(".", " .").split()
    places = [place for place, token in enumerate(tokens) if token not in ",."]
    for copy in range(settings.copies):
        x_m = list(tokens)
        draws = np.random.default_rng([settings.seed, example, number, copy]).random((len(places), 2))
        for (p, choice), i in zip(draws, places, strict=True):
            pieces = pieces_of(tokens[i])
            if len(pieces) == 1 and pieces != ["[UNK]"]:
                context = list(tokens if settings.context == "original" else x_m)
                context[i] = "[MASK]"
                ids = [VOCABULARY.index(piece) for token in context for piece in masked_pieces(token)]
                before = [piece for token in context[:i] for piece in masked_pieces(token)]
                known = [VOCABULARY.index(word) for word in WORDS]
                logits = logits_of([CLS, *ids, SEP], 1 + len(before))
                likely = sorted(known, key=lambda token: -logits[token])[: settings.candidates]
                candidates = [VOCABULARY[token] for token in sorted(likely)]
            elif tokens[i] in VECTORS:
                known_words = [word for word in VECTORS if word != tokens[i]]
                near = sorted(known_words, key=lambda word: -cosine(VECTORS[word], VECTORS[tokens[i]]))
                candidates = [word for word in VECTORS if word in near[: settings.candidates]]
            else:
                candidates = [tokens[i]]
            if p <= settings.probability:
                x_m[i] = candidates[int(choice * len(candidates))]
        new_texts.append(" ".join(x_m).replace(" ,", ",").replace(" .", "."))
    return new_texts


def masked_pieces(token: str) -> list[str]:
    return [token] if token in ("[MASK]", ",", ".") else pieces_of(token)


@pytest.mark.parametrize("context", ["augmented", "original"])
@pytest.mark.parametrize(("probability", "candidates"), [(0.4, 3), (1.0, 1), (0.7, 200)])
def test_it_is_algorithm_1(tmp_path: Path, context: Any, probability: float, candidates: int) -> None:
    settings = Augmentation(5, probability, candidates, seed=3, context=context)
    texts = [NumberedText(7 + row, row % 2, text) for row, text in enumerate(TEXTS)]
    expected = [algorithm_1(item.text, item.example, item.number, settings) for item in texts]
    assert augmenter(tmp_path, settings).augment(texts) == expected
    assert len({text for row in expected for text in row}) >= (5 if candidates == 1 else 12)


def test_new_texts_do_not_depend_on_what_is_augmented_together(tmp_path: Path) -> None:
    settings = Augmentation(copies=4, candidates=3)
    texts = [NumberedText(row, 0, text) for row, text in enumerate(TEXTS)]
    together = augmenter(tmp_path, settings).augment(texts)
    assert [augmenter(tmp_path, settings).augment([item])[0] for item in reversed(texts)] == together[::-1]
    more = augmenter(tmp_path, Augmentation(copies=6, candidates=3)).augment(texts)
    assert [row[:4] for row in more] == together
    other_seed = augmenter(tmp_path, Augmentation(copies=4, candidates=3, seed=1)).augment(texts)
    assert other_seed[0] != together[0]


def test_words_are_counted_by_what_replaces_them(tmp_path: Path) -> None:
    settings = Augmentation(copies=2, probability=1.0)
    text = [NumberedText(0, 0, "quickly the unseen dog")]
    with_vectors, without = augmenter(tmp_path, settings), augmenter(tmp_path, settings, vectors=None)
    with_vectors.augment(text)
    (row,) = without.augment(text)
    assert vars(with_vectors.counts) == {"kept": 0, "by_model": 4, "by_vectors": 2, "without_vector": 2}
    assert vars(without.counts) == {"kept": 0, "by_model": 4, "by_vectors": 0, "without_vector": 4}
    assert all(new.split()[0] == "quickly" and new.split()[2] == "unseen" for new in row)


def test_equal_queries_are_computed_once(tmp_path: Path) -> None:
    queries: list[MaskedWord] = []

    def counting(words: Sequence[MaskedWord], count: int) -> list[list[int]]:
        queries.extend(words)
        return fill_masks(words, count)

    settings = Augmentation(copies=9, probability=1.0, context="original")
    augmenter(tmp_path, settings, fill_masks=counting).augment([NumberedText(0, 0, "the dog runs")])
    assert len(queries) == 3


@pytest.mark.parametrize(
    ("index", "expected"),
    [(0, ((2, 4, 11, 12), 1)), (3, ((11, 12, 4, 14), 2)), (5, ((13, 14, 4, 3), 2))],
)
def test_a_long_text_is_read_around_the_masked_token(index: int, expected: tuple[tuple[int, ...], int]) -> None:
    ids = [10, 11, 12, 13, 14, 15]
    assert ModelInput((CLS,), MASK, (SEP,), 4).masked(ids, index) == expected
    assert ModelInput((CLS,), MASK, (SEP,), 8).masked(ids, index)[0][index + 1] == MASK


def test_words_and_gaps_are_the_text() -> None:
    for text in ["", "a", " Don't  stop, it’s «fine»_x!", "snake_case 3.14 naïve 'quoted'"]:
        words = WordText.split(text)
        assert str(words) == text
        assert [text[slice(*words.span(index))] for index in range(len(words.words))] == words.words
    assert WordText.split("Don't stop_it 'now'").words == ["Don't", "stop", "it", "now"]
    assert WORD.fullmatch("##s") is None


def test_only_tokens_of_the_same_form_are_allowed(tmp_path: Path) -> None:
    """Byte-level BPE has words with a space before them, and without, which would continue a word."""
    pieces = [*map(chr, range(ord("a"), ord("z") + 1)), "Ġ", "red", "Ġred", "Ġblue", "ing", "Ġ,"]
    made = Library(models.BPE(vocab={piece: row for row, piece in enumerate([*pieces, "</s>"])}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    made.save(str(tmp_path / FILE))
    vocabulary = WordVocabulary(HuggingFace(HuggingFace.Config(vocabulary=300, file=str(tmp_path / FILE)), tmp_path))
    of_blue = [pieces[token] for token in vocabulary.forms[pieces.index("Ġblue")].tolist()]
    assert of_blue == ["Ġred", "Ġblue"]
    assert {"red", "ing", "a"} <= {pieces[token] for token in vocabulary.forms[pieces.index("red")].tolist()}
    assert vocabulary.words[pieces.index("Ġred")] == "red"
    assert pieces.index("Ġ,") not in vocabulary.forms
    assert pieces.index("Ġ") not in vocabulary.forms


def test_the_tokenizer_is_the_one_of_the_reference(tmp_path: Path) -> None:
    tokenizer = word_pieces(tmp_path)
    for word in ["quickly", "the", "dogs", "unseen", "Dog"]:
        assert [tokenizer.piece(token) for token in tokenizer.encode(word)] == pieces_of(word)
    assert json.loads((tmp_path / FILE).read_text())["model"]["type"] == "WordPiece"
