"""A balanced hash of the ids: its table follows from the training data's counts, on all layouts, resumed and loaded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.data.corpora import text_config
from tests.distributed import Pool
from tests.train.tiny import losses, recipe, run
from xscale.core.config import decode
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepare import prepare
from xscale.data.samples.loader import open_corpus
from xscale.data.token_counts import count_training_tokens
from xscale.run.load_run import load_run
from xscale.run.token_counts import parts_that_count, require_no_counts
from xscale.settings.settings import build_on_meta

EXPERTS = 8
MODEL = {
    "kind": "decoder",
    "width": 16,
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 2},
            "ffn": {
                "kind": "moe",
                "experts": EXPERTS,
                "router": {"kind": "hash", "function": "balanced"},
                "expert": {"kind": "dense", "hidden": 16},
            },
        },
    },
}
LAYOUTS = {
    "zero3": {"zero": {"stage": 3}},
    "zero1-ep2": {"zero": {"stage": 1}, "mesh": {"ep": 2}},
    "pp2": {"mesh": {"pp": 2}},
}
PATH = "stack.blocks.1.ffn.part.router"


def one_run(folder: Path, name: str, **sections: Any) -> int:
    return run(recipe(folder, name, model=MODEL, precision={"compute": "float64", "master": "float64"}, **sections))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    folder = tmp_path_factory.mktemp("counts")
    assert pool.run(one_run, 1, folder, "whole", checkpoint={"every_steps": 3}) == [EXIT_DONE]
    return folder


def table_of(folder: Path, name: str) -> Tensor:
    model = load_run(folder / name).model
    return model.get_submodule(PATH).get_parameter("table").detach().long()


def counts_of(folder: Path) -> np.ndarray:
    """Counted by eye from the documents of the training split."""
    data = open_corpus(recipe(folder).data, seed=0).sets[0].train
    assert data is not None
    counts = np.zeros(data.indexed.tokens.max() + 300, dtype=np.int64)
    for document in range(data.first, data.stop):
        np.add.at(counts, data.indexed.document(document), 1)
    return counts


def test_every_expert_gets_its_share_of_the_training_data(trained: Path) -> None:
    (table,), counts = table_of(trained, "whole"), counts_of(trained)
    load = np.bincount(table, weights=counts[: len(table)], minlength=EXPERTS)
    assert load.sum() == counts.sum() > 0
    # By a greedy deal no two experts differ by more than the most frequent id.
    assert load.min() > 0
    assert load.max() - load.min() <= counts.max()
    unseen = np.bincount(table[torch.from_numpy(counts[: len(table)] == 0)], minlength=EXPERTS)
    assert unseen.max() - unseen.min() <= 1, "ids that do not occur are dealt to all experts"


def test_the_log_says_what_was_counted(trained: Path) -> None:
    (line,) = [line for line in (trained / "whole" / "log.txt").read_text().splitlines() if "counted the ids" in line]
    assert PATH in line


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.long] * (name != "pp2")) for name in LAYOUTS])
def test_all_ranks_have_the_table_of_one(layout: str, trained: Path, pool: Pool) -> None:
    pool.run(one_run, 2, trained, layout, parallel=LAYOUTS[layout], checkpoint={"every_steps": 3})
    assert torch.equal(table_of(trained, layout), table_of(trained, "whole"))
    assert losses(trained, layout) == pytest.approx(losses(trained, "whole"), rel=1e-9)


def test_a_resumed_run_keeps_it_when_the_data_are_gone_through_in_another_order(trained: Path, pool: Pool) -> None:
    assert pool.run(one_run, 1, trained, "parted", train={"stop_after": 3}) == [EXIT_REQUEUE]
    before = table_of(trained, "parted")
    assert pool.run(one_run, 1, trained, "parted") == [EXIT_DONE]
    assert torch.equal(table_of(trained, "parted"), before)
    assert losses(trained, "parted") == losses(trained, "whole")


def test_a_blend_counts_by_the_weight_of_each_dataset(tmp_path: Path) -> None:
    ready = [
        prepare(text_config(tmp_path / name, count=count), progress=False) for name, count in (("a", 60), ("b", 90))
    ]
    blend = [{"prepared": str(data.path), "weight": weight} for data, weight in zip(ready, (3, 1), strict=True)]
    keys = {"tokenizer": "byte", "sequence_length": 32}
    alone = [
        count_training_tokens(open_corpus(decode(DataConfig, {**keys, "blend": [item]}), seed=0)) for item in blend
    ]
    both = count_training_tokens(open_corpus(decode(DataConfig, {**keys, "blend": blend}), seed=0))
    wanted = sum(weight / 4 * count / count.sum() for weight, count in zip((3, 1), alone, strict=True))
    np.testing.assert_allclose(both / both.sum(), wanted, rtol=1e-9)
    assert both.sum() == pytest.approx(sum(count.sum() for count in alone))


def test_a_model_without_data_is_refused() -> None:
    model = build_on_meta(recipe(Path("unused"), model=MODEL), 64)
    assert list(parts_that_count(model)) == ["stack.blocks.0.ffn.part.router", PATH]
    with pytest.raises(ConfigError, match="counts of the ids in the training data, which are absent"):
        require_no_counts(model, "upcycle", "Give the router's frequencies.")
