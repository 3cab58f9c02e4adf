"""BLEU of a run on pairs: that of sacrebleu on what beam search writes, and the BLEU of copying the source."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from tests.train.test_load_run import call
from tests.train.test_pairs import asked, pairs_file
from tests.train.tiny import recipe, run
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.evaluate import bleu
from xscale.generate.generate_text import generate_text


def test_corpus_bleu_is_that_of_sacrebleu() -> None:
    hypotheses = ["the cat is on the mat", "there is a dog in the garden today"]
    references = ["the cat sat on the mat", "there is a dog in the garden"]
    score, signature = bleu.corpus_bleu(hypotheses, references)
    assert score == sacrebleu.corpus_bleu(hypotheses, [references]).score > 50
    assert signature.startswith("nrefs:1|case:mixed")


@pytest.mark.long
def test_texts_are_those_that_beam_search_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # After four steps of this rate the likeliest texts are short, and the likeliest of a length are not.
    optimizer = {"kind": "adamw", "lr": 0.01}
    assert run(asked(tmp_path, train={"steps": 4}, data={"validation": 0.0}, optimizer=optimizer)) == EXIT_DONE
    file = pairs_file(tmp_path)
    compared: list[tuple[list[str], list[str]]] = []

    def corpus_bleu(hypotheses: list[str], references: list[str]) -> tuple[float, str]:
        compared.append((hypotheses, references))
        return float(len(compared)), "signature"

    monkeypatch.setattr(bleu, "corpus_bleu", corpus_bleu)
    output = call(
        "eval", tmp_path / "run", "--bleu", "--beams", 2, "--length-penalty", 2, "--data", file, "--sequences", 5
    )
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert result == {"step": 4, "pairs": 5, "bleu": 2.0, "source_bleu": 3.0, "signature": "signature"}
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()][:5]
    # The first two sources are truncated before their end.
    prompts = [row["code"][:19] for row in rows]
    references = [row["doc"] for row in rows]

    def searched(penalty: float) -> list[str]:
        return [
            generate_text(tmp_path / "run", prompt, 12, 0.0, None, 0, beams=2, length_penalty=penalty)
            for prompt in prompts
        ]

    written, by_default = searched(2), searched(0.6)
    assert compared[1:] == [(written, references), ([row["code"] for row in rows], references)]
    assert all(len(text) > len(short) for text, short in zip(written, by_default, strict=True)), by_default


def test_what_has_no_bleu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option, value in (("--beams", 2), ("--length-penalty", 0), ("--penalty-form", "power")):
        with pytest.raises(ConfigError, match=rf"{option}: it is that of the search for BLEU"):
            call("eval", tmp_path, option, value)
    assert run(recipe(tmp_path, train={"steps": 1})) == EXIT_DONE
    with pytest.raises(ConfigError, match=r"--bleu: the objective causal has no pairs"):
        call("eval", tmp_path / "run", "--bleu")
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(
        ConfigError, match=r"sacrebleu, which is not installed. Install it: pip install 'sacrebleu>=2.4'"
    ):
        call("eval", tmp_path / "run", "--bleu")
