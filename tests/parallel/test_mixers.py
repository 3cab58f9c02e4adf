"""Mixers with projections beside those of attention, on layouts that shard their heads and their sequence."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same
from xscale.core.config import decode
from xscale.nn.model.encoder import Encoder
from xscale.parallel import context
from xscale.parallel.config import ParallelConfig

BAND = {"kind": "block_sparse", "block": 4, "pattern": {"kind": "band", "left": 3, "right": 3}}
MIXERS: dict[str, dict[str, Any]] = {
    "longt5": {"kind": "longt5", "heads": 4, "core": {"kind": "longt5", "radius": 3, "block": 4}},
    "longformer": {"kind": "longformer", "heads": 4, "dropout": 0.1, "core": BAND, "global_token_indices": [0, 9]},
    "etc": {
        "kind": "etc",
        "heads": 4,
        "bias": True,
        "projections": "pieces",
        "core": {"kind": "etc", "global_tokens": 6, "radius": 3, "labels": "structure", "segment_length": 5},
    },
}
POSITIONS: dict[str, Any] = {"longt5": {"kind": "relative", "buckets": 8, "distance": 16, "shared": True}}
SECTIONS: dict[str, Any] = {"data": {"cross_documents": True}}


def model(mixer: str) -> dict[str, Any]:
    block = {"mixer": MIXERS[mixer], "ffn": {"kind": "dense", "hidden": 48}, "dropout": 0.1}
    position = POSITIONS.get(mixer, "learned")
    made = {"kind": "encoder", "width": 32, "position": position, "stack": {"depth": 2, "block": block}}
    return made | ({"global_tokens": 6} if mixer == "etc" else {})


SEQUENCE: dict[str, Any] = {"mesh": {"tp": 2}, "tensor": {"sequence": True}}
STAGES: dict[str, Any] = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}


@pytest.mark.parametrize(("mixer", "parallel"), [*((mixer, SEQUENCE) for mixer in MIXERS), ("longt5", STAGES)])
@pytest.mark.sampled(3)
def test_a_layout_trains_as_one_process(mixer: str, parallel: dict[str, Any], pool: Pool) -> None:
    same(pool, alone(pool, model(mixer), **SECTIONS), 2, model(mixer), parallel, **SECTIONS)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_sharded_sequence_is_refused(mixer: str) -> None:
    config = {name: value for name, value in model(mixer).items() if name != "kind"}
    built = Encoder(decode(Encoder.Config, config), 67, 23)
    problems = context.check(built, decode(ParallelConfig, {"mesh": {"cp": 2}}), "parallel")
    assert {problem.path for problem in problems} == {"parallel.mesh.cp"}
    assert f"mixer '{mixer}' mixes the full sequence" in str(problems[-1])
