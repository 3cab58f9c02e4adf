"""Runs whose vocabulary is padded: the numbers of a run without padding, on one process and with its rows over tp."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from tests.distributed import Pool
from tests.train.tiny import MIXTURE, metrics, recipe, run
from xscale.checkpoint.load import unpadded_vocabulary_of
from xscale.commands.checkpoints.import_hf import import_run
from xscale.convert.hf.export_model import export_model
from xscale.core.errors import EXIT_DONE
from xscale.generate.generate_text import generate_text
from xscale.planning import vocabulary_of
from xscale.run.load_run import load_run
from xscale.text_model import TextModel

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
DOUBLE = {"compute": "float64", "master": "float64"}
DENSE = {"kind": "decoder", "width": 16, "stack": {"depth": 2, "block": {"ffn": {"kind": "dense"}}}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing and z-loss": {"objective": {"kind": "causal", "label_smoothing": 0.1, "z_loss_weight": 0.1}},
    "untied with a soft cap": {"model": {**DENSE, "tied": False, "logit_soft_cap": 5.0}},
    "multi-token prediction": {"model": {**DENSE, "mtp": {"depth": 1, "loss_weight": 0.5}}},
    "exits": {"model": {**DENSE, "stack": {"depth": 2, "exits": {"blocks": [0]}}}},
    "distilled": {"distill": {"soft_weight": 0.5, "train_teacher": {"train": {"steps": 1}}}},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp=2, one rank without tokens": (2, {"mesh": {"tp": 2}}),
    "tp=4 with sequence parallelism": (4, {"mesh": {"tp": 4}, "tensor": {"sequence": True}}),
    "pp=2": (2, {"mesh": {"pp": 2}}),
    "ZeRO-3": (2, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}),
}


def letters_recipe(folder: Path, name: str, vocabulary: int | None, **sections: Any) -> Any:
    """A recipe on words of 20 letters: 23 tokens, in as many rows as `vocabulary` says."""
    file = folder / "tokenizer.json"
    if not file.exists():
        ids = {token: index for index, token in enumerate(["<pad>", "</s>", "<unk>", *LETTERS])}
        tokenizer = tokenizers.Tokenizer(WordLevel(ids, unk_token="<unk>"))
        tokenizer.pre_tokenizer = Split("", "isolated")
        tokenizer.save(str(file))
        words = "".join(LETTERS[index * index % 19] for index in range(4000))
        (folder / "text.txt").write_text("\n".join(words[start : start + 80] for start in range(0, 4000, 80)))
    data = {
        "tokenizer": {"kind": "huggingface", "file": str(file), "vocabulary": vocabulary},
        "source": {"kind": "text", "paths": [str(folder / "text.txt")], "document": "line"},
    }
    return recipe(folder, name, **{"model": DENSE, "data": data, "precision": DOUBLE, **sections})


def numbers(folder: Path, name: str) -> list[float]:
    rows = metrics(folder, name)
    return [row[key] for row in rows for key in ("loss", "grad_norm", "eval_loss") if key in row]


def train_letters(folder: Path, name: str, vocabulary: int | None, sections: dict[str, Any]) -> int:
    return run(letters_recipe(folder, name, vocabulary, **sections))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_first_loss_is_that_of_the_tokens(case: str, tmp_path: Path) -> None:
    """Compare 23 tokens in 64 rows and in 23: ln 23 at the start, to which the initial weights add little."""
    first = {}
    sections = {**CASES[case], "train": {"steps": 1}}
    for vocabulary in (64, None):
        assert train_letters(tmp_path, f"of {vocabulary}", vocabulary, sections) == EXIT_DONE
        first[vocabulary] = numbers(tmp_path, f"of {vocabulary}")[0]
    assert first[64] == pytest.approx(first[None], rel=0.02)
    if case == "plain":
        assert first[64] == pytest.approx(math.log(23), rel=0.02)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=() if (case, layout) in [("plain", next(iter(LAYOUTS)))] else pytest.mark.long)
        for case in CASES
        for layout in LAYOUTS
    ],
)
def test_a_layout_has_the_numbers_of_one_process(case: str, layout: str, tmp_path: Path, pool: Pool) -> None:
    sections = {**CASES[case], "train": {"steps": 2, "eval_every": 2}}
    ranks, parallel = LAYOUTS[layout]
    assert train_letters(tmp_path, "single", 64, sections) == EXIT_DONE
    done = pool.run(train_letters, ranks, tmp_path, "several", 64, {**sections, "parallel": parallel})
    assert done == [EXIT_DONE] * ranks
    assert numbers(tmp_path, "several") == pytest.approx(numbers(tmp_path, "single"), rel=1e-9)


def test_generation_draws_no_padding(tmp_path: Path) -> None:
    """Draw from 23 tokens in 2048 rows with all weights at 0: nearly every draw would be padding."""
    sections = {"train": {"steps": 1}, "model": {**DENSE, "init_std": 0.0}}
    assert train_letters(tmp_path, "run", 2048, sections) == EXIT_DONE
    text = generate_text(tmp_path / "run", "ACD", 20, 1.0, None, seed=1).replace(" ", "")
    for name in ("<pad>", "<unk>"):  # words of this file, and no special tokens
        text = text.replace(name, LETTERS[0])
    assert len(text) > 3 + 10
    assert set(text) <= set(LETTERS)


def test_the_plan_has_the_rows_of_the_model(tmp_path: Path) -> None:
    """105 special tokens and 256 bytes in a multiple of 64 rows."""
    settings = recipe(tmp_path, model=MIXTURE, train={"steps": 1})
    assert vocabulary_of(settings) == 384
    assert run(settings) == EXIT_DONE
    loaded = load_run(tmp_path / "run")
    assert (loaded.tokenizer.vocabulary, loaded.tokenizer.unpadded_vocabulary) == (384, 361)
    assert len(dict(loaded.model.named_parameters())["embed.table.weight"]) == 384


BLOCK = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "gated", "hidden": 48}}
LLAMA = {"kind": "decoder", "width": 32, "tied": False, "stack": {"depth": 1, "block": BLOCK}}


def test_an_export_has_the_rows_of_tokens_and_comes_back(tmp_path: Path) -> None:
    assert run(recipe(tmp_path, model=LLAMA, train={"steps": 1})) == EXIT_DONE
    assert export_model(tmp_path / "run", tmp_path / "hf", say=lambda _: None) == EXIT_DONE
    assert json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"] == 361
    assert import_run(tmp_path / "hf", tmp_path / "back", None, [], say=lambda _: None) == EXIT_DONE
    loaded = load_run(tmp_path / "back")
    assert (loaded.tokenizer.vocabulary, loaded.unpadded_vocabulary) == (384, 361)
    ids = torch.arange(20)[None]
    first, second = (TextModel.loaded(tmp_path / name)(ids).float() for name in ("run", "back"))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_a_run_of_before_keeps_its_softmax(tmp_path: Path) -> None:
    """Its checkpoints do not say how many rows are tokens: all have a probability, resumed and loaded."""
    assert train_letters(tmp_path, "run", 64, {"train": {"steps": 2}, "checkpoint": {"every_steps": 1}}) == EXIT_DONE
    assert load_run(tmp_path / "run").unpadded_vocabulary == 23
    assert unpadded_vocabulary_of({}, 64) == unpadded_vocabulary_of({"unpadded_vocabulary": None}, 64) == 64
    assert unpadded_vocabulary_of({"unpadded_vocabulary": "x"}, 64) == 64
    assert unpadded_vocabulary_of({"unpadded_vocabulary": 23}, 64) == 23
