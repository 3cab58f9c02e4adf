"""Generation of text token by token, with the mixers' KV caches and states, and the samples after the last step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from xscale.core.errors import ConfigError, Problem
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.generate.decoders import Decoding, make_decoder
from xscale.mesh.collectives import broadcast_int
from xscale.nn.depth.early_exit import ExitPolicyConfig
from xscale.nn.head.head import Head
from xscale.nn.init import seed_of
from xscale.nn.model.model import MODELS
from xscale.nn.module import Module, carried_tensors
from xscale.nn.tokens import Tokens
from xscale.objective.objective import OBJECTIVES, Objective
from xscale.observe import SampleReport
from xscale.run.parts import RunParts
from xscale.run.run_data import special_tokens_of
from xscale.settings.settings import Settings

AUTO, GROWING = Decoding(), Decoding(cache="growing")


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    length: int,
    *,
    end: int,
    temperature: float = 0.8,
    top_k: int | None = 40,
    seed: int = 0,
    source: Tensor | None = None,
    window: int | None = None,
    policy: ExitPolicyConfig | None = None,
    prefix: bool = False,
    stops: Callable[[list[int]], bool] | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    decoding: Decoding = AUTO,
) -> Tensor:
    """Generate from prompt ids [T] up to `length` further ids, without the `end` token that stops generation.

    Collective: all ranks sample the same tokens. `window` is the longest sequence that the model's positions support;
    generation stops there, or continues in the next segment if the model keeps a state between segments. `source` [S]:
    input ids of an encoder-decoder. `policy`: when a token leaves at an exit; the blocks behind it compute their keys
    and values from the hidden state that left. None: all blocks are computed. `prefix`: whether the prompt is a
    prefix, whose tokens see each other in both directions. `stops`: told the ids so far, whether generation stops
    after them. `top_p` and `repetition_penalty` are those of `restricted_logits`. `decoding`: how the steps are
    computed; ConfigError where it cannot be.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed_of(seed, "generate"))
    device = prompt.device
    # A model with a state between segments reads a text of any length, a window at a time.
    segment = window if carried_tensors(model) else None
    limit = length if window is None or segment else min(length, window - len(prompt))
    decoder = make_decoder(
        model,
        len(prompt) + limit,
        decoding,
        device=device,
        source=Tokens.from_ids(source[None]) if source is not None else None,
        policy=policy,
        prefix=prefix,
        segment=segment,
    )
    ids = prompt
    generated: list[int] = []
    for _ in range(limit):
        logits = decoder.next_logits(ids)
        # On a GPU the ranks' logits may differ in the last bit, and so in the token.
        last = restricted_logits(
            logits.float().cpu(), ids.cpu(), temperature, top_k, top_p, repetition_penalty
        )
        token = broadcast_int(sample_token(last, generator), device)
        if token == end:
            break
        generated.append(token)
        if stops is not None and stops(generated):
            break
        ids = torch.cat((ids, torch.tensor([token], device=device)))
    return torch.tensor(generated, dtype=torch.long)


def lay_out_matrices(model: nn.Module) -> None:
    """Store the float32 matrices on a CPU by columns, in place: the product with one row takes 0.6 to 0.8 of the time.

    Shapes and values stay. A product with many rows takes as long as before, and so does any in bfloat16 by rows, which
    is why its matrices are left alone. DTensors keep their layout, and so do matrices of which single rows are read.
    For a model that will only generate.
    """
    for module in model.modules():
        if isinstance(module, Module) and not module.read_by_rows:
            for name in module.linear_maps | ({"weight"} if isinstance(module, Head) else set()):
                parameter = module.get_parameter(name)
                by_columns = parameter.mT.is_contiguous()
                if (
                    parameter.dtype == torch.float32
                    and parameter.is_cpu
                    and type(parameter.data) is Tensor
                ):
                    parameter.data = (
                        parameter.data if by_columns else parameter.data.mT.contiguous().mT
                    )


