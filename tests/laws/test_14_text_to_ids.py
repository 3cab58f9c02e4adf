"""Law 14: text becomes ids in one place. Others call `encode_document` or `encode_prompt`, which know begin and end."""

import ast
from pathlib import Path

from tests.laws.bent import unbent
from tests.laws.tree import ROOT, dotted, files, plant

PLACE = "xscale/data/tokenizer/"
PARTS = frozenset({"encode", "encode_with_offsets", "EncodeAsIds", "encode_batch"})
"""Methods that encode a part of a text, without begin and end."""
TOKENIZERS = ("tokenizer", "processor")
"""Ends of the names of what they are called on: of ours, and of libraries."""


def violations(root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in files(root):
        if file.path.startswith(PLACE):
            continue
        for node in file.nodes:
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = dotted(node.func.value).split(".")[-1]
            if node.func.attr in PARTS and owner.endswith(TOKENIZERS):
                what = f"{ast.unparse(node.func)}: call encode_document or encode_prompt, which know begin and end"
                found[file.at(node, node.func.attr)] = what
    return found


def test_text_becomes_ids_in_one_place() -> None:
    assert unbent("text to ids", violations(ROOT)) == []


def test_a_file_that_encodes_by_itself_is_caught(tmp_path: Path) -> None:
    encodes = "def read(loaded, text):\n    return loaded.tokenizer.encode(text)\n"
    plant(tmp_path, xscale__train__new=encodes, xscale__data__tokenizer__new=encodes)
    plant(tmp_path, xscale__train__right=encodes.replace("encode", "encode_prompt"))
    assert list(violations(tmp_path)) == ["xscale/train/new.py:2: encode"]
