"""Megatron-Core's checkpoints: its own GPTModel loads ours with the same logits, and ours is made of what it saves."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from tests.commands.test_import_hf import call
from tests.convert.hf.models import GATED, GROUPED, LENGTH, MIXTURE, VOCABULARY, checkpoint, decoder
from tests.train.tiny import recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.commands.checkpoints import gpt_model, megatron
from xscale.convert import megatron as mapping
from xscale.convert.hf.architecture import ModelSizes
from xscale.convert.hf.compare import build
from xscale.convert.hf.registry import model_of
from xscale.convert.mapping import WeightMapping
from xscale.convert.megatron import gpt_model_arguments
from xscale.core.config import encode
from xscale.core.errors import ConfigError
from xscale.nn.tokens import Tokens

BIASED = {"kind": "attention", "heads": 4, "bias": True}
SIGMOID = {"kind": "topk", "top_k": 2, "score": "sigmoid", "scale": 2.5}
FIRST = {"kind": "topk", "top_k": 1, "normalise": False}
RELU = {"kind": "dense", "hidden": 48, "activation": "relu"}
LLAMA = decoder({**GROUPED, "head_width": 16}, GATED, tied=False, position={"kind": "rope", "base": 500.0})
MIXED = decoder({**GROUPED, "head_width": 16}, MIXTURE, tied=False, position={"kind": "rope", "base": 500.0})
SECTIONS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": decoder(BIASED, {"kind": "dense", "activation": "gelu_tanh", "bias": True}, "layer", "learned"),
    "norms of queries, a part turned": decoder(
        {**GROUPED, "qk_norm": "rms", "bias": True, "output_bias": False},
        {**GATED, "gate": "geglu"},
        position={"kind": "rope", "fraction": 0.5},
    ),
    "mixture": MIXED,
    "mixture of sigmoids": decoder(GROUPED, {**MIXTURE, "router": SIGMOID, "expert": RELU}, "layer", "none"),
    "mixture of one": decoder(GROUPED, {**MIXTURE, "router": FIRST}),
}


def config_for(folder: Path, section: dict[str, Any]) -> Path:
    """A config with that model, whose tokenizer is that of bytes."""
    made = encode(recipe(folder, model=section))
    made["data"]["sequence_length"] = LENGTH
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(made))
    return path


def exported(folder: Path, section: dict[str, Any]) -> tuple[Path, dict[str, Tensor], list[str]]:
    path, weights = checkpoint(folder / "run", section)
    said: list[str] = []
    assert megatron.export_megatron(path, folder / "out", say=said.append) == 0, said
    return folder / "out", weights, said


def imported(source: Path, folder: Path, section: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    said: list[str] = []
    config = config_for(folder, section)
    assert megatron.import_megatron(source, folder / "again", config, [], say=said.append) == 0, said
    held = load_tensors(folder / "again" / "checkpoints" / "step-00000000")
    return {name.removeprefix("model."): one for name, one in held.items() if name.startswith("model.")}, said


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.sampled(3)
def test_out_and_back(name: str, tmp_path: Path) -> None:
    out, weights, said = exported(tmp_path, SECTIONS[name])
    assert "largest logit difference" in said[0]
    # A test of small logits would see nothing.
    assert float(said[0].split("logits up to ")[1].split(",")[0]) > 0.5
    assert not list(tmp_path.glob(".*"))
    back, lines = imported(out, tmp_path, SECTIONS[name])
    assert "the folder's arguments equal the config's" in lines[0]
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[parameter], value) for parameter, value in weights.items())


def own(pieces: Namespace) -> Any:
    """A GPTModel as its users write it, with none of our code."""
    import torch.nn.functional as F
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16}
    llama = {"normalization": "RMSNorm", "layernorm_epsilon": 1e-6, "gated_linear_unit": True, "add_bias_linear": False}
    here = {"use_cpu_initialization": True, "params_dtype": pieces.dtype, "hidden_dropout": 0.0}
    if pieces.experts:
        here |= {"num_moe_experts": pieces.experts, "moe_ffn_hidden_size": 48, "moe_router_topk": 2}
    config = TransformerConfig(**sizes, **llama, **here, ffn_hidden_size=48, activation_func=F.silu)
    layer = get_gpt_layer_local_spec(num_experts=pieces.experts, normalization="RMSNorm")
    rotary = {"position_embedding_type": "rope", "rotary_base": 500}
    model = GPTModel(config, layer, VOCABULARY, LENGTH, **rotary, share_embeddings_and_output_weights=False)
    return model.eval()


def ids() -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def their_logits(model: Any) -> Tensor:
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        found: Tensor = model(ids(), torch.arange(LENGTH).expand(2, LENGTH), hidden)
    return found


def our_logits(section: dict[str, Any], weights: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found: Tensor = build(model_of(section), ModelSizes(VOCABULARY, LENGTH), weights)(Tokens.from_ids(ids()))
    return found


@pytest.mark.parametrize("name", ["llama", "mixture"])
def test_its_own_model_loads_ours(name: str, tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    section = LLAMA if name == "llama" else MIXED
    out, weights, _ = exported(tmp_path, section)
    with gpt_model.single_process_megatron():
        model = own(Namespace(dtype=torch.float32, experts=None if name == "llama" else 4))
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(out)))
        found = their_logits(model)
        with torch.no_grad():
            model.decoder.layers[1].self_attention.linear_qkv.weight[40] *= 1.1
        changed = their_logits(model)
    ours = our_logits(section, weights)
    assert (found - ours).abs().max() < 1e-5
    assert (changed - ours).abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["dense", "mixture", "bfloat16", "blocks by number"])
def test_ours_is_made_of_what_it_saved(kind: str, tmp_path: Path) -> None:
    """Random weights, saved by the library with what its trainer puts beside them: arguments and optimizer states."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    section = MIXED if kind == "mixture" else LLAMA
    folder = tmp_path / "theirs"
    folder.mkdir()
    with gpt_model.single_process_megatron():
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        model = own(Namespace(dtype=dtype, experts=4 if kind == "mixture" else None))
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(mean=float(parameter.dim() == 1), std=0.1)
        state = model.sharded_state_dict(metadata={"non_homogeneous_layers": kind == "blocks by number"})
        state["args"] = Namespace(rotary_base=500, norm_epsilon=1e-6, swiglu=True, lr=0.1)
        name = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
        state[name] = ShardedTensor.from_rank_offsets(name, torch.zeros(32))
        dist_checkpointing.save(state, str(folder))
        wanted = their_logits(model.float())
    weights, said = imported(folder, tmp_path, section)
    assert "gated_linear_unit, layernorm_epsilon, rotary_base" in said[0]
    assert any("without optimizer states" in line for line in said)
    found = our_logits(section, weights)
    assert found.abs().max() > 0.2
    assert (found - wanted).abs().max() < 1e-5
    weights["stack.blocks.0.ffn.norm.weight"][3] += 0.05
    assert (our_logits(section, weights) - wanted).abs().max() > 1e-4
    if kind == "dense":
        config = config_for(tmp_path, {**section, "position": {"kind": "rope", "base": 400.0}})
        with pytest.raises(ConfigError, match=r"its rotary_base is 500, the config's 400\.0"):
            megatron.import_megatron(folder, tmp_path / "other", config, [])
        with gpt_model.single_process_megatron():
            for name in ("silent", "two"):
                (tmp_path / name).mkdir()
            dist_checkpointing.save(model.sharded_state_dict(), str(tmp_path / "silent"))
        assert "the folder has no model arguments" in imported(tmp_path / "silent", tmp_path / "two", section)[1][0]


