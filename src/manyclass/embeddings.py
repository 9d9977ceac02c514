"""Sources of class embeddings: a table of parameters, or a network that encodes classes."""

import math
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import checks, functional, fused, positives
from .cosine import Cosine
from .encoded import Cache, encode, evaluating, renumber
from .importance import Note
from .rows import Exchange, offsets_of, select_rows
from .samplers import Draw
from .shard import Shard, Tables


class ClassEmbeddings(nn.Module):
    """The embeddings of many classes, and their offsets.

    `weight` is the present value of a table's parameters. An encoder computes embeddings when a training step needs
    them, and `weight` is then a cache of the last ones. A table with cosine logits has such a cache, too.

    Args:
        in_features: size of an embedding, d.
        num_classes: n, at least 2.
        prediction: how a logit becomes an output; see `functional`.
        bias: whether classes have a learned offset.
        sparse: whether gradients of tables are sparse tensors.
        embedding: an ``nn.Embedding(num_classes, in_features)`` to use as the table.
        classes: instead of a table: a module that maps class ids ``(k,)`` to embeddings ``(k, in_features)``.
        chunk_size: how many classes ``classes`` encodes at a time.
        cosine: normalise embeddings; logits are cosines times a scale.
        device: of the parameters.
        dtype: of the parameters; with ``classes``, of the cache.
        shard: the classes that this process holds.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        prediction: str,
        bias: bool,
        sparse: bool,
        embedding: nn.Embedding | None,
        classes: nn.Module | None,
        chunk_size: int,
        cosine: Cosine | None,
        device: Any,
        dtype: torch.dtype | None,
        shard: Shard | None,
    ) -> None:
        super().__init__()
        self.in_features = checks.positive_int("in_features", in_features)
        self.num_classes = checks.positive_int("num_classes", num_classes, 2)
        self.prediction = checks.one_of("prediction", prediction, functional.PREDICTIONS)
        self.sparse = checks.boolean("sparse", sparse)
        self.chunk_size = checks.positive_int("chunk_size", chunk_size)
        checks.boolean("bias", bias)
        if dtype is not None and dtype not in checks.FLOATING:
            raise TypeError(f"dtype must be a floating point dtype of 16, 32 or 64 bits, got {dtype!r}")
        device = checks.device("device", device)
        if not isinstance(shard, Shard | None):
            raise TypeError(f"shard must be a manyclass.shard.Shard or None, got {shard!r}")
        self.shard = Shard(num_classes) if shard is None else shard
        self.tied = embedding is not None
        if self.tied and classes is not None:
            raise ValueError("give embedding or classes, not both: class embeddings have one source")
        self.classes = checks.instance("classes", classes, nn.Module)
        self.embedding = self._embedding(embedding, device, dtype) if classes is None else None
        self.cosine = checks.instance("cosine", cosine, Cosine)
        if self._margin() is not None and (bias or prediction != "softmax"):
            raise ValueError(f"a margin needs bias=False and prediction='softmax', got {bias} and {prediction!r}")
        cached = classes is not None or cosine is not None
        self.cache = Cache(self.shard.size, in_features, device, dtype) if cached else None
        self.bias_embedding = self._table(1, self.weight.device, self.weight.dtype) if bias else None
        self.reset_parameters()

    def _embedding(self, tied: nn.Embedding | None, device: Any, dtype: torch.dtype | None) -> nn.Embedding:
        """Return the table of class embeddings: a new one, or the one that is tied."""
        expected = (self.num_classes, self.in_features)
        if tied is None:
            return self._table(self.in_features, device, dtype)
        if not isinstance(tied, nn.Embedding):
            raise TypeError(f"embedding must be an nn.Embedding or None, got {type(tied).__name__}")
        if tuple(tied.weight.shape) != expected:
            raise ValueError(f"embedding must have shape {expected}, got {tuple(tied.weight.shape)}")
        if tied.sparse != self.sparse:
            raise ValueError(f"sparse={self.sparse} but embedding.sparse={tied.sparse}; both must be the same")
        return tied

    def _table(self, columns: int, device: Any, dtype: torch.dtype | None) -> nn.Embedding:
        """Make an nn.Embedding: DistributedDataParallel expects sparse gradients only there."""
        rows = torch.empty(self.shard.size, columns, device=device, dtype=dtype)
        return nn.Embedding.from_pretrained(rows, freeze=False, sparse=self.sparse)

    def reset_parameters(self) -> None:
        """Draw the parameters as `torch.nn.Linear` does; tied weights and encoders stay as they are."""
        own = [None if self.tied else self.embedding, self.bias_embedding]
        parameters = [table.weight for table in own if table is not None]
        self.shard.initialise(cast(list[nn.Parameter], parameters), 1 / math.sqrt(self.in_features))

    @torch.no_grad()
    def reset_bias(self, counts: Tensor) -> None:
        """Set the offsets to ``log(counts + 1)``, so that training starts from the frequencies of the classes.

        Args:
            counts: how often each class is a target in the data, shape ``(num_classes,)``; of all shards.
        """
        if self.bias_embedding is None:
            raise ValueError("reset_bias needs a layer with bias=True")
        own = checks.counts("counts", counts, self.num_classes)[self.shard.first : self.shard.last]
        self.bias_embedding.weight.copy_(own.log1p().unsqueeze(-1))

    @property
    def weight(self) -> Tensor:
        """Class embeddings, shape ``(num_classes, in_features)``; of a shard, those of its classes.

        With an encoder or cosines, these are cached. `refresh` brings them up to date.
        """
        if self.cache is not None:
            return self.cache.rows
        assert self.embedding is not None
        return self.embedding.weight

    @property
    def bias(self) -> Tensor | None:
        """Offsets per class, shape ``(num_classes,)``: a view of the parameter ``bias_embedding.weight``."""
        return None if self.bias_embedding is None else self.bias_embedding.weight.squeeze(-1)

    @property
    def fresh(self) -> bool:
        """Whether `weight` equals what the encoder would return now; always true for a table."""
        return self.cache is None or self._automatic() or self.cache.is_fresh(self._sources())

    def refresh(self) -> None:
        """Encode all n classes, so that ``eval()``, `log_prob` and `topk` are exact."""
        if self.cache is not None:
            self.cache.refresh(self._known, self._sources())

    def _tables(self) -> Tables:
        return self.weight, self.bias

    def _offsets(self) -> Tensor | None:
        """Return `bias`; its gradient may be sparse."""
        return None if self.bias_embedding is None else offsets_of(self.bias_embedding.weight)

    def _fresh_tables(self) -> Tables:
        """Return `_tables` for exact results: encode all classes, or warn, if the cache is stale."""
        if self.cache is not None and not torch.compiler.is_compiling():
            self.cache.ensure(self._known, self._sources(), self._automatic())
        elif self.cache is not None and self.classes is None:  # a graph cannot ask whether the cache is stale
            return self._known(torch.arange(self.shard.size, device=self.weight.device)), self.bias
        elif self.cache is not None and not self.cache.started:
            raise ValueError("classes have no embeddings yet: call refresh() on the layer before you compile or export")
        return self._tables()

    def _scored(
        self, query: Tensor, target: Tensor, draw: Draw, exchange: Exchange, encode: bool, note: Note | None
    ) -> tuple[Tensor, Tensor]:
        """Compute `fused.sampled_loss` with present embeddings, or from `weight` without ``encode``.

        Each class of the step is encoded once. Target ``(batch,)`` or ``(batch, k)``. ``note`` is called only for a
        plain table and one target per example.
        """
        margin, plain = self._margin(), self.cache is None or not encode
        if target.dim() == 1 and margin is None and plain:
            options = {"prediction": self.prediction, "sparse": self.sparse, "exchange": exchange, "note": note}
            return fused.sampled_loss(query, self.weight, self._offsets(), target, draw, **options)
        rows, target, draw = renumber(target, draw)
        weight, offsets = self._made(rows, exchange) if encode else self.weight[rows], self._offsets()
        if self.cache is not None and encode:
            # A table is read again after the optimiser's step, which costs little.
            self.cache.remember(rows, None if self.classes is None else weight, self._learns())
        if offsets is not None:
            offsets = select_rows(offsets, rows, self.sparse, exchange).to(query.dtype)
        weight = weight.to(query.dtype)
        if target.dim() == 1 and margin is None:
            return fused.sampled_loss(query, weight, offsets, target, draw, prediction=self.prediction, sparse=None)
        options = {"prediction": self.prediction, "margin": margin}
        return positives.sampled_loss(query, weight, offsets, target, draw, **options)

    def _made(self, ids: Tensor, exchange: Exchange | None = None) -> Tensor:
        """Return the embeddings of classes of this process, ``ids (k,)`` sorted and distinct, with gradients."""
        if self.embedding is not None:
            rows = select_rows(self.embedding.weight, ids, self.sparse, exchange)
        else:
            assert self.classes is not None
            rows = encode(self.classes, ids + self.shard.first, self.in_features, self.chunk_size)
            rows = self.shard.sum_gradients(rows)
        return rows if self.cosine is None else F.normalize(rows, dim=-1)

    def _known(self, ids: Tensor) -> Tensor:
        """Return the embeddings of classes as for a prediction: without gradients, dropout and random numbers."""
        with torch.no_grad(), nullcontext() if self.classes is None else evaluating(self.classes):
            return self._made(ids)

    def _sources(self) -> list[Tensor]:
        """Return the tensors that class embeddings are computed from."""
        source = self.embedding if self.classes is None else self.classes
        assert source is not None
        return [*source.parameters(), *source.buffers()]

    def _margin(self) -> functional.Margin | None:
        """Return the function that training applies to the output of a target."""
        return None if self.cosine is None or self.cosine.margin is None else self.cosine.shifted

    def _automatic(self) -> bool:
        """Return whether exact results rebuild a stale cache: only if that costs no more than the results."""
        return self.classes is None

    def _age(self) -> float:
        """Return the mean age of the embeddings in `weight`, in training steps."""
        return 0.0 if self.cache is None else self.cache.age()

    def _learns(self) -> bool:
        """Return whether a training step can change the class embeddings."""
        return any(source.requires_grad for source in self._sources())
