"""Greedy and beam search of imported encoder-decoders are those of transformers, id for id, with their scores."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.hf.models import DENSE, T5, bart, both
from xscale.convert.hf.architecture import ModelSizes
from xscale.convert.hf.compare import build
from xscale.convert.hf.import_model import import_model
from xscale.convert.hf.registry import model_of, select_architecture
from xscale.generate.beam_search import beam_search
from xscale.generate.generate import generate

LENGTH = 24
SIZES = ModelSizes(vocabulary=14, length=LENGTH, pad=1, eos=2)
SECTIONS: dict[str, Any] = {"bart": bart(), "t5": both(DENSE, 2, **T5)}


def pair(folder: Path, name: str) -> tuple[Any, torch.nn.Module]:
    """A model of transformers that was trained to write a few tokens of its source and to end, and the imported one."""
    import transformers

    architecture, data = select_architecture(model_of(SECTIONS[name]), SIZES, name)
    loader = getattr(transformers, architecture.loader)
    special = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2 if name == "bart" else 1}
    config = loader.config_class(**{key: data[key] for key in data if key != "architectures"} | special)
    torch.manual_seed(0)
    original = loader(config).train()
    optimizer = torch.optim.Adam(original.parameters(), lr=3e-3)
    for _ in range(60):
        source = torch.randint(3, 14, (16, 9))
        labels = source.flip(1).scatter(1, 2 + source[:, :1] // 2, 2)  # [B, T], an end of text at one of six places
        after = (labels == 2).cumsum(1) - (labels == 2).long() > 0
        optimizer.zero_grad()
        original(input_ids=source, labels=labels.masked_fill(after, -100)).loss.backward()
        optimizer.step()
    original.eval()
    original.save_pretrained(str(folder))
    imported = import_model(folder)
    return original, build(model_of(imported.model), imported.sizes, imported.weights)


@pytest.mark.long
@pytest.mark.parametrize("name", SECTIONS)
def test_searches_write_what_transformers_writes(name: str, tmp_path: Path) -> None:
    original, model = pair(tmp_path, name)
    start = original.config.decoder_start_token_id
    prompt, sources = torch.tensor([start]), torch.randint(3, 14, (6, 9))
    ended = 0
    for source in sources:
        shared: dict[str, Any] = {"max_new_tokens": LENGTH - 1, "do_sample": False}
        greedy = original.generate(source[None], num_beams=1, **shared)[0, 1:].tolist()
        ids = generate(model, prompt, LENGTH - 1, end=2, temperature=0, source=source).tolist()
        assert ids == [token for token in greedy if token != 2]
        for alpha in (0.0, 1.0, 2.0):
            result = original.generate(
                source[None],
                num_beams=3,
                length_penalty=alpha,
                early_stopping="never",
                output_scores=True,
                return_dict_in_generate=True,
                **shared,
            )
            sequence = result.sequences[0, 1:].tolist()
            hypotheses = beam_search(
                model,
                prompt,
                LENGTH - 1,
                end=2,
                beams=3,
                length_penalty=alpha,
                penalty_form="power",
                source=source,
            )
            if 2 in sequence:
                assert list(hypotheses[0].ids) == sequence[: sequence.index(2)]
                assert hypotheses[0].score == pytest.approx(float(result.sequences_scores[0]), abs=1e-4)
                ended += 1
    assert ended > 9, "most texts must end by themselves"
