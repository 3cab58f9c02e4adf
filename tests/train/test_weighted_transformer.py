"""The recipe of the Weighted Transformer: kappa and alpha are frozen in the last steps, while all else is trained."""

from pathlib import Path

import pytest
import torch

from tests.golden.shrink import ROOT, small
from tests.train.tiny import run
from xscale.run.load_run import load_run


@pytest.mark.long
def test_kappa_and_alpha_are_frozen_in_the_last_tenth(tmp_path: Path) -> None:
    recipe = small(ROOT / "configs/xformer/weighted-transformer.yaml", tmp_path)
    weights = []
    for stop in (17, 1, 1):
        train = recipe.train.model_copy(update={"steps": 20, "stop_after": stop})
        run(recipe.model_copy(update={"train": train}))
        weights.append({name: value.clone() for name, value in load_run(tmp_path / "run").model.named_parameters()})
    before, at_nine_tenths, last = weights
    frozen = {name for name in last if ".kappa." in name or ".alpha." in name}
    assert len(frozen) == 2 * 4, "in the encoder's attention and the cross-attention of two blocks"
    changed = {name for name in last if not torch.equal(at_nine_tenths[name], last[name])}
    assert not changed & frozen
    assert {name for name in frozen if not torch.equal(before[name], at_nine_tenths[name])} == frozen
    assert changed, "the rest of the model adapts"
