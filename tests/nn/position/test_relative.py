"""T5's relative positions against `transformers`, and what their check refuses."""

import pytest
import torch

from tests.conformance.made import dims
from xscale.nn.position.relative import Relative


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20)])
def test_buckets_are_t5s(causal: bool, buckets: int, distance: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    part = Relative(Relative.Config(buckets=buckets, distance=distance), dims(causal=causal), 2, 8)
    after = torch.arange(-400, 400)
    if causal:
        after = after[after <= 0]
    wanted = T5Attention._relative_position_bucket(after, not causal, buckets, distance)
    assert torch.equal(part.bucket(after, buckets), wanted)
    assert wanted.unique().numel() == buckets - (not causal)


def test_the_bias_is_a_row_of_the_table() -> None:
    part = Relative(Relative.Config(), dims(causal=True), 2, 8)
    torch.nn.init.normal_(part.weight)
    places = torch.tensor([[0, 1, 2, 300]])
    bias = part.bias(places, places)
    assert bias.shape == (1, 2, 4, 4)
    assert torch.equal(bias[0, :, 2, 1], part.weight[1])
    assert torch.equal(bias[0, :, 3, 0], part.weight[31])
    assert torch.equal(bias[0, :, 3, 2], part.weight[31])


@pytest.mark.parametrize(
    ("config", "path"), [({"buckets": 6}, "p.buckets"), ({"buckets": 2}, "p.buckets"), ({"distance": 16}, "p.distance")]
)
def test_refusals(config: dict[str, int], path: str) -> None:
    problems = Relative.check(Relative.Config(**config), dims(causal=True), "p")
    assert [problem.path for problem in problems] == [path]
    assert Relative.check(Relative.Config(), dims(causal=True), "p") == []
