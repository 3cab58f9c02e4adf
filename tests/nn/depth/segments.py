"""Small decoders that remember the segment before, and their forwards over the segments of a text."""

from typing import Any

import torch
from torch import Tensor

from tests.conformance.made import ready
from xscale.core.config import decode
from xscale.nn.model.decoder import Decoder
from xscale.nn.module import carried_tensors
from xscale.nn.segment_state import BEGINS, NEXT_DOCUMENT, SEGMENT_STATE, SegmentStates
from xscale.nn.tokens import Tokens

VOCABULARY, SEGMENT, WIDTH, HEADS, HIDDEN, DEPTH = 17, 4, 12, 3, 20, 2


def config_of(stack: Any, **changes: Any) -> Decoder.Config:
    """Config of a decoder of two blocks whose `stack` has those keys; `changes` are of the block, or of the model."""
    model = {key: changes.pop(key) for key in ("width", "position") if key in changes}
    block = {
        "mixer": {"kind": "attention", "heads": HEADS, **changes.pop("mixer", {})},
        "ffn": {"kind": "dense", "hidden": HIDDEN},
        "norm": "layer",
        **changes,
    }
    stack = {"depth": DEPTH, "block": block, **stack}
    return decode(Decoder.Config, {"width": WIDTH, "position": "transformer_xl", "stack": stack, **model})


def decoder(stack: Any, **changes: Any) -> Any:
    """The decoder of `config_of`, in float64 with weights that are drawn."""
    config = config_of(stack, **changes)
    problems = Decoder.check(config, (VOCABULARY, SEGMENT), "model")
    assert not problems, [str(problem) for problem in problems]
    return ready(Decoder(config, VOCABULARY, SEGMENT))


def refusals(stack: Any, **changes: Any) -> str:
    """The problems of the config, in one string."""
    problems = Decoder.check(config_of(stack, **changes), (VOCABULARY, SEGMENT), "model")
    return " ".join(map(str, problems))


def states_of(model: Any, rows: int) -> SegmentStates:
    return SegmentStates(carried_tensors(model), rows, dtype=torch.float64, device=torch.device("cpu"))


def text(length: int, rows: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))


def logits_of_segments(
    model: Any,
    ids: Tensor,
    documents: Tensor | None = None,
    begins: dict[int, list[bool]] | None = None,
    states: SegmentStates | None = None,
    **fields: Any,
) -> Tensor:
    """Logits [B, T, V] of a text [B, T], a segment at a time. `begins`: rows that begin anew, by segment."""
    states = states or states_of(model, len(ids))
    logits = []
    for number, start in enumerate(range(0, ids.shape[1], SEGMENT)):
        end = start + SEGMENT
        signals: dict[Any, Any] = {SEGMENT_STATE: states.of_rows(0, len(ids))}
        if begins and number in begins:
            signals[BEGINS] = torch.tensor(begins[number])
        if documents is not None:
            own = documents[:, start : end + 1]
            own = own - own[:, :1]
            following = own[:, -1] if own.shape[1] > SEGMENT else own[:, -1] + 1
            signals[NEXT_DOCUMENT] = following
        tokens = Tokens.from_ids(
            ids[:, start:end], None if documents is None else own[:, :SEGMENT], signals=signals, **fields
        )
        logits.append(model(tokens))
        states.commit()
    return torch.cat(logits, 1)