def swapped(config: Any) -> list[WeightMapping]:
    """A mapping that takes the gates for the values."""
    return [
        replace(one, xscale_names=one.xscale_names[::-1]) if len(one.xscale_names) == 2 else one
        for one in mapping.weights(config)
    ]


def test_a_wrong_mapping_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, _, _ = exported(tmp_path, LLAMA)
    monkeypatch.setattr(megatron, "weights", swapped)
    said: list[str] = []
    path, _ = checkpoint(tmp_path / "other", LLAMA)
    assert megatron.export_megatron(path, tmp_path / "wrong", say=said.append) == 1
    assert "not written" in said[-1]
    config = config_for(tmp_path, LLAMA)
    assert megatron.import_megatron(out, tmp_path / "again", config, [], say=said.append) == 1
    assert "not written" in said[-1]
    assert not (tmp_path / "wrong").exists()
    assert not (tmp_path / "again").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.long
def test_a_run_by_the_command_line(tmp_path: Path) -> None:
    assert run(recipe(tmp_path, model=MIXED)) == 0
    status, said = call("checkpoint", "export", tmp_path / "run", tmp_path / "out", "--to", "megatron")
    assert status == 0, said
    assert json.loads((tmp_path / "out" / megatron.ARGUMENTS).read_text())["transformer_config"]["num_moe_experts"] == 4
    config, again = tmp_path / "run" / "config.yaml", tmp_path / "again"
    words = ("checkpoint", "import", tmp_path / "out", again, config)
    status, said = call(*words, "train.steps=1", "--from", "megatron")
    assert status == 0, said
    assert "largest logit difference" in said
    before, after = (load_tensors(next(one.glob("checkpoints/step-*"))) for one in (tmp_path / "run", again))
    names = [name for name in before if name.startswith("model.")]
    assert all(torch.equal(before[name], after[name]) for name in names)
    status, said = call("train", again / "config.yaml")
    assert status == 0, said
    with pytest.raises(ConfigError, match="already contains a run"):
        call(*words, "--from", "megatron")
    with pytest.raises(ConfigError, match="already exists"):
        call("checkpoint", "export", tmp_path / "run", tmp_path / "out", "--to", "megatron")
    with pytest.raises(ConfigError, match="--architecture"):
        call("checkpoint", "export", tmp_path / "run", tmp_path / "b", "--to", "megatron", "--architecture", "llama")


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    out, _, _ = exported(tmp_path, LLAMA)
    config = config_for(tmp_path, LLAMA)
    run = tmp_path / "new"
    for override, match in (
        ("model.stack.depth=3", r"the model has \[3, "),
        ("model.stack.block.ffn.hidden=64", "the model has"),
        ("model.stack.block.mixer.bias=true", "it lacks|would map"),
        ("model.tied=true", r"it has output_layer\.weight, which the model lacks"),
        ("model.stack.block.norm.eps=1e-5", "its layernorm_epsilon is 1e-06, the config's 1e-05"),
        ("model.stack.block.ffn.gate=geglu", "its activation_func is silu, the config's gelu"),
    ):
        with pytest.raises(ConfigError, match=match):
            megatron.import_megatron(out, run, config, [override])
    with pytest.raises(ConfigError, match="Give a config"):
        megatron.import_megatron(out, run, None, [])
    with pytest.raises(ConfigError, match=r"cannot be read.*iter_0000100"):
        megatron.import_megatron(tmp_path, run, config, [])
    (out / "common.pt").write_bytes(b"x")
    with pytest.raises(ConfigError, match="cannot be read"):
        megatron.import_megatron(out, run, config, [])
    assert not run.exists()


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({**LLAMA, "kind": "encoder"}, "model"),
        (decoder(GROUPED, GATED, position="alibi"), "model.position"),
        (decoder({**GROUPED, "core": "linear"}, GATED), "model.stack.block.mixer.core"),
        (decoder({**GROUPED, "qk_norm": "layer"}, GATED), "model.stack.block.mixer.qk_norm"),
        (decoder(GROUPED, {**GATED, "bias": True}), "model.stack.block.mixer.output_bias"),
        (decoder(GROUPED, {**GATED, "gate": "bilinear"}), "model.stack.block.ffn.gate"),
        (decoder(GROUPED, {"kind": "dense", "activation": "sigmoid"}), "model.stack.block.ffn.activation"),
        (decoder(GROUPED, GATED, {"kind": "layer", "bias": False}), "model.stack.block.norm.bias"),
        (decoder(GROUPED, {**MIXTURE, "shared": GATED}), "model.stack.block.ffn.shared"),
        (decoder(GROUPED, {**MIXTURE, "capacity_factor": 2.0}), "model.stack.block.ffn.capacity_factor"),
        (decoder(GROUPED, {**MIXTURE, "router": "switch"}), "model.stack.block.ffn.router"),
        (decoder(GROUPED, {**MIXTURE, "router": {**SIGMOID, "normalise": False}}), "router.normalise"),
        (decoder(GROUPED, {**MIXTURE, "router": {**SIGMOID, "bias_update_rate": 0.1}}), "router.bias_update_rate"),
        (
            decoder(GROUPED, {**MIXTURE, "router": {"kind": "topk", "balance_over": "global_batch"}}),
            "router.balance_over",
        ),
    ],
)
def test_what_has_no_place_is_refused_by_name(section: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as raised:
        gpt_model_arguments(model_of(section), ModelSizes(VOCABULARY, LENGTH))
    assert any(problem.path.endswith(path) for problem in raised.value.problems), raised.value


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xscale.commands.checkpoints.convert.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"megatron-core is not installed.*pip install 'megatron-core>="):
        call("checkpoint", "export", tmp_path, tmp_path / "out", "--to", "megatron")
