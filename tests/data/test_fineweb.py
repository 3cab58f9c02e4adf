"""The recipe `fineweb` on a small Parquet folder with FineWeb's columns, and a mixture of two such folders."""

from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny import ROOT, losses
from xscale.core.errors import EXIT_DONE
from xscale.data.corpus.prepare import prepare
from xscale.measure.flops import size
from xscale.planning import vocabulary_of
from xscale.recipe import Recipe, read
from xscale.settings.settings import build_on_meta
from xscale.train.run import train

pyarrow: Any = pytest.importorskip("pyarrow")
RECIPE = ROOT / "configs/run/fineweb.yaml"
SMALL = [
    *("model.width=32", "model.stack.depth=1", "model.stack.block.mixer.heads=2", "model.stack.block.ffn.hidden=48"),
    *("data.sequence_length=32", "data.validation=0.2", "data.workers=1", "parallel.compile=false", "run.device=cpu"),
    *(
        "data.tokenizer.vocabulary=384",
        "precision.compute=float32",
        "schedule.warmup_steps=1",
        "checkpoint.every_steps=0",
    ),
    *(
        "train.steps=3",
        "train.batch_size=4",
        "train.micro_batch_size=2",
        "train.eval_every=3",
        "train.eval_sequences=4",
    ),
    *("train.baseline=false", "train.sample.tokens=3", "observe.progress=false"),
]


def write_texts(folder: Path, texts: list[str]) -> None:
    """Write a Parquet file with the columns of FineWeb."""
    import pyarrow.parquet

    rows = range(len(texts))
    columns = {
        "text": texts,
        "id": [f"<urn:uuid:{row}>" for row in rows],
        "dump": ["CC-MAIN-2024-10"] * len(texts),
        "url": [f"https://example.org/{row}" for row in rows],
        "file_path": ["s3://commoncrawl/a.warc.gz"] * len(texts),
        "language": ["en"] * len(texts),
        "language_score": [0.9] * len(texts),
        "token_count": [len(text.split()) for text in texts],
    }
    folder.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "000_00000.parquet", row_group_size=7)


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the recipe's heading downloads, small: documents, and a tokenizer like that of GPT-2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [f"Document {number} is about {'a web page ' * (number % 7 + 1)}and its end." for number in range(40)]
    write_texts(tmp_path / "fineweb" / "sample" / "10BT", texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<|endoftext|>"]}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, show_progress=False, **options))
    (tmp_path / "gpt2").mkdir()
    tokenizer.save(str(tmp_path / "gpt2" / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(*overrides: str) -> Recipe:
    return read(RECIPE, [*SMALL, *overrides])[0]


def test_the_recipe_has_the_size_of_gpt2() -> None:
    recipe = read(RECIPE, [])[0]
    assert size(build_on_meta(recipe, vocabulary_of(recipe))).parameters == 123_587_328
    assert recipe.train.batch_size * recipe.data.sequence_length == 2**19
    assert recipe.objective.kind == "causal"
    assert not recipe.check()


def test_it_trains_on_parquet_files_of_its_columns(downloaded: Path) -> None:
    recipe = small()
    assert not recipe.check()
    assert train(recipe) == EXIT_DONE
    assert len(losses(downloaded, "runs/fineweb")) == 3
    (folder,) = (downloaded / "work/data").glob("parquet-huggingface-*")
    from xscale.data.corpus.manifest import DatasetManifest

    counts = DatasetManifest.load(folder / "manifest.json").counts
    assert counts["train"].documents + counts["validation"].documents == 40


def test_a_mixture_of_two_prepared_folders(downloaded: Path) -> None:
    write_texts(downloaded / "code", [f"def f{number}(x):\n    return x + {number}\n" * 3 for number in range(30)])
    folders = [
        prepare(small(*changes).data).path
        for changes in (["data.folder=web"], ["data.source.paths=[code]", "data.folder=code_ids"])
    ]
    blend = ", ".join(
        f"{{prepared: {folder}, weight: {weight}}}" for folder, weight in zip(folders, (0.9, 0.1), strict=True)
    )
    recipe = small(f"data.blend=[{blend}]")
    assert not recipe.check()
    assert train(recipe) == EXIT_DONE
    assert len(losses(downloaded, "runs/fineweb")) == 3
