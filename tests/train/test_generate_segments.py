"""Generation with a memory of earlier segments: over caches as by whole segments, past the length of a segment; and
`xscale eval`, which prints the perplexity with and without memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nn.depth.segments import SEGMENT, VOCABULARY, decoder, logits_of_segments
from tests.train.test_streams import MODEL
from tests.train.tiny import metrics, recipe, run
from xscale.evaluate.evaluate_run import evaluate_run
from xscale.generate.generate import generate
from xscale.generate.generate_text import generate_text

CASES: dict[str, Any] = {
    "transformer_xl": {},
    "rope": {"position": "rope"},
    "same layer": {"memory": {"layer": "same"}},
    "entmax": {"mixer": {"core": "entmax"}},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("prompt", [3, SEGMENT, 2 * SEGMENT + 1])
@torch.no_grad()
def test_each_token_is_the_likeliest_behind_its_segments(name: str, prompt: int) -> None:
    changes = dict(CASES[name])
    model = decoder({"segment_memory": {"length": 6, **changes.pop("memory", {})}}, **changes)
    ids = torch.randint(VOCABULARY, (prompt,), generator=torch.Generator().manual_seed(1))
    written = generate(model, ids, 3 * SEGMENT, end=-1, temperature=0, window=SEGMENT)
    assert len(written) == 3 * SEGMENT
    for token in written:
        assert logits_of_segments(model, ids[None])[0, -1].argmax() == token
        ids = torch.cat((ids, token[None]))


def test_eval_tells_what_the_memory_is_worth(tmp_path: Path) -> None:
    data = {"order": "streams", "sequence_length": 16}
    train = {"steps": 3, "batch_size": 8, "micro_batch_size": 2, "eval_every": 3, "eval_sequences": 21}
    assert run(recipe(tmp_path, model=MODEL, data=data, train=train)) == 0
    result = evaluate_run(tmp_path / "run", 21)
    (of_run,) = [line["eval_loss"] for line in metrics(tmp_path) if "eval_loss" in line]
    assert result["loss"] == pytest.approx(of_run, rel=1e-6)
    assert result["loss_without_memory"] != pytest.approx(of_run, rel=1e-6)
    assert "perplexity_without_memory" in result
    prompt = "def f(x): return x\n" * 3
    assert len(generate_text(tmp_path / "run", prompt, 20, 0.8, 40, 0)) > len(prompt)
