"""Models as wholes: equal to transformers' where it has the same one, tied or not, refused where they cannot be."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import ready
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.blocks.block import BlockConfig
from xscale.nn.blocks.stack import StackConfig
from xscale.nn.ffn.ffn import Dense, Gated
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import Fourier
from xscale.nn.model.decoder import Decoder
from xscale.nn.model.encoder import Encoder
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.model.model import Model
from xscale.nn.module import parameter_axes
from xscale.nn.norm.norm import Layer, Rms
from xscale.nn.position.learned import Learned
from xscale.nn.position.rope import Rope
from xscale.nn.tokens import Tokens

VOCABULARY, LENGTH, WIDTH = 50, 20, 32


def ids(batch: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(0))


def stack(block: BlockConfig) -> StackConfig:
    return StackConfig(depth=2, block=block)


def test_a_llama_is_transformers_llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    attention = Attention.Config(heads=4, kv_heads=2)
    block = BlockConfig(mixer=attention, ffn=Gated.Config(hidden=48), norm=Rms.Config(eps=1e-5))
    config = Decoder.Config(width=WIDTH, stack=stack(block), tied=False, position=Rope.Config(base=500.0))
    ours = ready(Decoder(config, VOCABULARY, LENGTH))
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            tie_word_embeddings=False,
        )
    ).double()
    names = {"model.embed_tokens.weight": "embed.table.weight", "model.norm.weight": "stack.norm.weight"}
    names["lm_head.weight"] = "head.weight"
    inner = {
        "self_attn.": "mixer.part.",
        "mlp.": "ffn.part.",
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
    }
    inner |= {f"{one}_proj": one for one in "qkvo"}
    inner |= {"post_attention_layernorm": "ffn.norm", "input_layernorm": "mixer.norm"}
    mine = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        mapped = name.replace("model.layers.", "stack.blocks.")
        for old, new in inner.items():
            mapped = mapped.replace(old, new)
        parameter.data.copy_(mine[names.get(name, mapped)])
    theirs.train(False)
    # Their angles are in single precision.
    assert torch.allclose(ours(Tokens.from_ids(ids())), theirs(ids()).logits, atol=1e-4)


def test_a_gpt2_is_transformers_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    ffn = Dense.Config(hidden=4 * WIDTH, activation="gelu_tanh", bias=True)
    block = BlockConfig(mixer=Attention.Config(heads=4, bias=True), ffn=ffn, norm=Layer.Config())
    config = Decoder.Config(width=WIDTH, stack=stack(block), position=Learned.Config())
    ours = ready(Decoder(config, VOCABULARY, LENGTH))
    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=4)
    ).double()
    mine = dict(ours.named_parameters())

    def put(name: str, value: Tensor) -> None:
        theirs.get_parameter(name).data.copy_(value)

    put("transformer.wte.weight", mine["embed.table.weight"])
    put("transformer.wpe.weight", mine["embed.position.weight"])
    for kind in ("weight", "bias"):
        put(f"transformer.ln_f.{kind}", mine[f"stack.norm.{kind}"])
        for layer in range(2):
            here, there = f"stack.blocks.{layer}", f"transformer.h.{layer}"
            put(f"{there}.ln_1.{kind}", mine[f"{here}.mixer.norm.{kind}"])
            put(f"{there}.ln_2.{kind}", mine[f"{here}.ffn.norm.{kind}"])
            joined = torch.cat([mine[f"{here}.mixer.part.{one}.{kind}"] for one in "qkv"])
            pairs = {"attn.c_attn": joined, "attn.c_proj": mine[f"{here}.mixer.part.o.{kind}"]}
            pairs |= {
                "mlp.c_fc": mine[f"{here}.ffn.part.up.{kind}"],
                "mlp.c_proj": mine[f"{here}.ffn.part.down.{kind}"],
            }
            for name, value in pairs.items():
                put(f"{there}.{name}.{kind}", value.t() if kind == "weight" else value)
    theirs.train(False)
    assert torch.allclose(ours(Tokens.from_ids(ids())), theirs(ids()).logits, atol=1e-10)


@pytest.mark.parametrize("part", [Decoder, Encoder, EncoderDecoder])
def test_tied_models_have_one_table(part: Any) -> None:
    tied, apart = (part(part.Config(width=WIDTH, tied=tied), VOCABULARY, LENGTH) for tied in (True, False))
    assert set(parameter_axes(apart)) - set(parameter_axes(tied)) == {"head.weight"}
    tables = [name for name, parameter in tied.named_parameters() if parameter.shape[0] == VOCABULARY]
    assert len(tables) == 1


@pytest.mark.parametrize("part", [Decoder, Encoder, EncoderDecoder])
def test_noise_is_a_function_of_its_seed(part: Any) -> None:
    """The dropout of the embeddings is resumed too: a resumed run draws what the uninterrupted one would have drawn."""
    config = part.Config(width=WIDTH, dropout=0.5)
    blocks = {
        name: stack(BlockConfig(dropout=0.5, mixer=Attention.Config(dropout=0.5)))
        for name in ("stack", "encoder", "decoder")
    }
    config = config.model_copy(update={name: one for name, one in blocks.items() if name in type(config).model_fields})
    model: Model = ready(part(config, VOCABULARY, LENGTH)).train()
    source = Tokens.from_ids(ids(), rng_seed=1)
    first = model(Tokens.from_ids(ids(), rng_seed=1), source=source)
    torch.rand(7)
    assert torch.equal(model(Tokens.from_ids(ids(), rng_seed=1), source=source), first)
    assert not torch.equal(model(Tokens.from_ids(ids(), rng_seed=2), source=source), first)
    assert torch.equal(
        model(Tokens.from_ids(ids()), source=Tokens.from_ids(ids())),
        model(Tokens.from_ids(ids()), source=Tokens.from_ids(ids())),
    )


def test_the_two_sides_read_and_write_with_one_table() -> None:
    model = EncoderDecoder(EncoderDecoder.Config(width=WIDTH), VOCABULARY, LENGTH)
    assert model.source.table is model.target.table
    assert any(name.startswith("decoder.blocks.0.cross.") for name, _ in model.named_parameters())
    assert not any(name.startswith("encoder.blocks.0.cross.") for name, _ in model.named_parameters())


def said(part: Any, config: Any) -> str:
    return "\n".join(str(problem) for problem in part.check(config, (VOCABULARY, LENGTH), "model"))


def test_what_cannot_be_built_is_refused() -> None:
    mixes = BlockConfig(mixer=Fourier.Config())
    assert "model.stack.block.mixer: 'fourier' is not causal" in said(Decoder, Decoder.Config(stack=stack(mixes)))
    assert said(Encoder, Encoder.Config(stack=stack(mixes))) == ""
    both = EncoderDecoder.Config(encoder=stack(mixes), decoder=stack(mixes))
    assert "model.decoder.block.mixer: 'fourier' cannot" not in said(EncoderDecoder, both)
    assert "model.decoder.block.cross" in said(EncoderDecoder, both)
    assert "model.encoder" not in said(EncoderDecoder, both)
    for values, what in (
        ({"width": 0}, "width: must be >= 1, got 0"),
        ({"dropout": 1.0}, r"must be in \[0, 1\), got 1.0"),
    ):
        with pytest.raises(ConfigError, match=what):
            decode(Decoder.Config, values)
