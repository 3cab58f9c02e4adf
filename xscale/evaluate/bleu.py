"""BLEU (Papineni et al. 2002) of the targets that a run writes by beam search, computed by sacrebleu (Post 2018)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xscale.core.errors import ConfigError
from xscale.data.samples.blend import BlendedDataset
from xscale.data.samples.pairs import PairDataset
from xscale.distill.distill import DistilledObjective
from xscale.evaluate.evaluate_run import evaluation_data
from xscale.generate.beam_search import PenaltyForm, beam_search
from xscale.generate.generate import generate, lay_out_matrices
from xscale.generate.parallel_decoding import decode_in_parallel
from xscale.objective.disco import Disco
from xscale.parallel.plan import DTYPES
from xscale.parallel.precision import precision
from xscale.run.load_run import LoadedRun, load_run
from xscale.run.parts import RunParts


@dataclass(frozen=True)
class Bleu:
    """BLEU of a run on pairs, from 0 to 100."""

    step: int
    pairs: int
    bleu: float
    source_bleu: float
    """BLEU of the sources as they stand, which a model that copies would have."""
    signature: str
    """Settings of sacrebleu, which belong to a published number."""


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Return the BLEU of texts with one reference each, and the signature. ConfigError without sacrebleu."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        fix = "Install it: pip install 'sacrebleu>=2.4'."
        raise ConfigError(
            "--bleu", "it is computed by sacrebleu, which is not installed", fix
        ) from None
    metric = BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return float(score.score), str(metric.get_signature())


def evaluate_bleu(
    folder: Path,
    sequences: int | None,
    *,
    beams: int = 4,
    length_penalty: float = 0.6,
    penalty_form: PenaltyForm = "wu",
    source: str | None = None,
    plugins: bool = False,
) -> Bleu:
    """Write the targets of the run's first `sequences` validation pairs, or of those in `source`; None: of all.

    On one process. ConfigError for a run without pairs, and without sacrebleu before anything is computed.
    """
    corpus_bleu(["a"], ["a"])
    loaded = load_run(folder, plugins=plugins)
    if not loaded.settings.has_pairs:
        what = (
            f"the objective {loaded.settings.objective.kind} has no pairs of a source and a target"
        )
        raise ConfigError("--bleu", what, "Use the run of seq2seq.")
    if not loaded.mesh.rank_info.is_single_process:
        raise ConfigError("--bleu", "beam search runs on one process", "Start one.")
    with evaluation_data(loaded, source) as data:
        if data is None:
            raise ConfigError(
                str(folder), "the run has no validation documents", "Give other pairs with --data."
            )
        dataset: Any = data.batches.loader.data
        texts = [_pair(dataset, index) for index in range(data.count(sequences))]
        objective = data.objective
    decode = loaded.tokenizer.decode
    penalty: dict[str, Any] = {"length_penalty": length_penalty, "penalty_form": penalty_form}
    hypotheses = _written(loaded, objective, [ids for ids, _ in texts], beams, penalty)
    references = [decode(target) for _, target in texts]
    score, signature = corpus_bleu([decode(ids) for ids in hypotheses], references)
    of_sources, _ = corpus_bleu([decode(ids) for ids, _ in texts], references)
    return Bleu(loaded.step, len(texts), score, of_sources, signature)


def bleu_at_end(parts: RunParts, on_token: Callable[[], None]) -> str | None:
    """Write the targets of the run's first `train.bleu_pairs` validation pairs, each token the likeliest; return a
    sentence with their BLEU and that of the sources as they stand. None: no pairs, or not rank 0. Collective.

    `on_token` is called on all ranks at each token; where a target is written in parallel, before each of them."""
    settings = parts.settings
    corpus = parts.corpus
    device = parts.mesh.device
    count, is_rank0 = settings.train.bleu_pairs, parts.mesh.rank_info.is_rank0
    if not count or corpus.validation is None:
        return None
    dataset: Any = corpus.validation.data
    pairs = [_pair(dataset, index) for index in range(min(count, len(dataset)))]
    objective = parts.objective
    if isinstance(objective, DistilledObjective):
        objective = objective.objective
    if isinstance(objective, Disco) and not parts.mesh.rank_info.is_single_process:
        what = "no BLEU: parallel decoding runs on one process. Take `xscale eval RUN --bleu`"
        return what if is_rank0 else None
    start = torch.tensor([objective.start], device=device)
    hypotheses: list[list[int]] = []

    def stops(written: list[int]) -> bool:
        on_token()
        return False

    for ids, _ in pairs:
        on_token()
        read = objective.source_of(ids[: settings.data.source_length - 1])
        source = torch.tensor(read, device=device)
        if isinstance(objective, Disco):
            longest = settings.data.target_length
            hypotheses.append(decode_in_parallel(parts.model, source, objective, longest))
            continue
        written = generate(
            parts.model,
            start,
            settings.data.target_length,
            end=corpus.tokenizer.eos,
            window=settings.data.sequence_length,
            temperature=0.0,
            source=source,
            stops=stops,
        )
        hypotheses.append(written.tolist())
    if not is_rank0:
        return None
    decode = corpus.tokenizer.decode
    references = [decode(target) for _, target in pairs]
    try:
        score, signature = corpus_bleu([decode(ids) for ids in hypotheses], references)
    except ConfigError as error:
        # A run that has trained to its end does not fail because a package is missing.
        (problem,) = error.problems
        return f"no BLEU: {problem.what}. {problem.advice}"
    of_sources, _ = corpus_bleu([decode(ids) for ids, _ in pairs], references)
    return f"BLEU {score:.2f} on {len(pairs)} validation pairs; of copying the source: {of_sources:.2f} ({signature})"


def _pair(dataset: PairDataset | BlendedDataset, index: int) -> tuple[list[int], list[int]]:
    if isinstance(dataset, BlendedDataset):
        number, within = dataset.locate(index)
        blended: Any = dataset.datasets[number]
        return _pair(blended, within)
    return dataset.pair(index)


def _written(
    loaded: LoadedRun, objective: Any, sources: list[list[int]], beams: int, penalty: dict[str, Any]
) -> list[tuple[int, ...]]:
    """Search the target of each source, which is truncated as in training."""
    settings, device = loaded.settings, loaded.mesh.device
    precision.cast_parameters(
        loaded.model, DTYPES[settings.precision.compute], DTYPES[settings.precision.master]
    )
    lay_out_matrices(loaded.model)
    prompt = torch.tensor([objective.start], device=device)
    results: list[tuple[int, ...]] = []
    with torch.inference_mode():
        for ids in sources:
            read = objective.source_of(ids[: settings.data.source_length - 1])
            if isinstance(objective, Disco):
                source = torch.tensor(read, device=device)
                results.append(
                    tuple(
                        decode_in_parallel(
                            loaded.model, source, objective, settings.data.target_length
                        )
                    )
                )
                continue
            hypotheses = beam_search(
                loaded.model,
                prompt,
                settings.data.target_length,
                end=loaded.tokenizer.eos,
                beams=beams,
                **penalty,
                source=torch.tensor(read, device=device),
                window=settings.data.sequence_length,
            )
            results.append(hypotheses[0].ids)
    return results
