"""`xscale init --from`: a recipe from a config of each trainer, what it leaves out, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_configs import (
    DEEPSPEED,
    LLAMA,
    MEGATRON_SH,
    MEGATRON_YAML,
    NANOCHAT,
    NANOGPT,
    TORCHTITAN,
    TRAINING_ARGUMENTS,
)
from xscale.cli.main import main
from xscale.commands.show.init_from import init_from
from xscale.core.config import encode
from xscale.core.errors import ConfigError
from xscale.recipe import read

CASES: dict[str, tuple[dict[str, str], dict[str, Any], dict[str, str]]] = {
    "Megatron-LM, a script": (
        {"gpt.sh": MEGATRON_SH},
        {
            "model.stack.depth": 4,
            "model.width": 256,
            "model.tied": False,
            "model.position.kind": "rope",
            "model.stack.block.mixer.heads": 8,
            "model.stack.block.mixer.kv_heads": 4,
            "model.stack.block.mixer.bias": False,
            "model.stack.block.ffn.kind": "gated",
            "model.stack.block.ffn.hidden": 640,
            "model.stack.block.norm.kind": "rms",
            "model.dropout": 0.1,
            "data.sequence_length": 128,
            "train.steps": 5000,
            "train.batch_size": 64,
            "train.micro_batch_size": 4,
            "train.clip_grad_norm": 0.5,
            "optimizer.lr": 6e-4,
            "optimizer.beta2": 0.95,
            "optimizer.weight_decay": 0.01,
            "schedule.kind": "cosine",
            "schedule.warmup_steps": 50,
            "schedule.min_lr_ratio": 0.1,
            "precision.compute": "bfloat16",
            "parallel.mesh.tp": 2,
            "parallel.tensor.sequence": True,
            "parallel.zero.stage": 1,
            "run.seed": 1234,
        },
        {
            "save": "only the shell knows",
            "data_path": "data.prepared",
            "no_such_flag": "no counterpart is known",
            "max_position_embeddings": "data.sequence_length",
            "nproc_per_node": "xscale launch",
        },
    ),
    "Megatron-LM, a YAML with experts": (
        {"moe.yaml": MEGATRON_YAML},
        {
            "model.stack.block.ffn.kind": "moe",
            "model.stack.block.ffn.experts": 8,
            "model.stack.block.ffn.router.top_k": 2,
            "model.stack.block.ffn.router.aux_loss_weight": 0.02,
            "model.stack.block.ffn.expert.kind": "gated",
            "model.stack.block.ffn.expert.hidden": 64,
            "model.stack.block.ffn.shared.kind": "gated",
            "model.stack.block.ffn.shared.hidden": 256,
            "model.stack.block.norm.kind": "layer",
            "model.stack.block.mixer.bias": True,
            "model.position.kind": "learned",
            "model.tied": True,
            "parallel.mesh.ep": 2,
            "train.steps": 100,
            "schedule.warmup_steps": 10,
            # The default, because the value has no counterpart: linear, down to 0.
            "schedule.kind": "wsd",
            "schedule.decay_steps": 90,
            "schedule.min_lr_ratio": 0.0,
        },
        {"lr_decay_style": "no counterpart; these have one: cosine", "moe_grouped_gemm": "chosen by itself"},
    ),
    "torchtitan": (
        {"llama3_8b.toml": TORCHTITAN},
        {
            "run.dir": "./outputs",
            "model.width": 4096,
            "model.stack.depth": 32,
            "model.stack.block.mixer.kv_heads": 8,
            "model.stack.block.ffn.hidden": 14336,
            "model.position.base": 500000.0,
            "data.tokenizer.vocabulary": 128256,
            "data.sequence_length": 8192,
            "train.batch_size": 8,
            "train.micro_batch_size": 1,
            "schedule.kind": "wsd",
            "schedule.decay_steps": 800,
            "schedule.min_lr_ratio": 0.1,
            "parallel.mesh.dp_shard": 8,
            "parallel.mesh.tp": 2,
            "parallel.zero.stage": 3,
            "parallel.recompute.granularity": "selective",
            "checkpoint.every_steps": 250,
            "precision.compute": "bfloat16",
        },
        {"training.dataset": "data.source", "quantize.linear.float8.filter_fqns": "no counterpart is known"},
    ),
    "DeepSpeed": (
        {"ds_config.json": json.dumps(DEEPSPEED)},
        {
            "train.batch_size": 32,
            "train.micro_batch_size": 4,
            "train.steps": 110,
            "optimizer.beta2": 0.95,
            "schedule.kind": "wsd",
            "schedule.decay_steps": 100,
            "parallel.zero.stage": 2,
            "precision.compute": "bfloat16",
        },
        {
            "gradient_accumulation_steps": "the trainer fills it in",
            "zero_optimization.overlap_comm": "chosen by itself",
            "aio.block_size": "data.sequence_length",
        },
    ),
    "HF Trainer with config.json": (
        {"args.json": json.dumps(TRAINING_ARGUMENTS), "config.json": json.dumps(LLAMA)},
        {
            "run.dir": "out",
            "model.width": 64,
            "model.stack.block.mixer.kv_heads": 2,
            "model.stack.block.ffn.hidden": 128,
            "data.tokenizer.vocabulary": 512,
            "data.sequence_length": 256,
            "train.micro_batch_size": 4,
            "train.batch_size": 32,
            "train.steps": 1000,
            "schedule.kind": "cosine",
            "schedule.warmup_steps": 50,
            "schedule.min_lr_ratio": 0.0,
            "optimizer.weight_decay": 0.0,
            "checkpoint.keep_last": 2,
            "parallel.recompute.every": 1,
        },
        {"report_to": "observe.wandb", "neftune_noise_alpha": "no counterpart is known"},
    ),
    "a model's config.json": (
        {"config.json": json.dumps(LLAMA)},
        {"model.stack.depth": 2, "data.tokenizer.vocabulary": 512},
        {},
    ),
    "nanoGPT": (
        {"train_shakespeare.py": NANOGPT},
        {
            "run.dir": "out-shakespeare",
            "model.stack.depth": 6,
            "model.width": 384,
            "model.stack.block.mixer.dropout": 0.2,
            "data.sequence_length": 256,
            "train.micro_batch_size": 64,
            "train.batch_size": 2560,
            "optimizer.lr": 1e-3,
            "optimizer.beta2": 0.99,
            "schedule.min_lr_ratio": 0.1,
        },
        {"dataset": "data.source"},
    ),
    "nanochat": (
        {"speedrun.sh": NANOCHAT},
        {
            "model.stack.depth": 12,
            "model.width": 768,
            "model.stack.block.mixer.heads": 6,
            "data.sequence_length": 1024,
            "train.micro_batch_size": 16,
            "train.batch_size": 512,
            "train.steps": 2000,
            "optimizer.kind": "muon",
            "optimizer.lr": 0.02,
            "schedule.decay_steps": 1000,
            "precision.float8": "tensor",
        },
        {"window_pattern": "model.stack.rules", "standalone": "xscale launch"},
    ),
}


def written(folder: Path, files: dict[str, str]) -> list[Path]:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def value_at(data: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(data, dict):
            # A part at its defaults is written by its kind alone.
            return data if name == "kind" else None
        data = data.get(name)
    return data.get("kind") if path.endswith(".kind") and isinstance(data, dict) else data


@pytest.mark.parametrize("name", CASES)
def test_a_config_becomes_a_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files, expected, left_out = CASES[name]
    init_from(None, written(tmp_path, files), Path("mine.yaml"))
    recipe, _ = read(Path("mine.yaml"), [])
    data = encode(recipe)
    assert {path: value_at(data, path) for path in expected} == expected
    printed = capsys.readouterr().out
    text = Path("mine.yaml").read_text(encoding="utf-8")
    for key, why in left_out.items():
        (line,) = [line for line in printed.splitlines() if line.startswith(f"  {key} = ")]
        assert why in line
        assert f"# - {key} = " in text
    assert not Path("ran").exists(), "a config is never run"
    count = sum(line.startswith("  ") and " = " in line for line in printed.splitlines())
    assert f"{count} key" in printed or not left_out


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "no config of a trainer": (
        {"a.json": '{"name": "x", "version": 1}'},
        "Looked for: a shell script with Megatron-LM's",
    ),
    "another ending": ({"a.ini": "[a]"}, "by its ending"),
    "no JSON": ({"a.json": "{"}, "is not JSON"),
    "no TOML": ({"a.toml": "= 1"}, "is not TOML"),
    "no Python": ({"a.py": "n_layer = ("}, "is not Python"),
    "a quote that does not close": ({"a.sh": 'python x.py --num-layers "4'}, "is not a shell script"),
    "a list": ({"a.yaml": "- 1"}, "has no keys"),
    "not UTF-8": ({"a.py": "n_layer = '\udcff'"}, "UTF-8"),
    "a recipe that the check refuses": (
        {"a.sh": MEGATRON_SH.replace("TP=2", "TP=3")},
        "does not pass the check of `xscale plan`, so nothing is written",
    ),
    "two trainers": ({"a.sh": MEGATRON_SH, "b.toml": TORCHTITAN}, "are of one kind"),
    "a model of an unknown type": ({"config.json": '{"model_type": "nonesuch"}'}, "no mapping for 'nonesuch'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_a_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts, message = REFUSED[name]
    files = []
    for file, text in texts.items():
        (tmp_path / file).write_bytes(text.encode("utf-8", "surrogateescape"))
        files.append(tmp_path / file)
    with pytest.raises(ConfigError) as error:
        init_from(None, files, Path("mine.yaml"))
    assert message in str(error.value)
    assert not Path("mine.yaml").exists()


COMMANDS = {
    "two files": (
        "--from args.json --from config.json --out new.yaml",
        0,
        "wrote new.yaml from a config of HF Trainer",
    ),
    "a file that exists": ("--from args.json --out args.yaml", 2, "args.yaml: the file exists, and is not overwritten"),
    "a recipe too": ("quickstart --from args.json --out new.yaml", 2, "Give a recipe or --from."),
    "a missing file": ("--from nothere.json --out new.yaml", 2, "nothere.json: cannot be read: No such file"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {**CASES["HF Trainer with config.json"][0], "args.yaml": ""})
    words, status, message = COMMANDS[name]
    monkeypatch.setattr(sys, "argv", ["xscale", "init", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code or 0) == status
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert Path("new.yaml").exists() == (status == 0)
