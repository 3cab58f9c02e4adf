"""R-Transformer's local recurrent network against torch's GRU and LSTM, run on each token's window by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.made import WIDTH, close, dims, drawn, numbered, ready, tokens
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.forward import Forward
from xscale.nn.mixer.local_rnn import LocalRnn
from xscale.nn.tokens import Tokens

LENGTH = 23
CONFIGS: list[dict[str, Any]] = [
    {"cell": "gru", "window": 4},
    {"cell": "lstm", "window": 4},
    {"cell": "gru", "window": 1},
    {"cell": "lstm", "window": 30},
]


def network(**config: Any) -> LocalRnn:
    return ready(LocalRnn(LocalRnn.Config(**config), dims()))


def literal(part: LocalRnn, x: Tensor) -> Tensor:
    """h_t = RNN(x_(t-M+1), ..., x_t): each window alone, with zeros before the first token."""
    kind = nn.GRU if part.cell == "gru" else nn.LSTM
    rnn = kind(WIDTH, WIDTH, batch_first=True).double()
    with torch.no_grad():
        rnn.weight_ih_l0.copy_(part.inputs.weight)
        rnn.bias_ih_l0.copy_(part.inputs.get_parameter("bias"))
        rnn.weight_hh_l0.copy_(part.states.weight)
        rnn.bias_hh_l0.copy_(part.states.get_parameter("bias"))
        padded = torch.cat((torch.zeros(len(x), part.window - 1, WIDTH, dtype=x.dtype), x), 1)
        windows = [rnn(padded[:, t : t + part.window])[0][:, -1] for t in range(x.shape[1])]
    return torch.stack(windows, 1)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_each_window_is_run_by_itself(config: dict[str, Any]) -> None:
    part, x = network(**config), drawn(2, LENGTH, WIDTH)
    assert close(part(x, tokens(LENGTH)), literal(part, x))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_packed_documents_are_documents_apart(config: dict[str, Any]) -> None:
    part, x = network(**config), drawn(2, LENGTH, WIDTH)
    packed = part(x, tokens(LENGTH, documents=numbered(9, 2, 12)))
    assert close(packed, torch.cat([literal(part, piece) for piece in x.split([9, 2, 12], 1)], 1))


def test_generation_keeps_the_inputs_of_a_window() -> None:
    part, x = network(window=5), drawn(2, LENGTH, WIDTH)
    whole, cache, about = part(x, tokens(LENGTH)), dict[str, Any](), tokens(LENGTH)
    for start in range(LENGTH):
        here = Tokens(
            about.ids[:, start : start + 1], about.positions[:, start : start + 1], forward=Forward(cache=cache)
        )
        assert close(part(x[:, start : start + 1], here), whole[:, start : start + 1])
        assert cache[part.path].untyped_storage().nbytes() == 2 * 4 * WIDTH * 8


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be >= 1"):
        decode(LocalRnn.Config, {"window": 0})
