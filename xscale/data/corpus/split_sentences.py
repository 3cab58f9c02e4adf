"""Sentences of a text by a plain rule: one ends at the end of a line, or at punctuation that ends sentences."""

import re

_END = re.compile(
    r"""\n(?:[^\S\n]*\n)*  # the end of a line, and blank lines after it
    | [.!?]+["'\u201d\u2019)\]]*[^\S\n]+(?![^\S\n]|[a-z])  # . ! ?, quotes, brackets, spaces, and no small letter
    | [\u3002\uff01\uff1f]+["'\u201d\u2019\u300d\u300f\uff09]*  # full-width ones, after which there is no space
    """,
    re.VERBOSE,
)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, which joined are the text: white space belongs to the sentence before it, and
    indentation to the one after it. An abbreviation before a capital letter ends a sentence, as in "Dr. Who"."""
    sentences: list[str] = []
    start, blank = 0, ""
    for end in [*(match.end() for match in _END.finditer(text)), len(text)]:
        piece = blank + text[start:end]
        blank = ""
        if piece.strip():
            sentences.append(piece)
        elif sentences:
            sentences[-1] += piece
        else:
            blank = piece
        start = end
    return sentences or [blank]
