"""Tensor parallelism gives the numbers of one process: losses, gradients' norms, evaluations and final weights."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import Pool
from tests.train.test_layouts import DOUBLE, one_rank, same
from xscale.core.errors import EXIT_DONE

DENSE = {
    "kind": "decoder",
    "width": 32,
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 1, "bias": True, "qk_norm": {"kind": "rms"}},
            "ffn": {"kind": "gated", "hidden": 48, "bias": True},
            "dropout": 0.1,
        },
        "rules": [{"every": 2, "at": 1, "ffn": {"kind": "dense", "hidden": 64, "bias": True}}],
    },
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"mesh": {"tp": 2}}),
    "tp2-dp2-zero3": (4, {"mesh": {"tp": 2}, "zero": {"stage": 3}}),
    "tp2-dp2-zero0": (4, {"mesh": {"tp": 2}, "zero": {"stage": 0}}),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """The folder of a dense decoder's run on one process."""
    folder = tmp_path_factory.mktemp("dense")
    assert pool.run(one_rank, 1, folder, "alone", precision=DOUBLE, model=DENSE) == [EXIT_DONE]
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dense_decoder(layout: str, dense: Path, pool: Pool) -> None:
    ranks, parallel = LAYOUTS[layout]
    assert set(pool.run(one_rank, ranks, dense, layout, precision=DOUBLE, model=DENSE, parallel=parallel)) == {
        EXIT_DONE
    }
    same(dense, layout, "alone", 1e-9)
