"""DeBERTa's mask decoder against the library's layers, and what of DeBERTa v2 and XLNet does not map."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.convert.hf.models import LENGTH, SECTIONS, VOCABULARY, checkpoint, deberta, drawn
from tests.convert.hf.test_convert import change, exported
from xscale.convert.hf import export_model as write
from xscale.convert.hf.compare import TOLERANCE, build
from xscale.convert.hf.import_model import import_model
from xscale.convert.hf.registry import ModelSizes, model_of
from xscale.core.errors import ConfigError
from xscale.nn.tokens import Tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An exported model of each architecture."""
    return {name: exported(tmp_path_factory.mktemp(name), name)[0] for name in ("deberta_v2", "xlnet")}


def test_the_mask_decoder_is_the_last_layer_with_other_queries(tmp_path: Path) -> None:
    """The library's layers with our weights; its own loop over them cannot run in the versions at hand."""
    import transformers

    out, weights, _ = exported(tmp_path, "deberta_v2")
    section = deberta(8, "gelu")
    section["stack"] = {**section["stack"], "mask_decoder": {"steps": 2}}
    places = "stack.blocks.1.position.weight"
    weights = {**weights, places: drawn(section)[places]}
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ours = build(model_of(section), ModelSizes(VOCABULARY, LENGTH), weights)(Tokens.from_ids(ids))
    theirs: Any = transformers.DebertaV2ForMaskedLM.from_pretrained(str(out)).eval()
    encoder = theirs.deberta.encoder
    mask = torch.ones(2, LENGTH)
    h = theirs.deberta(ids, attention_mask=mask, output_hidden_states=True).hidden_states[-2]
    x = h + weights[places]
    inputs = {"relative_pos": encoder.get_rel_pos(h), "rel_embeddings": encoder.get_rel_embedding()}
    for _ in range(2):
        x, _ = encoder.layer[-1](h, encoder.get_attention_mask(mask), query_states=x, **inputs)
    wanted = theirs.cls(x)
    assert (ours - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (ours - theirs(ids).logits).abs().max() > 1e-2 * wanted.abs().max()


def test_a_model_with_a_mask_decoder_has_no_place_in_the_library(tmp_path: Path) -> None:
    section = deberta(8, "gelu")
    section["stack"] = {**section["stack"], "mask_decoder": {}}
    path, _ = checkpoint(tmp_path / "run", section)
    with pytest.raises(ConfigError, match="null would map") as caught:
        write.export_model(path, tmp_path / "out", architecture="deberta-v2", say=lambda _: None)
    assert [problem.path for problem in caught.value.problems] == ["model.stack.mask_decoder"]


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("deberta_v2", {"pos_att_type": ["c2p"]}, "has the terms c2p and p2c together, and this model has c2p"),
        ("deberta_v2", {"conv_kernel_size": 3}, "no convolution beside the first block"),
        ("deberta_v2", {"legacy": False}, "under other names, lm_predictions"),
        ("deberta_v2", {"share_att_key": False}, "share_att_key: xscale does not support false"),
        ("deberta_v2", {"position_biased_input": True}, "position_biased_input: xscale does not support true"),
        ("xlnet", {"attn_type": "uni"}, "a causal XLNet has a bias of its logits, and xscale's decoder has none"),
        ("xlnet", {"clamp_len": 4}, "tells all distances apart, and this model those up to 4"),
        ("xlnet", {"bi_data": True}, "bi_data: xscale does not support true"),
    ],
)
def test_what_does_not_map_here_is_refused(
    name: str, changes: dict[str, Any], says: str, folders: dict[str, Path]
) -> None:
    before = (folders[name] / "config.json").read_text()
    change(folders[name], **changes)
    with pytest.raises(ConfigError, match="would map") as caught:
        import_model(folders[name])
    (folders[name] / "config.json").write_text(before)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("deberta_v2", {"position": {"kind": "deberta", "shared": False}}, "model.position.shared"),
        ("deberta_v2", {"embedding_norm": None}, "model.embedding_norm"),
        ("xlnet", {"transform": "gelu"}, "model.transform"),
        ("xlnet", {"position": {"kind": "transformer_xl", "base": 500.0}}, "model.position.base"),
    ],
)
def test_what_does_not_map_there_is_refused(name: str, changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    architecture, section = SECTIONS[name]
    path, _ = checkpoint(tmp_path / "run", {**section, **changes})
    with pytest.raises(ConfigError, match="would map") as caught:
        write.export_model(path, tmp_path / "out", architecture=architecture, say=lambda _: None)
    assert any(key in problem.path for problem in caught.value.problems)


def test_weights_that_a_single_segment_does_not_read_are_left(tmp_path: Path) -> None:
    """Those of segments and of the query stream, which a trained XLNet has."""
    out, weights, _ = exported(tmp_path, "xlnet")
    file = out / "model.safetensors"
    tensors = load_file(file)
    extra = [name for name in tensors if name.endswith(("seg_embed", "r_s_bias", "mask_emb"))]
    assert len(extra) == 2 * 2 + 1
    assert not any(tensors[name].any() for name in extra)
    save_file(tensors | {name: torch.ones_like(tensors[name]) for name in extra}, file, metadata={"format": "pt"})
    back = import_model(out)
    assert back.comparison.within(TOLERANCE)
    assert all(torch.equal(back.weights[name], value) for name, value in weights.items())
    assert json.loads((out / "config.json").read_text())["attn_type"] == "bi"
