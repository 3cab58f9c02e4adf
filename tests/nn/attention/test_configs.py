"""The sparse attentions that are known by a name: their configs are accepted, take a step, and see what they should."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from xscale.core.compose import compose
from xscale.core.config import decode
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.softmax import Softmax
from xscale.nn.materialize import materialize
from xscale.nn.mixer.attention import Attention
from xscale.nn.model.model import MODELS
from xscale.nn.tokens import Tokens
from xscale.run.run_facts import attention_layouts

FOLDER = Path(__file__).parents[3] / "configs" / "model"
FILES = sorted(FOLDER.glob("attention_*.yaml"))


def model_of(name: str, length: int = 512) -> Any:
    data = compose(FOLDER / f"{name}.yaml", []).data["model"]
    entry = MODELS.get(data.pop("kind"))
    config = decode(entry.part.Config, data)
    assert entry.part.check(config, (64, length), "model") == []
    with torch.device("meta"):
        return entry.part(config, 64, length)


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_is_accepted_and_takes_a_step(name: str) -> None:
    model = model_of(name, 96)
    materialize(model, 0)
    ids = torch.randint(64, (2, 96), generator=torch.Generator().manual_seed(0))
    loss = model(Tokens.from_ids(ids, rng_seed=1), ids).mean()
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_gpt3_alternates_dense_and_banded_layers() -> None:
    cores = [module.core for module in model_of("attention_gpt3").modules() if isinstance(module, Attention)]
    assert [type(core) for core in cores] == [Softmax, BlockSparse] * 2
    drawn = attention_layouts(model_of("attention_gpt3"), 512)
    assert sorted(drawn) == ["stack.blocks.1.mixer.part", "stack.blocks.3.mixer.part"]
    row, column = np.indices((8, 8))
    assert (drawn["stack.blocks.1.mixer.part"][0] == ((row - column >= 0) & (row - column <= 2))).all()


def test_sparse_transformers_heads() -> None:
    drawn = attention_layouts(model_of("attention_sparse_transformer"), 256)
    merged, split = drawn["stack.blocks.0.mixer.part"], drawn["stack.blocks.1.mixer.part"]
    assert len(merged) == 1
    assert (split[0] == split[2]).all()
    assert (split[1] == split[3]).all()
    assert (split[0] != split[1]).any()


def test_longformers_language_model_widens_and_dilates() -> None:
    drawn = attention_layouts(model_of("attention_longformer_lm", 1024), 1024)
    rows = [drawn[f"stack.blocks.{layer}.mixer.part"][:, 16] for layer in range(4)]
    assert np.flatnonzero(rows[0][0]).tolist() == [15, 16]
    assert np.flatnonzero(rows[1][0]).tolist() == [14, 15, 16]
    assert np.flatnonzero(rows[2][0]).tolist() == [10, 12, 14, 16]
    assert np.flatnonzero(rows[2][3]).tolist() == [13, 14, 15, 16]
    assert np.flatnonzero(rows[3][1]).tolist() == [8, 10, 12, 14, 16]


def test_the_algebra_is_what_it_says() -> None:
    drawn = attention_layouts(model_of("attention_algebra"), 1024)["stack.blocks.0.mixer.part"][0]
    for row in range(32):
        seen = {c for c in range(row + 1) if row - c <= 2 or (row - c <= 11 and (row - c) % 2 == 0) or c == 0}
        assert set(np.flatnonzero(drawn[row]).tolist()) == (set(range(row + 1)) if row == 0 else seen)
