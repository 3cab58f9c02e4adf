"""Training from imported weights is training there: the same losses as a plain loop over the library's model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.convert.hf.models import LENGTH, VOCABULARY
from xscale.convert.hf.import_model import ImportedModel, import_model
from xscale.convert.hf.registry import model_of
from xscale.nn.materialize import replace_parameters
from xscale.nn.model.model import MODELS
from xscale.nn.module import parameter_decays
from xscale.nn.tokens import Tokens
from xscale.optim.optimizer.adamw import AdamW
from xscale.optim.optimizer.optimizer import LocalParameter

STEPS, ROWS, LR, DECAY = 20, 4, 1e-3, 0.1
T5_SIZES = {
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 16,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CAUSAL = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
BERT = {**SIZES, "max_position_embeddings": LENGTH, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NO_DROPOUT = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0)
SPARSE = {
    "num_experts": 4,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "router_jitter_noise": 0.0,
    "router_aux_loss_coef": 0.1,
    "router_z_loss_coef": 0.01,
}
MODELS_OF_THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", CAUSAL),
    "gpt2": ("GPT2", {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4} | NO_DROPOUT),
    # Of one layer: the library's loss pools layers, so that with several it is another function.
    "mixtral": ("Mixtral", {**CAUSAL, "num_hidden_layers": 1, "num_local_experts": 4, "router_aux_loss_coef": 0.1}),
    "mixtral of two layers": ("Mixtral", {**CAUSAL, "num_local_experts": 4, "router_aux_loss_coef": 0.0}),
    # Wide experts, whose clamp cuts some of both parts.
    "gpt_oss": (
        "GptOss",
        {**CAUSAL, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6}
        | {"router_aux_loss_coef": 0.0, "swiglu_limit": 0.3},
    ),
    "bert": ("Bert", {**BERT, "type_vocab_size": 2}),
    "albert": ("Albert", {**BERT, "embedding_size": 12, "type_vocab_size": 2}),
    "t5": ("T5", T5_SIZES),
    "flan": ("T5", {**T5_SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "switch": ("SwitchTransformers", {**T5_SIZES, **SPARSE, "num_decoder_layers": 2}),
}
LOADERS = {
    "Bert": "BertForMaskedLM",
    "Albert": "AlbertForMaskedLM",
    "GPT2": "GPT2LMHeadModel",
    "T5": "T5ForConditionalGeneration",
}
LOADERS["SwitchTransformers"] = "SwitchTransformersForConditionalGeneration"


def their_model(name: str) -> Any:
    import transformers

    family, options = MODELS_OF_THEIRS[name]
    kind = getattr(transformers, LOADERS.get(family, f"{family}ForCausalLM"))
    torch.manual_seed(0)
    theirs = kind(kind.config_class(vocab_size=VOCABULARY, **options))
    if name == "flan":
        # An untied head; the library ties a missing one.
        theirs.lm_head.weight = torch.nn.Parameter(torch.empty_like(theirs.lm_head.weight))
    with torch.no_grad():
        for path, parameter in theirs.named_parameters():
            # Routers are so decided that rounding seldom turns a token to another expert.
            std = 0.5 if "classifier" in path or "router" in path else 0.1
            parameter.normal_(mean=float(parameter.dim() == 1), std=std)
    return theirs


def batches(source: bool) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for _ in range(2):
        ids = torch.randint(1, VOCABULARY, (3, ROWS, LENGTH), generator=draw)
        made.append({"ids": ids[0], "targets": ids[1]} | ({"source": ids[2]} if source else {}))
    return made * (STEPS // 2)


def their_losses(theirs: Any, data: list[dict[str, Tensor]], aux: float) -> list[float]:
    """A plain loop: the mean cross-entropy, the library's own auxiliary losses, AdamW, decay of matrices and tables.

    The biases of stacked experts are matrices, and biases."""
    theirs.train()
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in theirs.named_parameters():
        groups[parameter.dim() > 1 and not name.endswith("_bias")].append(parameter)
    settings = [{"params": group, "weight_decay": DECAY * decays} for decays, group in groups.items()]
    optimizer = torch.optim.AdamW(settings, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for batch in data:
        inputs = {"input_ids": batch["ids"]}
        if "source" in batch:
            inputs = {"input_ids": batch["source"], "decoder_input_ids": batch["ids"]}
        output = theirs(**inputs, **({"output_router_logits": True} if aux else {}))
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["targets"].flatten())
        losses.append(loss.item())
        if "source" in batch and aux:
            loss = loss + aux * (output.encoder_aux_loss + output.decoder_aux_loss)
            loss = loss + theirs.router_z_loss_coef * (output.encoder_z_loss + output.decoder_z_loss)
        elif aux:
            loss = loss + aux * output.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def our_model(converted: ImportedModel) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = MODELS.build(model_of(converted.model), VOCABULARY, LENGTH)
    replace_parameters(model, lambda name, old: torch.nn.Parameter(converted.weights[name].clone()))
    return model.train()


def our_losses(model: torch.nn.Module, data: list[dict[str, Tensor]]) -> list[float]:
    named, decays = dict(model.named_parameters()), parameter_decays(model)
    weights = [LocalParameter(name, value.detach(), decays[name]) for name, value in named.items()]
    optimizer = AdamW(AdamW.Config(lr=LR, weight_decay=DECAY, beta1=0.9, beta2=0.95, eps=1e-8), weights)
    losses = []
    for step, batch in enumerate(data):
        tokens = Tokens.from_ids(batch["ids"], rng_seed=step, aux_loss_weight=1.0)
        source = Tokens.from_ids(batch["source"], rng_seed=step, aux_loss_weight=1.0) if "source" in batch else None
        loss = model(tokens, batch["targets"], source=source) / batch["targets"].numel()
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        optimizer.step([value.grad for value in named.values()], LR)
    return losses


@pytest.mark.parametrize("name", MODELS_OF_THEIRS)
@pytest.mark.long
def test_twenty_steps_from_imported_weights(name: str, tmp_path: Path) -> None:
    theirs = their_model(name)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    converted = import_model(tmp_path / "theirs")
    data = batches(source=model_of(converted.model).kind == "encoder_decoder")
    wanted = their_losses(theirs, data, getattr(theirs.config, "router_aux_loss_coef", 0.0))
    losses = our_losses(our_model(converted), data)
    assert wanted[-2] < wanted[0] - 0.01, "the model learns"
    assert losses == pytest.approx(wanted, rel=0, abs=1e-5)
