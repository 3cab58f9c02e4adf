"""Output of `inspect`: counts, lengths, decoded documents."""

from pathlib import Path

from tests.data.corpora import text_config
from xscale.data.corpus.histogram import bars, length_rows
from xscale.data.corpus.inspect import inspect
from xscale.data.corpus.prepare import prepare


def test_a_summary_says_what_there_is(tmp_path: Path) -> None:
    import numpy as np

    config = text_config(tmp_path)
    ready = prepare(config, processes=1, progress=False)
    assert ready.manifest is not None
    text = inspect(config, documents=2)
    for counts in ready.manifest.counts.values():
        assert f"{counts.documents:,} documents, {counts.tokens:,} tokens, {counts.bytes:,} bytes" in text
    assert "byte, 384 ids, fingerprint byte-100" in text
    assert text.count("--- document") == 2
    assert next(ready.train.texts(ready.tokenizer)).decode()[:400] in text
    everything = inspect(config, documents=99)
    assert all(one.decode()[:50] in everything for one in ready.train.texts(ready.tokenizer))
    assert "kind text" in text
    pair = inspect(config.model_copy(update={"prepared": str(ready.path / "train")}), documents=0)
    assert "--- document" not in pair
    lengths = np.diff(ready.train.starts)
    assert f"median {np.median(lengths):,.0f}, mean {lengths.mean():,.0f}, longest {lengths.max():,}" in text
    assert "\n".join(bars(length_rows(lengths))) in text


def test_the_histogram_counts_powers_of_two() -> None:
    import numpy as np

    rows = length_rows(np.array([1, 2, 3, 3, 9, 1000]))
    assert rows[:4] == [(1, 1, 1), (2, 3, 3), (4, 7, 0), (8, 15, 1)]
    assert len(rows) == 10
    assert rows[-1] == (512, 1023, 1)
    assert [line.split() for line in bars(rows[:3])] == [
        ["1", "-", "1", "1", "#" * 13],
        ["2", "-", "3", "3", "#" * 40],
        ["4", "-", "7", "0"],
    ]
    assert length_rows(np.array([0, 0, 1])) == [(0, 0, 2), (1, 1, 1)]
    assert length_rows(np.array([], dtype=np.int64)) == bars([]) == []
