"""The bias of loss-free balancing follows the load, and the load follows the bias."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.nn.moe.mixture import D, mixture, sample
from xscale.nn.post_step import WeightWriter, update_non_gradient_state
from xscale.nn.tokens import Stats


def test_bias_evens_a_skewed_load() -> None:
    x, tokens = sample(rows=8)
    x = x + 2 * torch.randn(D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moe = mixture(
        experts=8, router={"kind": "topk", "score": "sigmoid", "aux_loss_weight": 0.0, "bias_update_rate": 0.02}
    )
    moe.path, moe.router.path = "moe", "moe.router"
    spread = []
    for _ in range(60):
        tally = Stats()
        moe(x, tokens.with_forward(stats=tally))
        update_non_gradient_state(moe, tally.means())
        spread.append(tally.means()["moe/load"].std().item())
    assert spread[-1] < 0.3 * spread[0]


class Doubling(WeightWriter):
    """A layout that shows in what is written."""

    def shard_like(self, full: Tensor, parameter: Tensor) -> Tensor:
        return 2 * full


def test_direction_and_size() -> None:
    moe = mixture(router={"kind": "topk", "bias_update_rate": 0.5})
    moe.path, moe.router.path = "moe", "moe.router"
    update_non_gradient_state(moe, {"moe/load": torch.tensor([0.7, 0.1, 0.1, 0.1])})
    assert moe.router.bias.tolist() == [-0.5, 0.5, 0.5, 0.5]
    update_non_gradient_state(moe, {"moe/load": torch.tensor([0.7, 0.1, 0.1, 0.1])}, Doubling())
    assert moe.router.bias.tolist() == [-1.5, 1.5, 1.5, 1.5]


def test_bias_chooses_and_does_not_weigh() -> None:
    x, tokens = sample()
    moe, plain = (mixture(experts=2, router={"kind": "topk", "bias_update_rate": rate}) for rate in (0.1, 0.0))
    moe.router.bias.copy_(torch.tensor([0.0, 5.0]))
    torch.testing.assert_close(moe(x, tokens), plain(x, tokens))


def test_balance_of_the_global_batch_evens_a_skewed_load() -> None:
    x, tokens = sample(rows=8)
    x = x + 2 * torch.randn(D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moe = mixture(experts=8, router={"kind": "topk", "balance_over": "global_batch"})
    moe.path, moe.router.path = "moe", "moe.router"
    optimizer = torch.optim.Adam([moe.router.weight], lr=0.03)
    spread = []
    for _ in range(100):
        tally = Stats()
        for half in x.chunk(2):
            optimizer.zero_grad()
            loss = moe.router(half.flatten(0, 1), tokens).loss
            assert loss is not None
            loss.backward()
            optimizer.step()
            moe(half, replace(tokens.with_forward(stats=tally), ids=tokens.ids[:4]))
        update_non_gradient_state(moe, tally.means())
        spread.append(tally.means()["moe/load"].std().item())
    assert spread[-1] < 0.5 * spread[0]
    assert abs(moe.router.load.sum().item() - 1) < 1e-12
    assert moe.router.load.grad is None


def test_no_gradient_moves_it() -> None:
    x, tokens = sample()
    moe = mixture(router={"kind": "topk", "bias_update_rate": 0.1})
    assert moe.router.post_step
    assert not mixture().router.post_step
    moe(x, tokens).sum().backward()
    assert moe.router.bias.grad is None
    assert "router.bias" in moe.state_dict(), "it is saved with the weights"
