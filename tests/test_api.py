"""The Python interface: recipes from names, files and mappings, models on ids, runs from scripts, the notebook."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import xscale
from tests.train.tiny import recipe as tiny_recipe
from xscale.core.errors import ConfigError
from xscale.recipe import Recipe
from xscale.step.stepper import Stepper

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {
    "model": {"kind": "decoder", "width": 16, "stack": {"depth": 1}},
    "data": {"tokenizer": {"kind": "byte"}, "sequence_length": 16, "workers": 2},
    "train": {"steps": 1, "batch_size": 2, "micro_batch_size": 1, "eval_every": 0, "sample": {"prompts": []}},
    "schedule": {"kind": "constant", "warmup_steps": 0},
    "optimizer": {"kind": "adamw", "lr": 0.0, "weight_decay": 0.0},
}


def small(folder: Path, **changes: Any) -> Recipe:
    """A recipe that trains one step on a few lines, with a learning rate of 0."""
    (folder / "text").mkdir(exist_ok=True)
    for name in ("a", "b", "c"):
        (folder / "text" / f"{name}.txt").write_text(f"The file {name} has words. " * 60, encoding="utf-8")
    data = {"source": {"kind": "text", "paths": [str(folder / "text")]}, "folder": str(folder / "data")}
    config = {**SMALL, "data": {**SMALL["data"], **data, "validation": 0.0}, "run": {"dir": str(folder / "run")}}
    return xscale.load_recipe({**config, **changes})


def test_a_recipe_comes_from_a_name_a_file_or_a_mapping() -> None:
    by_name = xscale.load_recipe("quickstart", ["train.steps=7"])
    assert by_name == xscale.load_recipe(ROOT / "configs/run/quickstart.yaml", ["train.steps=7"])
    by_mapping = xscale.load_recipe({"use": ["model/switch_tiny"], "train": {"steps": 3}}, ["train.steps=7"])
    assert (by_mapping.train.steps, by_mapping.model) == (7, by_name.model)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("quickstrat", "Did you mean 'quickstart'"),
        ({"trian": {}}, "train"),
        ({"use": ["model/nothing"]}, "model/nothing"),
        ({"train": {"batch_size": 3, "micro_batch_size": 2}}, "does not divide"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        xscale.load_recipe(config)


def test_a_mapping_is_not_changed() -> None:
    config = {"use": "model/switch_tiny", "train": {"steps": 3}}
    xscale.load_recipe(config, ["train.steps=7"])
    assert config == {"use": "model/switch_tiny", "train": {"steps": 3}}


def test_a_model_starts_as_its_run_does_and_is_loaded_again(tmp_path: Path) -> None:
    recipe = small(tmp_path)
    model = xscale.build_model(recipe)
    # The learning rate is 0, so that the checkpoint has the initial weights. The second call finds the run finished.
    assert (xscale.train(recipe), xscale.train(recipe)) == (0, 0)
    for folder in (tmp_path / "run", tmp_path / "run/checkpoints/step-00000001"):
        loaded = xscale.load_model(folder)
        for name, weight in model.model.state_dict().items():
            assert torch.equal(weight, loaded.model.state_dict()[name]), name
        assert loaded.tokenizer is not None
        ids = torch.tensor([loaded.tokenizer.encode("The file")])
        assert torch.equal(loaded(ids), model(ids))
        assert loaded(ids).shape == (1, 8, loaded.tokenizer.vocabulary)
    with pytest.raises(ConfigError, match="no such checkpoint"):
        xscale.load_model(tmp_path / "run/checkpoints/step-00000009")
    with pytest.raises(ConfigError, match="contains no run"):
        xscale.load_model(tmp_path / "nothing")


def test_logits_statistics_and_loss_are_those_of_the_model() -> None:
    recipe = xscale.load_recipe("quickstart", ["model.width=16", "model.stack.depth=2"])
    model, ids = xscale.build_model(recipe, vocabulary=64), torch.arange(20).view(2, 10)
    logits = model(ids)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")
    torch.testing.assert_close(model(ids, targets=ids), loss)
    loads = [value for name, value in model.statistics(ids).items() if name.endswith("/load")]
    assert loads
    assert all(abs(float(load.sum()) - 1) < 1e-6 for load in loads)
    (layout,) = model.attention_layouts(128).values()
    assert layout.dtype == bool


def test_a_loop_of_ones_own_has_the_gradients_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture with load balance, z-loss and label smoothing, two micro-batches; in float64, without dropout."""
    batches: list[Any] = []
    gradients: dict[str, torch.Tensor] = {}
    compute = Stepper.compute_gradients

    def kept(self: Stepper, micro_batches: Any, *given: Any, **named: Any) -> Any:
        batches.extend(micro_batches)
        found = compute(self, micro_batches, *given, **named)
        gradients.update({name: weight.grad.clone() for name, weight in self.engine.model.named_parameters()})
        return found

    monkeypatch.setattr(Stepper, "compute_gradients", kept)
    router = {"kind": "switch", "aux_loss_weight": 0.3, "z_loss_weight": 0.2, "jitter": 0.0}
    expert = {"kind": "gated", "hidden": 24}
    mixture = {"kind": "moe", "experts": 4, "capacity_factor": 1.0, "router": router, "expert": expert}
    block = {"mixer": {"kind": "attention", "heads": 2}, "ffn": mixture}
    recipe = tiny_recipe(
        tmp_path,
        model={"kind": "decoder", "width": 16, "stack": {"depth": 2, "block": block}},
        objective={"kind": "causal", "label_smoothing": 0.1, "z_loss_weight": 1e-2},
        data={"cross_documents": True},
        train={"steps": 1, "batch_size": 4, "micro_batch_size": 2, "eval_every": 0},
        precision={"compute": "float64", "master": "float64"},
    )
    assert xscale.train(recipe) == 0
    model = xscale.build_model(recipe).double().train()
    assert model.tokenizer is not None
    assert len(batches) == 2
    count = sum(int((batch.targets != -100).sum()) for batch in batches)
    for batch in batches:
        (model(batch.tokens.ids, targets=batch.targets, share=1 / 2) / count).backward()
    for name, weight in model.model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-10, atol=1e-14)
    # The control: without the auxiliary losses the routers' gradients are others.
    model.zero_grad()
    for batch in batches:
        (model(batch.tokens.ids, targets=batch.targets, share=0.0) / count).backward()
    routers = [name for name in gradients if ".router." in name]
    assert routers
    weights = dict(model.model.named_parameters())
    assert not any(torch.allclose(weights[name].grad, gradients[name], rtol=1e-3) for name in routers)


