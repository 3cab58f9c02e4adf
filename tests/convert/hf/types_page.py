"""The list of model types in docs/how-to/hugging-face.md: `python -m tests.convert.hf.types_page --write` draws it."""

import sys
from pathlib import Path

from xscale.convert.hf.architecture import Architecture
from xscale.convert.hf.registry import ARCHITECTURES

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "hugging-face.md"
FIRST, LAST = "<!-- types: first line -->\n", "<!-- types: last line -->\n"
PARTS = {
    "kv_lora_rank": "latent attention",
    "sliding_window": "windows",
    "window_size": "windows",
    "attention_window": "windows",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "moe_num_experts": "experts",
    "n_shared_experts": "shared experts",
    "num_shared_experts": "shared experts",
    "moe_num_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "no_rope_layers": "layers without positions",
    "attn_logit_softcapping": "soft caps",
    "final_logit_softcapping": "soft caps",
    "embedding_size": "factorised embeddings",
}
"""Keys of config.json that say which parts a type has."""


def drawn() -> str:
    """Return the table: a line for each type, in the order in which an export tries them."""
    lines = ["| `model_type` | class | model | parts |", "|---|---|---|---|"]
    return "\n".join([*lines, *map(_line, ARCHITECTURES)]) + "\n"


def _line(architecture: Architecture) -> str:
    parts = dict.fromkeys(part for key, part in PARTS.items() if key in architecture.config_keys)
    kind = architecture.kind.replace("_", "-")
    return f"| `{architecture.name}` | `{architecture.loader}` | {kind} | {', '.join(parts)} |"


def on_page(text: str) -> str:
    """Return what stands between the two marks."""
    return text.split(FIRST)[1].split(LAST)[0]


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    if "--write" in sys.argv:
        page = page.replace(FIRST + on_page(page) + LAST, FIRST + drawn() + LAST)
        PAGE.write_text(page, encoding="utf-8")
    print(drawn())
