"""Tables of config keys: each is read by an import and written by an export."""

from typing import Any

import pytest

from xscale.convert.hf.architecture import ModelSizes, Requirements
from xscale.convert.hf.keys import keys_from_hf
from xscale.convert.hf.registry import model_of
from xscale.convert.hf.tables.keys import ByKey, ByLayer, LayerKinds, Reading, SameKey, merged, names_in, read_table
from xscale.convert.hf.tables.tensors import Moved, with_rows
from xscale.convert.hf.types import bart, bert, layer_norm, llama, relative

TYPES = {"bert": bert.BERT, "gpt2": layer_norm.GPT2, "gpt_neox": layer_norm.GPT_NEOX, "xlnet": relative.XLNET}
TYPES |= {"llama": llama.LLAMA, "bart": bart.BART}
SIZES = {"hidden_size": 48, "n_embd": 48, "d_model": 48, "num_attention_heads": 6, "n_head": 6, "init_std": 0.03}
SIZES |= {
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "n_inner": 100,
}


@pytest.mark.parametrize("name", TYPES)
def test_every_key_goes_both_ways(name: str) -> None:
    """Each key that the table honours comes back, from a config with other values than the library's defaults."""
    import transformers

    changes: dict[str, Any] = {"initializer_range": 0.03, "layer_norm_eps": 3e-4, "rms_norm_eps": 3e-4, **SIZES}
    kind = transformers.CONFIG_MAPPING[name]
    known = kind().to_dict()
    data = kind(**{key: value for key, value in changes.items() if key in known}).to_dict()
    require = Requirements("xscale")
    model = model_of(TYPES[name].from_hf(data, require))
    sizes = ModelSizes(data["vocab_size"], data.get("max_position_embeddings") or 512)
    written = TYPES[name].to_hf(model, sizes, require)
    assert require.problems == []
    keys = names_in(TYPES[name].model) - {"rope_theta"}
    assert len(keys) > 8
    assert {key: written[key] for key in keys} == {key: data[key] for key in keys}


def test_the_keys_of_a_table_are_those_of_all_its_sections() -> None:
    kinds = LayerKinds.listed("layer_types")
    table = {
        "a": ByKey("kind", {"x": SameKey("x_size"), "y": None}),
        "b": ByLayer(kinds, {"z": SameKey("z_size")}),
    }
    assert names_in(table) == {"kind", "x_size", "layer_types", "z_size"}


@pytest.mark.parametrize(
    ("table", "changes", "result"),
    [
        ({"kind": "rms", "eps": 1}, {"eps": 2}, {"kind": "rms", "eps": 2}),
        ({"kind": "rms", "eps": 1}, {"kind": "layer"}, {"kind": "layer"}),
        ({"ffn": {"kind": "gated", "bias": 1}}, {"ffn": {"gate": 2}}, {"ffn": {"kind": "gated", "bias": 1, "gate": 2}}),
        ({"norm": {"kind": "rms"}}, {"norm": None}, {"norm": None}),
    ],
    ids=["a value", "another kind", "a section", "nothing"],
)
def test_changes_are_merged_into_sections_of_the_same_kind(table: Any, changes: Any, result: Any) -> None:
    assert merged(table, changes) == result


def test_a_row_takes_the_place_of_those_with_one_of_its_names() -> None:
    fused = Moved("qkv")
    assert with_rows({"q": "q", "k": "k", "o": "o"}, {"q k": fused}) == {"o": "o", "q k": fused}
    assert with_rows({"q k": fused, "o": "o"}, {"q": "q"}) == {"o": "o", "q": "q"}


def test_a_dropout_of_an_integer_is_read() -> None:
    section = keys_from_hf({"attn_pdrop": "stack.block.mixer.dropout"}, {"attn_pdrop": 0}, {})
    assert section == {"stack": {"block": {"mixer": {"dropout": 0.0}}}}
    assert isinstance(section["stack"]["block"]["mixer"]["dropout"], float)
    dropout = read_table({"dropout": SameKey("attn_pdrop")}, Reading({"attn_pdrop": 0}, Requirements("xscale")))
    assert isinstance(dropout["dropout"], float)