def test_dropout_follows_the_mode() -> None:
    recipe = xscale.load_recipe("quickstart", ["model.width=16", "model.stack.depth=2", "model.dropout=0.5"])
    model, ids = xscale.build_model(recipe, vocabulary=64), torch.arange(20).view(2, 10)
    model.eval()
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))
    torch.manual_seed(5)
    first = model(ids, targets=ids)
    torch.manual_seed(5)
    assert torch.equal(model(ids, targets=ids), first)


def test_an_encoder_decoder_reads_a_source() -> None:
    model = xscale.build_model(xscale.load_recipe("t5_span", ["model.width=16"]), vocabulary=64)
    ids, source = torch.arange(4)[None], torch.arange(6)[None]
    assert model(ids, source=source).shape == (1, 4, 64)
    assert not torch.equal(model(ids, source=source), model(ids, source=source + 1))
    with pytest.raises(ValueError, match="needs `source`"):
        model(ids)
    with pytest.raises(ValueError, match="reads one sequence"):
        xscale.build_model(xscale.load_recipe("quickstart", ["model.width=16"]), vocabulary=64)(ids, source=source)


@pytest.mark.long
def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    """Two workers tokenise; neither runs the script again."""
    recipe = small(tmp_path)
    (tmp_path / "script.py").write_text(
        f"import sys, xscale\nsys.path.insert(0, {str(ROOT)!r})\nprint('the script runs', flush=True)\n"
        f"recipe = xscale.load_recipe({str(tmp_path / 'recipe.yaml')!r})\nassert xscale.train(recipe) == 0\n",
        encoding="utf-8",
    )
    from xscale.core.compose import dump
    from xscale.core.config import encode

    (tmp_path / "recipe.yaml").write_text(dump(encode(recipe)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the script runs") == 1
    assert "2 processes" in done.stdout + done.stderr


@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "docs/notebooks/variants.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = "import matplotlib\nmatplotlib.use('Agg')\n" + "\n".join(cells)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "final loss" in done.stdout
