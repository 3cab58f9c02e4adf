"""The mixtures that are known by a name: their configs are accepted and take a step."""

from pathlib import Path

import pytest
import torch

from tests.nn.moe.mixture import set_equal_counts
from xscale.core.compose import compose
from xscale.core.config import decode
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.ffn.product_key_memory import ProductKeyMemory
from xscale.nn.materialize import materialize
from xscale.nn.model.model import MODELS
from xscale.nn.tokens import Stats, Tokens

FILES = sorted(Path(__file__).parents[3].joinpath("configs/model").glob("m*_*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_is_accepted_and_takes_a_step(file: Path) -> None:
    data = compose(file, []).data["model"]
    entry = MODELS.get(data.pop("kind"))
    config = decode(entry.part.Config, data)
    assert entry.part.check(config, (64, 32), "model") == []
    with torch.device("meta"):
        model = entry.part(config, 64, 32)
    materialize(model, 0)
    set_equal_counts(model, 64)
    assert any(isinstance(module, Moe | ProductKeyMemory) for module in model.modules())
    ids = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))
    tokens = Tokens.from_ids(ids, rng_seed=1, aux_loss_weight=1.0, stats=Stats())
    loss = model(tokens, ids, tokens if entry.traits.source else None).mean()
    loss.backward()
    assert loss.isfinite()
    wanting = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    missing = [name for name in wanting if model.get_parameter(name).grad is None]
    # A bigram or a memory reads only some rows, but no parameter is left out of the graph.
    assert missing == []
    assert all(value.isfinite().all() for value in tokens.forward.stats.means().values())