def restricted_logits(
    logits: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """Return the logits [V] of the distribution that the next id is drawn from; -inf for ids that are left out.

    `repetition_penalty` divides positive logits of the `ids` [T] before, and multiplies negative ones (Keskar et al.
    2019, CTRL). `temperature` 0 leaves the likeliest id alone. `top_p` keeps the fewest likeliest ids whose probability
    is at least that much (Holtzman et al. 2020, nucleus sampling), of the `top_k` likeliest.
    """
    if repetition_penalty != 1:
        seen = torch.unique(ids)
        logits = logits.clone()
        logits[seen] = torch.where(
            logits[seen] < 0, logits[seen] * repetition_penalty, logits[seen] / repetition_penalty
        )
    left_out = float("-inf")
    if temperature == 0:
        return torch.full_like(logits, left_out).index_fill(0, logits.argmax(), 0.0)
    logits = logits.double() / temperature
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], left_out)
    if top_p is not None and top_p < 1:
        ascending, order = logits.sort()
        outside = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        outside[-1] = False
        logits = logits.masked_fill(outside[order.argsort()], left_out)
    return logits


def sample_token(logits: Tensor, generator: torch.Generator) -> int:
    """Sample one id from logits [V]."""
    return int(torch.multinomial(torch.softmax(logits.double(), -1), 1, generator=generator))


def encode_prompt(
    prompt: str, tokenizer: Tokenizer, longest: int | None, path: str, *, begins: bool = True
) -> list[int]:
    """Encode a prompt to at least one and at most `longest` ids; ConfigError at `path` where that cannot be.

    An empty one is a prompt where the tokenizer puts a beginning-of-text token first. `begins`: whether a text begins
    with it, which the text behind a gap does not.
    """
    try:
        ids = tokenizer.encode_prompt(prompt) if begins else tokenizer.encode(prompt)
    except (UnicodeError, TypeError):
        raise ConfigError(
            path, f"the prompt {prompt!r} is not valid Unicode", "Give text in UTF-8."
        ) from None
    if not ids:
        raise ConfigError(path, "the prompt is empty", "Give at least one character.")
    if longest is not None and len(ids) > longest:
        what = f"the prompt {prompt[:40]!r} has {len(ids)} tokens, and at most {longest} leave room for one more"
        raise ConfigError(
            path, what, "Give a shorter one, or train with a longer data.sequence_length."
        )
    return ids


def encode_prompts(settings: Settings, tokenizer: Tokenizer) -> list[list[int]]:
    """Encode the prompts of `train.sample`, none for a model that cannot continue them.

    ConfigError, the same on every rank, with all prompts that cannot be used.
    """
    traits = MODELS.of(settings.model).traits
    if not traits.decode or traits.source:
        return []
    specials = special_tokens_of(tokenizer)
    objective: Objective = OBJECTIVES.build(
        settings.objective, specials, settings.data.source_length, settings.run.seed
    )
    longest = settings.data.sequence_length - 1 - len(objective.prompt_of([]))
    encoded: list[list[int]] = []
    problems: list[Problem] = []
    for number, prompt in enumerate(settings.train.sample.prompts):
        try:
            ids = encode_prompt(prompt, tokenizer, longest, f"train.sample.prompts.{number}")
            encoded.append(objective.prompt_of(ids))
        except ConfigError as error:
            problems += error.problems
    if problems:
        refusal = ConfigError(problems)
        refusal.same_on_all_ranks = True
        raise refusal
    return encoded


def write_samples(parts: RunParts, step: int, on_token: Callable[[], None]) -> list[SampleReport]:
    """Generate from each prompt, where the model can. Collective. `on_token` is called on all ranks at each token."""
    settings = parts.settings

    def stops(ids: list[int]) -> bool:
        on_token()
        return False

    samples: list[SampleReport] = []
    tokenizer, sample = parts.corpus.tokenizer, settings.train.sample
    for number, ids in enumerate(encode_prompts(settings, tokenizer)):
        on_token()
        tokens = generate(
            parts.model,
            torch.tensor(ids, device=parts.mesh.device),
            sample.tokens,
            end=tokenizer.eos,
            temperature=sample.temperature,
            top_k=sample.top_k,
            seed=settings.run.seed + number,
            window=settings.data.sequence_length,
            prefix=OBJECTIVES.of(settings.objective).traits.prefix,
            stops=stops,
            # A few tokens, between steps of a model whose memory is full: no graph is worth its capture.
            decoding=GROWING,
        )
        samples.append(
            SampleReport(step, sample.prompts[number], tokenizer.decode(tokens.tolist()))
        )
    return samples
