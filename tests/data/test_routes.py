"""Files of routes: what is written is found by its text, and a file that does not fit is refused with the place."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xscale.core.errors import ConfigError
from xscale.data.routes import write
from xscale.data.routes.header import PREFIX, RouteLayout
from xscale.data.routes.read import RouteFile, pieces_of
from xscale.data.routes.write import RoutedSequence, RouteWriter, write_routes

LAYERS = ("stack.blocks.0.ffn", "stack.blocks.2.ffn")


def sequences(count: int, experts: int = 6, top_k: int = 2, seed: int = 0) -> list[tuple[Any, Any, Any]]:
    """(ids, experts, weights) of texts of several lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, count)
    return [
        (
            rng.integers(0, 50, length),
            rng.integers(0, experts, (length, len(LAYERS), top_k)),
            rng.random((length, len(LAYERS), top_k)),
        )
        for length in lengths
    ]


def written(path: Path, count: int = 30, experts: int = 6) -> list[tuple[Any, Any, Any]]:
    texts = sequences(count, experts)
    write_routes(path, texts, layers=LAYERS, experts=experts)
    return texts


@pytest.mark.parametrize(("experts", "dtype"), [(6, "uint8"), (255, "uint8"), (256, "uint16")])
def test_every_text_is_found_in_the_narrowest_integers(
    experts: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "CHUNK_TOKENS", 100)
    texts = written(tmp_path / "routes", experts=experts)
    routes = RouteFile(tmp_path / "routes")
    assert (routes.header.routes, routes.header.ids) == (dtype, "uint8")
    assert len(routes.header.chunks) > 3
    assert routes.header.tokens == sum(len(ids) for ids, _, _ in texts)
    for ids, chosen, weights in texts:
        found = routes.find(ids)
        assert found is not None
        np.testing.assert_array_equal(found[0], chosen + 1)
        assert found[1] is not None
        np.testing.assert_array_equal(found[1], weights)


def test_a_text_is_found_by_its_first_tokens_and_not_by_others(tmp_path: Path) -> None:
    texts = written(tmp_path / "routes")
    routes = RouteFile(tmp_path / "routes")
    ids, chosen, _ = max(texts, key=lambda text: len(text[0]))
    for length in (1, 3, 17, len(ids) - 1):
        found = routes.find(ids[:length])
        assert found is not None
        if length > 2:
            np.testing.assert_array_equal(found[0], chosen[:length] + 1)
    assert routes.find(ids[1:]) is None
    assert routes.find(np.array([*ids, 7])) is None
    assert routes.find(np.array([49, 0, 49, 0, 49, 0])) is None


def test_of_equal_texts_that_of_the_same_sample_is_found(tmp_path: Path) -> None:
    layout = RouteLayout(LAYERS, (4, 4), (1, 1))
    writer = RouteWriter(tmp_path / "routes", layout, 10, None)
    ids = np.array([1, 2, 3])
    for sample in range(3):
        writer.add(RoutedSequence(ids, np.full((3, 2, 1), sample + 1), None, sample, 4))
    writer.close()
    routes = RouteFile(tmp_path / "routes")
    assert [int(routes.find(ids, sample, 4)[0][0, 0, 0]) for sample in range(3)] == [1, 2, 3]  # type: ignore[index]
    assert int(routes.find(ids)[0][0, 0, 0]) == 1  # type: ignore[index]


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "routes"
    written(path)
    content = path.read_bytes()
    for size in (0, 5, PREFIX.size - 1, PREFIX.size, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        expected = "is no file of routes" if size < PREFIX.size else f"is cut short: it has {size} bytes"
        with pytest.raises(ConfigError, match=expected):
            RouteFile(path)


@pytest.mark.parametrize(
    ("at", "sentence"),
    [(0, "is no file of routes"), (8, "has version"), (40, "chunk 0 of .* is damaged"), (-5, "the header of")],
)
def test_a_damaged_file_is_refused(at: int, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "routes"
    written(path)
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        RouteFile(path)


@pytest.mark.parametrize(("stored", "where"), [(6, "to expert 5"), (0, "to no expert")])
def test_an_expert_that_is_none_of_its_layer_is_refused_with_the_place(stored: int, where: str, tmp_path: Path) -> None:
    layout = RouteLayout(LAYERS, (4, 4), (2, 2))
    writer = RouteWriter(tmp_path / "routes", layout, 10, None)
    chosen = np.ones((3, 2, 2), np.int64)
    chosen[2, 1, 0] = stored
    writer.add(RoutedSequence(np.array([1, 2, 3]), chosen))
    writer.close()
    routes = RouteFile(tmp_path / "routes")
    with pytest.raises(ConfigError, match=f"token 2 of chunk 0 {where} in layer stack.blocks.2.ffn, which has 4"):
        routes.find(np.array([1, 2, 3]))


BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "no text": (([], np.zeros((0, 2, 1))), r"sequences\[1\]: ids have the shape \[0\]"),
    "one layer": (([1, 2], np.zeros((2, 1, 1))), r"routes have the shape \[2, 1, 1\], for 2 ids and 2 layers"),
    "a token without routes": (([1, 2, 3], np.zeros((2, 2, 1))), r"for 3 ids and 2 layers"),
    "an expert beyond": (([1, 2], np.full((2, 2, 1), 6)), r"token 0 has expert 6 in layer 0, of 6 experts"),
    "no expert": (([1, 2], np.full((2, 2, 1), -1)), r"token 0 has expert -1 in layer 0"),
    "weights of another shape": (([1], np.zeros((1, 2, 1)), np.zeros((1, 2, 2))), r"weights have the shape"),
    "another top_k": (([1], np.zeros((1, 2, 2))), r"sequences differ in top_k"),
    "weights of some": (([1], np.zeros((1, 2, 1)), np.zeros((1, 2, 1))), r"some sequences have weights"),
}


@pytest.mark.parametrize("name", BAD)
def test_arrays_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    arrays, sentence = BAD[name]
    good = ([4, 5], np.zeros((2, 2, 1)))
    with pytest.raises(ConfigError, match=sentence):
        write_routes(tmp_path / "routes", [good, arrays], layers=LAYERS, experts=6)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "CHUNK_TOKENS", 1)
    writer = RouteWriter(tmp_path / "routes", RouteLayout(LAYERS, (4, 4), (1, 1)), 10, None)

    def full(content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer._file, "write", full)
    with pytest.raises(OSError, match="No space"):
        writer.add(RoutedSequence(np.array([1]), np.ones((1, 2, 1))))
    writer.abandon()
    assert not list(tmp_path.iterdir())


def test_documents_of_a_sample() -> None:
    assert pieces_of(None, 4) == [(0, 4)]
    assert pieces_of(np.array([0, 0, 1, 3, 3]), 5) == [(0, 2), (2, 3), (3, 5)]
