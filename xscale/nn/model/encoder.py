"""A bidirectional encoder (Devlin et al. 2019): each token sees all others; trained to predict masked tokens."""

from dataclasses import replace

from torch import Tensor

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.core.errors import ConfigError, Problem
from xscale.core.requirements import change, take
from xscale.nn.blocks.stack import Stack, StackConfig
from xscale.nn.depth.depth_pass import Prediction, StackUse
from xscale.nn.ffn.ffn import Activation
from xscale.nn.head.boundary_head import BoundaryHead, BoundaryHeadConfig
from xscale.nn.head.head import Head, HeadTransform
from xscale.nn.head.pooler import SentenceHead, SentenceHeadConfig
from xscale.nn.head.sentence_contrast import SENTENCES, SentenceContrast, contrasts_sentences
from xscale.nn.linear import Embedding
from xscale.nn.model.embed import Embed
from xscale.nn.model.model import MODELS, Model, ModelTraits, check_position, model_dims
from xscale.nn.module import name_modules
from xscale.nn.norm.norm import NormSlot
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


@MODELS.register("encoder", traits=ModelTraits(causal=False, source=False, decode=False))
class Encoder(Model):
    class Config(Model.Config):
        stack: StackConfig = StackConfig()
        """The blocks."""
        embedding_norm: NormSlot | None = None
        """Norm of the embeddings, before their dropout (as in BERT, Devlin et al. 2019); null: none."""
        transform: Activation | None = None
        """A dense layer with this activation, then the blocks' norm, before the head (as in BERT); null: none."""
        head_bias: bool = False
        """Whether the logits have a bias per vocabulary entry (as in BERT)."""
        embedding_width: PositiveInt | None = None
        """E, the width of the embeddings and of the head, with linear maps from and to the width of the blocks (Lan et
        al. 2020, ALBERT); null: the width."""
        token_types: NonNegativeInt = 0
        """Rows of a table of token types (segments, Devlin et al. 2019), of which each token's is added to its
        embedding. An objective on sentences tells the types; with others every token has the first. 0: no table."""
        sentence_head: SentenceHeadConfig | None = None
        """A classifier of each sequence by its first token, as BERT has for next-sentence prediction (Devlin et al.
        2019); null: none."""
        boundary_head: BoundaryHeadConfig | None = None
        """Predicts each token of a masked span also by the tokens around the span (Joshi et al. 2020, SpanBERT); null:
        nothing does."""
        global_tokens: NonNegativeInt = 0
        """Learned tokens that are prepended to the text and pass through all blocks (the global memory of ETC, Ainslie
        et al. 2020, and of BigBird's extended construction): for patterns and cores whose first tokens are global."""
        global_mean: bool = False
        """Whether the mean of the text's embeddings is added to each global token (the relay of Star-Transformer)."""

    seams = {
        "embed": Role.STACK_INPUT,
        "head": Role.MODEL_OUTPUT,
        "contrast": Role.SENTENCE_LOSS,
    }

    def __init__(self, config: Config, vocabulary: int, length: int) -> None:
        super().__init__()
        dims = model_dims(config, vocabulary, length, causal=False)
        self.global_tokens = count = config.global_tokens
        self.embed = Embed(
            config,
            dims,
            norm=config.embedding_norm,
            globals=count,
            mean=config.global_mean,
            types=config.token_types,
            factor_width=config.embedding_width,
        )

        def make_head(
            table: Embedding | None,
            sentence: SentenceHead | None = None,
            boundary: BoundaryHead | None = None,
        ) -> Head:
            width = config.embedding_width or config.width
            transform = None
            if config.transform is not None:
                transform = HeadTransform(config.transform, config.stack.block.norm, dims, width)
            return Head(
                replace(dims, width=width),
                table,
                bias=config.head_bias,
                transform=transform,
                sentence=sentence,
                boundary=boundary,
                globals=count,
                soft_cap=config.logit_soft_cap,
                fix_norm=config.fix_norm,
            )

        use = StackUse(predicts=True, make_head=lambda: make_head(None))
        self.stack = Stack(config.stack, replace(dims, length=length + count), use)
        sentence = (
            None
            if config.sentence_head is None
            else SentenceHead(config.sentence_head, dims, count)
        )
        boundary = None
        if config.boundary_head is not None:
            boundary = BoundaryHead(config.boundary_head, config.stack.block.norm, dims)
        self.head = make_head(self.embed.table if config.tied else None, sentence, boundary)
        self.contrast = SentenceContrast() if count else None
        name_modules(self)

    @classmethod
    def check(cls, config: Config, dims: tuple[int, int], path: str) -> list[Problem]:
        shared = model_dims(config, *dims, causal=False)
        inner = replace(shared, length=shared.length + config.global_tokens)
        table = replace(shared, width=config.embedding_width or config.width)
        problems = check_position(config, table, path)
        problems += Stack.check(config.stack, inner, f"{path}.stack", StackUse(predicts=True))
        if config.embedding_width is not None:
            missing = config.transform is None
            transforms = take("gelu", key=f"{path}.transform") + take(None)
            what = "narrows the embeddings, and the head has no map from the width of the blocks"
            problems += [Problem(f"{path}.embedding_width", what, choices=transforms)] * missing
            what = "multiplies by sqrt(width) embeddings of another width"
            problems += [
                Problem(f"{path}.scale_embeddings", what, choices=take(False))
            ] * config.scale_embeddings
        if config.boundary_head is not None and (
            config.embedding_width is not None or config.fix_norm
        ):
            what = "predicts by the table of embeddings as it is, with its full width"
            full = change((f"{path}.embedding_width", None), (f"{path}.fix_norm", False))
            problems.append(Problem(f"{path}.boundary_head", what, choices=take(None) + full))
        if config.global_tokens and config.stack.pooling is not None:
            what = "would be pooled as the text is, and the head leaves as many out as there are"
            problems.append(
                Problem(
                    f"{path}.global_tokens",
                    what,
                    choices=take(0) + take(None, key=f"{path}.stack.pooling"),
                )
            )
        if config.global_mean and not config.global_tokens:
            choices = take(False) + take(1, key=f"{path}.global_tokens")
            problems.append(Problem(f"{path}.global_mean", "needs global tokens", choices=choices))
        return problems

    def forward(
        self, tokens: Tokens, targets: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        count = self.global_tokens
        if count and tokens.documents is not None and tokens.padding is None:
            what = f"the {count} global tokens of a sample are shared by its documents, which must not see each other"
            raise ConfigError(
                "data.cross_documents", what, "Set it to true, or model.global_tokens to 0."
            )
        prefixed, prediction = tokens.with_global_tokens(count), Prediction(self.head, targets)
        x = self.stack(self.embed(tokens), prefixed, prediction=prediction)
        if self.contrast is not None and tokens.get(SENTENCES) is not None and targets is not None:
            x = self._attach_contrast(self.contrast, x, prefixed)
        return self.predict(self.stack, x, prefixed, prediction)

    def _attach_contrast(self, contrast: SentenceContrast, x: Tensor, tokens: Tokens) -> Tensor:
        """Return x [B, M + T, D] with the loss of the masked sentences attached, each of which is encoded by itself.

        `tokens` have the global tokens too.
        """
        sentences = tokens.get(SENTENCES)
        if sentences is None or not contrasts_sentences(tokens):
            return x
        alone = Tokens.from_ids(
            sentences.flatten(0, 1), rng_seed=tokens.forward.rng_seed
        )  # [B * K, N]
        prefixed = alone.with_global_tokens(self.global_tokens)
        return contrast.attach_loss(x, tokens, self.stack(self.embed(alone), prefixed), prefixed)
