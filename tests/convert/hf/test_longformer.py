"""Longformer's windows and projections of global tokens, in and out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.convert.hf.test_convert import change, exported
from xscale.convert.hf import compare
from xscale.convert.hf import registry as choose
from xscale.convert.hf.compare import TOLERANCE
from xscale.convert.hf.import_model import import_model
from xscale.core.errors import ConfigError


def test_longformers_windows_and_global_projections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, weights, _ = exported(tmp_path, "longformer of two windows")
    assert json.loads((out / "config.json").read_text())["attention_window"] == [4, 8]
    tensors = load_file(out / "model.safetensors")
    layer = "longformer.encoder.layer.1.attention.self"
    for name, mine in (("query", "q"), ("key", "k"), ("value", "v")):
        assert torch.equal(
            tensors[f"{layer}.{name}_global.weight"], weights[f"stack.blocks.1.mixer.part.{mine}.weight"]
        )
    # Texts that no window spans, however short those that other models are compared on.
    monkeypatch.setattr(compare, "LENGTH", 4)
    back = import_model(out)
    assert back.comparison.tokens == 2 * 16
    stack = choose.model_of(back.model).stack
    assert [stack.block_config(at).mixer.core.pattern.left for at in range(2)] == [2, 4]
    change(out, attention_window=10)
    assert choose.model_of(import_model(out).model).stack.rules == ()
    for wrong in ([4], 5, [4, 2]):
        change(out, attention_window=wrong)
        with pytest.raises(
            ConfigError, match=r"attention_window: .* not an even number of at least 4 tokens for each of 2 layers"
        ):
            import_model(out)
    change(out, attention_window=[4, 10])
    with pytest.raises(ConfigError, match=r"attention_window: windows of 4 tokens do not divide the largest, of 10"):
        import_model(out)


def test_longformers_global_projections_make_its_first_token_global(tmp_path: Path) -> None:
    """A file that transformers wrote does not say which tokens are global; other projections say that some were."""
    out, weights, _ = exported(tmp_path, "longformer with global tokens")
    config = json.loads((out / "config.json").read_text())
    assert config.pop("global_token_indices") == [0, 5]
    (out / "config.json").write_text(json.dumps(config))
    back = import_model(out)
    mixer = choose.model_of(back.model).stack.block_config(1).mixer
    assert (mixer.kind, mixer.global_token_indices) == ("longformer", (0,))
    name = "stack.blocks.1.mixer.part.global_k.weight"
    assert torch.equal(back.weights[name], weights[name])
    assert back.comparison.within(TOLERANCE)
