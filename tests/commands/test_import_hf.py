"""A run, exported and imported again by the command line: it can be evaluated, gone on with, and written with."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.train.tiny import recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.cli.main import app, main
from xscale.core.errors import ConfigError
from xscale.evaluate.evaluate_run import evaluate_run
from xscale.generate.generate_text import generate_text

MODEL = {
    "kind": "decoder",
    "width": 32,
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2},
            "ffn": {"kind": "moe", "experts": 4, "expert": {"kind": "gated", "hidden": 48}},
        },
    },
}


def call(*words: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, [str(word) for word in words])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, found.output


@pytest.mark.long
def test_out_and_in_again(tmp_path: Path) -> None:
    one = recipe(tmp_path, model=MODEL)
    assert run(one) == 0
    status, said = call("checkpoint", "export", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert status == 0, said
    assert "mixtral: largest logit difference" in said
    config = tmp_path / "config.yaml"
    config.write_text((tmp_path / "run" / "config.yaml").read_text())
    again = tmp_path / "again"
    status, said = call("checkpoint", "import", tmp_path / "out", again, config, "train.steps=2", "--from", "hf")
    assert status == 0, said
    assert "step-00000000: written" in said
    before, after = (load_tensors(next(folder.glob("checkpoints/step-*"))) for folder in (tmp_path / "run", again))
    assert before.keys() == after.keys()
    names = [name for name in before if name.startswith("model.")]
    for name in names:
        # An export has no padding rows: an import makes them anew.
        rows = 361 if len(before[name]) == 384 else None
        assert torch.equal(before[name][:rows], after[name][:rows]), name
    found, wanted = evaluate_run(again, 4), evaluate_run(tmp_path / "run", 4)
    assert found["step"] == 0
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    assert generate_text(again, "def ", 4, 0.0, None, 0) == generate_text(tmp_path / "run", "def ", 4, 0.0, None, 0)
    status, said = call("train", again / "config.yaml")
    assert status == 0, said
    lines = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in lines) == 2
    with pytest.raises(ConfigError, match="already contains a run"):
        call("checkpoint", "import", tmp_path / "out", again)


def test_without_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(recipe(tmp_path, model=MODEL)) == 0
    assert call("checkpoint", "export", tmp_path / "run", tmp_path / "out")[0] == 0
    status, said = call("checkpoint", "import", tmp_path / "out", tmp_path / "plain")
    assert status == 0, said
    assert "tokenizer:" not in said
    (tmp_path / "out" / "xscale_tokenizer.json").unlink()
    status, said = call("checkpoint", "import", tmp_path / "out", tmp_path / "theirs")
    assert "tokenizer: imported, 361 ids" in said.replace("\n", " ")
    (tmp_path / "out" / "tokenizer.json").unlink()
    assert "of 361 ids" in call("checkpoint", "import", tmp_path / "out", tmp_path / "other")[1].replace("\n", " ")
    text = (tmp_path / "plain" / "config.yaml").read_text()
    assert "kind: byte" in text
    # Text is written without a corpus: nothing is tokenised, and no tokenizer trained.
    for imported in ("plain", "theirs"):
        generate_text(tmp_path / imported, "def ", 2, 0.0, None, 0)
    assert not (tmp_path / "work").exists()
    assert "sequence_length: 32" in text


def test_what_is_not_good_leaves_nothing(tmp_path: Path) -> None:
    assert run(recipe(tmp_path, model=MODEL)) == 0
    assert call("checkpoint", "export", tmp_path / "run", tmp_path / "out", "--bar=-1")[0] == 1
    assert not (tmp_path / "out").exists()
    assert call("checkpoint", "export", tmp_path / "run", tmp_path / "out")[0] == 0
    status, said = call("checkpoint", "import", tmp_path / "out", tmp_path / "again", "--bar=-1")
    assert status == 1
    assert "not written" in said
    assert not (tmp_path / "again").exists()


def test_mistakes_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["xscale", "checkpoint", "import", str(tmp_path), str(tmp_path / "run"), "--from", "onnx"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "--from: unknown format 'onnx'. Choose hf, deepspeed-universal or megatron." in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"file config.json is missing"):
        call("checkpoint", "import", tmp_path, tmp_path / "run")


@pytest.mark.long
def test_bart_out_and_in_again(tmp_path: Path) -> None:
    """Without a config the imported run has BART's objective, and writes after the end of a document, as it learned."""
    block = {
        "mixer": {"kind": "attention", "heads": 4, "bias": True},
        "ffn": {"kind": "dense", "hidden": 48, "activation": "gelu", "bias": True},
        "norm": "layer",
        "residual": "post",
    }
    stack = {"depth": 1, "block": block}
    model = {"kind": "encoder_decoder", "width": 32, "position": "learned", "embedding_norm": "layer"}
    assert (
        run(recipe(tmp_path, model=model | {"encoder": stack, "decoder": stack}, objective={"kind": "denoising"})) == 0
    )
    status, output = call("checkpoint", "export", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert status == 0, output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["decoder_start_token_id"] == 2
    again = tmp_path / "again"
    status, output = call("checkpoint", "import", tmp_path / "out", again, "--from", "hf")
    assert status == 0, output
    assert "kind: denoising" in (again / "config.yaml").read_text()
    texts = [generate_text(folder, "def ", 6, 0.0, None, 0, beams=2) for folder in (again, tmp_path / "run")]
    assert texts[0] == texts[1]
