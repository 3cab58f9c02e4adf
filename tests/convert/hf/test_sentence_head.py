"""An exported BERT with a sentence head is BertForPreTraining of `transformers`, with token types and classes."""

from pathlib import Path

import pytest
import torch

from tests.convert.hf.models import SECTIONS, checkpoint
from xscale.convert.hf import export_model as write
from xscale.core.config import decode
from xscale.nn.model.encoder import Encoder
from xscale.nn.tokens import Tokens


@pytest.mark.long
def test_the_class_of_a_pair_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    section = {**SECTIONS["bert"][1], "token_types": 2, "sentence_head": {"classes": 2}}
    path, weights = checkpoint(tmp_path / "run", section)
    assert write.export_model(path, tmp_path / "out", architecture="bert", say=lambda line: None) == 0
    theirs = transformers.BertForPreTraining.from_pretrained(tmp_path / "out").eval()
    config = decode(Encoder.Config, {name: value for name, value in section.items() if name != "kind"})
    ours = Encoder(config, weights["embed.table.weight"].shape[0], theirs.config.max_position_embeddings).eval()
    ours.load_state_dict(weights, strict=False)
    ids = torch.arange(10, 22).view(2, 6)
    types = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    tokens = Tokens.from_ids(ids, types=types)
    with torch.no_grad():
        wanted = theirs(ids, token_type_ids=types)
        states = ours.stack(ours.embed(tokens), tokens)
        assert ours.head.sentence is not None
        torch.testing.assert_close(ours.head.sentence(states), wanted.seq_relationship_logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours(tokens), wanted.prediction_logits, rtol=1e-4, atol=1e-4)
        untyped = theirs(ids).seq_relationship_logits
    assert (untyped - wanted.seq_relationship_logits).abs().max() > 1e-3
