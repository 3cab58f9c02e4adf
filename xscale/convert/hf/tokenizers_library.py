"""Convert xscale's own tokenizers to those of the tokenizers library."""

from typing import Any

from xscale.data.tokenizer.sentencepiece import SPACE, SentencePiece
from xscale.data.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer, special_tokens


def convert_sentencepiece(tokenizer: SentencePiece) -> Any:
    """Convert a SentencePiece model to the tokenizers library, without normalisation, as xscale trains it."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    processor, unk = tokenizer.processor, tokenizer.unk
    scored = [
        (processor.IdToPiece(token), processor.GetScore(token))
        for token in range(tokenizer.vocabulary)
    ]
    if tokenizer.config.model == "unigram":
        model: Any = models.Unigram(scored, unk_id=unk, byte_fallback=True)
    else:
        ids = {piece: token for token, (piece, _) in enumerate(scored)}
        ordinary = [
            token for token in range(tokenizer.vocabulary) if not _is_special(processor, token)
        ]
        merges, unk_token = _merges(scored, ordinary, ids), SPECIAL_TOKENS[unk]
        model = models.BPE(
            vocab=ids, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True
        )
    exported = tokenizers.Tokenizer(model)
    exported.normalizer = normalizers.Replace(" ", SPACE)
    exported.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _add_special_tokens(exported, tokenizer)


def _merges(
    scored: list[tuple[str, float]], ordinary: list[int], ids: dict[str, int]
) -> list[tuple[str, str]]:
    """Return every pair of pieces that makes another piece, by decreasing score of the merged piece."""
    known = {scored[token][0] for token in ordinary}
    merges = []
    for token in ordinary:
        piece, score = scored[token]
        splits = [(piece[:index], piece[index:]) for index in range(1, len(piece))]
        pairs = [pair for pair in splits if known.issuperset(pair)]
        merges += [(-score, ids[first], ids[second], first, second) for first, second in pairs]
    return [(first, second) for *_, first, second in sorted(merges)]


def _is_special(processor: Any, token: int) -> bool:
    return bool(processor.IsControl(token) or processor.IsUnknown(token) or processor.IsByte(token))


def convert_bytes(tokenizer: Tokenizer) -> Any:
    """Convert the byte tokenizer to a BPE model without merges, whose byte fallback applies to every character."""
    import tokenizers
    from tokenizers import decoders, models

    names = special_tokens(len(tokenizer.sentinels))
    ids = {name: token for token, name in enumerate(names)}
    ids |= {f"<0x{value:02X}>": tokenizer.encode("\0")[0] + value for value in range(256)}
    model = models.BPE(
        vocab=ids, merges=[], unk_token=SPECIAL_TOKENS[tokenizer.unk], byte_fallback=True
    )
    exported = tokenizers.Tokenizer(model)
    exported.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return _add_special_tokens(exported, tokenizer)


def _add_special_tokens(exported: Any, tokenizer: Tokenizer) -> Any:
    from tokenizers import AddedToken

    names = special_tokens(len(tokenizer.sentinels))
    exported.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in names]
    )
    return exported


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    names = dict(
        zip(
            ("pad_token", "bos_token", "eos_token", "unk_token", "mask_token"),
            SPECIAL_TOKENS,
            strict=True,
        )
    )
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **names,
    }
