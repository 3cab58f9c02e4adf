"""Whole runs on a GPU: recipes against the CPU, a resume, a checkpoint that a CPU reads, greedy decoding."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.shrink import RECIPES, ROOT, shrunk, small
from tests.gpu.parts_on_device import relative_difference
from tests.train.tiny import MIXTURE, losses, recipe, run
from xscale.commands.show import catalogue
from xscale.core.config import decode, encode
from xscale.generate.generate import generate
from xscale.nn.materialize import materialize
from xscale.nn.tokens import Tokens
from xscale.recipe import Recipe
from xscale.settings.settings import build_on_meta

pytestmark = pytest.mark.gpu
FILES = [*RECIPES, *(ROOT / f"configs/xformer/{id}.yaml" for id in catalogue.ids() if catalogue.recipe_file(id))]
FIRST_LOSS = 1e-3
"""Largest relative difference of the first loss, in float32, of a recipe without noise."""
NOISE = {"dropout": 0.0, "expert_dropout": 0.0, "jitter": 0.0, "stochastic_depth": 0.0}


def without_noise(value: Any) -> Any:
    """The config without dropout and jitter, which a GPU draws otherwise than a CPU."""
    if isinstance(value, dict):
        return {
            key: NOISE[key] if key in NOISE and isinstance(item, float) else without_noise(item)
            for key, item in value.items()
        }
    return [without_noise(item) for item in value] if isinstance(value, list | tuple) else value


def two_steps(file: Path, folder: Path, device: str) -> list[float]:
    """The losses of two steps in float32."""
    folder.mkdir()
    data = encode(small(file, folder))
    data["model"] = without_noise(shrunk(data["model"]))
    data["run"]["device"] = device
    data["precision"] = {"compute": "float32", "master": "float32"}
    data["train"]["steps"] = 2
    assert run(decode(Recipe, data)) == 0
    return losses(folder)


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_two_steps_of_a_recipe(file: Path, tmp_path: Path, device: torch.device) -> None:
    found = two_steps(file, tmp_path / "device", device.type)
    wanted = two_steps(file, tmp_path / "cpu", "cpu")
    assert len(found) == len(wanted) == 2
    assert all(map(math.isfinite, found))
    assert found[0] == pytest.approx(wanted[0], rel=FIRST_LOSS)
    assert found[1] == pytest.approx(wanted[1], rel=0.05)


PRECISION = {"compute": "float32", "master": "float32"}


def test_a_run_resumes(tmp_path: Path, device: torch.device) -> None:
    """Six steps at once are three and three, whose checkpoint was written from the device."""
    common = {"run": {"device": device.type}, "precision": PRECISION}
    assert run(recipe(tmp_path, "whole", **merged(common, tmp_path, "whole"))) == 0
    parts = merged(common, tmp_path, "parts")
    stopped = {**parts, "train": {"stop_after": 3}, "checkpoint": {"every_steps": 3}}
    assert run(recipe(tmp_path, "parts", **stopped)) == 75
    assert run(recipe(tmp_path, "parts", **{**parts, "checkpoint": {"every_steps": 3}})) == 0
    assert losses(tmp_path, "parts") == pytest.approx(losses(tmp_path, "whole"), rel=1e-5)


def merged(common: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """The sections, with the run's folder."""
    return {**common, "run": {**common["run"], "dir": str(folder / name), "seed": 3}}


def test_a_cpu_reads_the_checkpoint(tmp_path: Path, device: torch.device) -> None:
    import xscale

    sections = merged({"run": {"device": device.type}, "precision": PRECISION}, tmp_path, "run")
    assert run(recipe(tmp_path, **sections, checkpoint={"every_steps": 6})) == 0
    loaded: Any = xscale.load_model(tmp_path / "run")
    ids = torch.arange(20)[None] % 200
    with torch.no_grad():
        on_cpu = loaded.model.cpu()(Tokens.from_ids(ids))
        on_device = loaded.model.to(device)(Tokens.from_ids(ids.to(device))).cpu()
    assert relative_difference(on_device.double(), on_cpu.double()) <= 1e-4


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_greedy_decoding_is_the_cpus(kind: str, tmp_path: Path, device: torch.device) -> None:
    settings = recipe(tmp_path, model=MIXTURE if kind == "mixture" else {**MIXTURE, "stack": dense_stack()})

    def tokens(on: torch.device) -> list[int]:
        model = build_on_meta(settings, 260)
        materialize(model, 0, "cpu", torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0)
        model.to(on).eval()
        with torch.inference_mode():
            out = generate(model, torch.arange(5, device=on), 20, end=-1, temperature=0)
        return list(out.tolist())

    assert tokens(device) == tokens(torch.device("cpu"))


def dense_stack() -> dict[str, Any]:
    """The stack without its rule of experts."""
    return {key: value for key, value in MIXTURE["stack"].items() if key != "rules"}
