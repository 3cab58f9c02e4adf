"""Runs small enough for a test: a few kilobytes of text, byte tokens, a model of two blocks."""

import json
from pathlib import Path
from typing import Any

from xscale.core.config import decode
from xscale.recipe import Recipe
from xscale.train.run import train

ROOT = Path(__file__).parents[2]

MIXTURE = {
    "kind": "decoder",
    "width": 32,
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2},
            "ffn": {"kind": "gated", "hidden": 48},
            "dropout": 0.1,
        },
        "rules": [
            {
                "every": 2,
                "at": 1,
                "mixer": {
                    "kind": "attention",
                    "heads": 4,
                    "core": {"kind": "block_sparse", "block": 8, "pattern": {"kind": "fixed"}},
                },
                "ffn": {
                    "kind": "moe",
                    "experts": 4,
                    "capacity_factor": 1.25,
                    "router": {"kind": "switch", "jitter": 0.05},
                    "expert": {"kind": "gated", "hidden": 48},
                },
            }
        ],
    },
}


def recipe(folder: Path, name: str = "run", **sections: dict[str, Any]) -> Recipe:
    """A recipe whose data and run lie in `folder`; a section's keys are laid over the defaults."""
    data: dict[str, Any] = {
        "run": {"dir": str(folder / name), "seed": 3, "device": "cpu"},
        "model": MIXTURE,
        "objective": {"kind": "causal"},
        "data": {
            "source": {"kind": "text", "paths": [str(ROOT / "xscale" / "core" / "*.py"), str(ROOT / "LICENSE")]},
            "tokenizer": {"kind": "byte"},
            "folder": str(folder / "data"),
            "sequence_length": 32,
            "validation": 0.3,
            "workers": 1,
        },
        "train": {"steps": 6, "batch_size": 8, "micro_batch_size": 2, "eval_every": 3, "eval_sequences": 5},
        "schedule": {"kind": "cosine", "warmup_steps": 2},
        "checkpoint": {"every_steps": 0},
        "observe": {"progress": False, "tensorboard": False, "report": False},
    }
    data["train"]["baseline"] = False
    for key, section in sections.items():
        data[key] = section if key in ("model", "plugins") else {**data.get(key, {}), **section}
    return decode(Recipe, data)


def run(one: Recipe) -> int:
    """Check and train."""
    from xscale.mesh.environment import read_rank_info

    rank_info = read_rank_info()
    # The first rank checks for all: each would find the same.
    problems = one.check(rank_info.world) if rank_info.rank == 0 else []
    assert not problems, problems
    return train(one)


def metrics(folder: Path, run: str = "run") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    lines = (folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def losses(folder: Path, run: str = "run") -> list[float]:
    """The loss of every step."""
    return [line["loss"] for line in metrics(folder, run) if "loss" in line]
