"""BLEU of a run on pairs: that of sacrebleu on what beam search writes, and the BLEU of copying the source."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_load_run import call
from tests.train.test_pairs import asked, pairs_file
from tests.train.tiny import recipe, run
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.train.load_run import generate_text

sacrebleu = pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")


def rows_of(file: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


@pytest.mark.long
def test_it_is_that_of_what_beam_search_writes(tmp_path: Path) -> None:
    assert run(asked(tmp_path, train={"steps": 4}, data={"validation": 0.0})) == EXIT_DONE
    file = pairs_file(tmp_path)
    result: dict[str, Any] = json.loads(
        call("eval", tmp_path / "run", "--bleu", "--beams", 2, "--data", file, "--sequences", 5)
    )
    rows = rows_of(file)[2:5]
    written = [generate_text(tmp_path / "run", row["code"], 12, 0.0, None, 0, beams=2) for row in rows]
    first = rows_of(file)[:2]
    cut = [generate_text(tmp_path / "run", row["code"][:19], 12, 0.0, None, 0, beams=2) for row in first]
    references = [[row["doc"] for row in first + rows]]
    assert result["bleu"] == pytest.approx(sacrebleu.corpus_bleu(cut + written, references).score)
    copied = [row["code"] for row in first + rows]
    assert result["source_bleu"] == pytest.approx(sacrebleu.corpus_bleu(copied, references).score)
    assert (result["step"], result["pairs"]) == (4, 5)
    assert result["signature"].startswith("nrefs:1|case:mixed")


def test_what_has_no_bleu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--beams: it is that of the search for BLEU"):
        call("eval", tmp_path, "--beams", 2)
    assert run(recipe(tmp_path, train={"steps": 1})) == EXIT_DONE
    with pytest.raises(ConfigError, match=r"--bleu: the objective causal has no pairs"):
        call("eval", tmp_path / "run", "--bleu")
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(
        ConfigError, match=r"sacrebleu, which is not installed. Install it: pip install 'xscale\[bleu\]'"
    ):
        call("eval", tmp_path / "run", "--bleu")
