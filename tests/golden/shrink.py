"""The recipes of configs/run and configs/xformer, made small enough to train for a few steps in a test."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xscale.core.config import decode, encode
from xscale.objective.labelled import Classify
from xscale.recipe import Recipe, read

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs/run").glob("*.yaml"))
VARIANTS = sorted((ROOT / "configs/xformer").glob("*.yaml"))
STEPS = 3
LIMITS = {
    "width": 32,
    "depth": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 8,
    "hidden": 48,
    "experts": 8,
    "block": 16,
}


def small(recipe: Path, folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe with small sizes, bytes of a fixed text for data, and float64, so that losses hold on any machine."""
    data: dict[str, Any] = encode(read(recipe, list(overrides))[0])
    data["model"] = shrunk(data["model"])
    data["run"] = {"dir": str(folder / "run"), "seed": 7, "device": "cpu"}
    data["data"] |= {
        "source": _corpus(recipe, folder),
        "tokenizer": {"kind": "byte"},
        "folder": str(folder / "data"),
        # Of pairs of sentences, whose bytes are more than 64 for most of the text.
        "sequence_length": 256 if read(recipe, [])[0].has_sentences else 64,
        "validation": 0.2,
        "workers": 1,
    }
    longest = data["data"].get("max_source_length")
    data["data"]["max_source_length"] = longest and min(longest, data["data"]["sequence_length"])
    sizes = {"steps": STEPS, "batch_size": 4, "micro_batch_size": 2, "eval_every": 0, "baseline": False}
    data["train"] |= {**sizes, "bleu_pairs": 0, "sample": {"prompts": []}}
    if data["distill"] is not None:
        data["distill"]["train_teacher"]["train"]["steps"] = 1
    data["precision"] = {"compute": "float64", "master": "float64"}
    data["parallel"] |= {"mesh": {}, "zero": {"stage": 0}}
    data["checkpoint"] |= {"every_steps": 0}
    data["observe"] |= {"progress": False, "tensorboard": False, "report": False}
    return decode(Recipe, data)


def _corpus(recipe: Path, folder: Path) -> dict[str, Any]:
    """The fixed text; its lines by twos for a recipe of pairs; with the class of their length for one of labels."""
    corpus = ROOT / "tests/golden/old_run/corpus"
    settings = read(recipe, [])[0]
    if isinstance(settings.objective, Classify.Config):
        return _labelled(corpus, folder, settings.objective.classes)
    if settings.has_sentences:
        return {"kind": "text", "paths": [str(corpus / "*.txt")], "document": "paragraph"}
    if not settings.has_pairs:
        return {"kind": "text", "paths": [str(corpus / "*.txt")]}
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(corpus.glob("*.txt")))
    lines = [line for line in text.splitlines() if line.strip()]
    rows = [{"source": one, "target": two} for one, two in zip(lines[::2], lines[1::2], strict=False)]
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"kind": "pairs", "paths": [str(file)]}


def _labelled(corpus: Path, folder: Path, classes: int) -> dict[str, Any]:
    names = [f"class {number}" for number in range(classes)]
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(corpus.glob("*.txt")))
    rows = [{"text": line, "label": names[len(line) % classes]} for line in text.splitlines() if line.strip()]
    file = folder / "labelled.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"kind": "labelled", "paths": [str(file)], "classes": names}


def shrunk(value: Any) -> Any:
    """Part of a recipe with sizes of at most LIMITS."""
    if isinstance(value, dict):
        # A stack that pools between blocks names them by number.
        kept = ("depth",) if value.get("pooling") else ()
        return {key: item if key in kept else _limited(key, item) for key, item in value.items()}
    return [shrunk(item) for item in value] if isinstance(value, list | tuple) else value


def _limited(key: str, value: Any) -> Any:
    if key in LIMITS and isinstance(value, int) and not isinstance(value, bool):
        return min(value, LIMITS[key])
    return shrunk(value)
