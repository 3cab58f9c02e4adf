"""A dense run becomes a run with mixtures by the command line, with the same loss, and training goes on from there."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.train.tiny import losses, metrics, recipe, run
from xscale.cli.main import app
from xscale.core.errors import ConfigError

DENSE = {
    "kind": "decoder",
    "width": 32,
    "stack": {
        "depth": 2,
        "block": {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "gated", "hidden": 48}},
    },
}
GRANULAR = (
    "model.stack.block.ffn={kind: moe, experts: 6, router: {kind: topk, top_k: 4}, expert: {kind: gated, hidden: 24}}"
)
SWITCH = (
    "model.stack.rules=[{every: 2, at: 1, ffn: {kind: moe, experts: 4, router: switch, "
    "expert: {kind: gated, hidden: 48}}}]"
)


def call(*words: object) -> str:
    found = CliRunner().invoke(app, ["checkpoint", "upcycle", *map(str, words)])
    if isinstance(found.exception, ConfigError):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.output


def said(output: str) -> tuple[float, float]:
    """The two losses."""
    (line,) = [line for line in output.splitlines() if line.startswith("validation loss")]
    words = line.split()
    return float(words[words.index("dense") - 1]), float(words[words.index("as") - 1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a dense run."""
    made = tmp_path_factory.mktemp("upcycling")
    assert run(recipe(made, "dense", model=DENSE, train={"steps": 40})) == 0
    return made


@pytest.mark.long
def test_the_loss_continues_from_the_dense_models(folder: Path) -> None:
    output = call(folder / "dense", folder / "grown", GRANULAR)
    before, after = said(output)
    assert abs(before - after) < 1e-5, output
    assert "changes" not in output
    grown = recipe(folder, "grown", model=_model(folder / "grown"), train={"steps": 6})
    assert run(grown) == 0
    began, dense = losses(folder, "grown"), losses(folder, "dense")
    assert began[0] < dense[0] - 0.5, "it began from scratch"
    assert any("stack.blocks.0.ffn.part/load" in line for line in metrics(folder, "grown"))


def test_a_changed_output_is_explained(folder: Path) -> None:
    output = call(folder / "dense", folder / "switch", SWITCH)
    before, after = said(output)
    assert before != after, "the other way to be wrong: a loss that is not the new model's"
    assert "stack.blocks.1.ffn.part: its output changes, because the router switch" in output


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.stack.depth=2", "turn no dense ffn of that run into a mixture"),
        (GRANULAR.replace("hidden: 24", "hidden: 20"), "cannot be made of a dense ffn"),
        (GRANULAR.replace("top_k: 4", "top_k: 9"), "top_k"),
        (GRANULAR.replace("kind: gated", "kind: dense"), "ffn.part.gate.weight: the mixture does not use"),
        (f"{GRANULAR} model.stack.depth=1", "blocks.1.* the mixture does not use"),
        (f"{GRANULAR} model.width=64", "cannot be made"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call(folder / "dense", folder / "refused", *(f"model.{one}" for one in override.split("model.")[1:]))
    assert not (folder / "refused").exists(), "half a run was left behind"


def test_a_run_is_not_written_over(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the folder already contains a run"):
        call(folder / "dense", folder / "dense", GRANULAR)


def _model(run_folder: Path) -> dict[str, object]:
    from xscale.run.run_folder import read_config

    config = read_config(run_folder)
    assert config is not None
    model: dict[str, object] = config["model"]
    return model
