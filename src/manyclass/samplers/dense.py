"""Distributions that score all classes: exact, O(n·d) per example, the oracles that faster samplers are tested with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, chunks, functional, kernels
from .base import Sampler

# Masses that a draw sums at a time, over all its examples: as many as a core's cache holds. Their logits come from
# larger matrix products, which are up to twice as fast.
CACHED = 1 << 18


class Dense(Sampler):
    """q_i ∝ exp(log_mass(⟨h, w_i⟩ + b_i)) over a copy of the class weights that `update` brings up to date.

    A draw inverts the distribution function in float64. Examples are worked on in chunks of bounded memory.
    """

    adaptive = True
    derived = True

    weight: Tensor
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(0, 0), persistent=False)
        self.register_buffer("bias", torch.empty(0), persistent=False)

    def log_mass(self, logits: Tensor) -> Tensor:
        """Return the unnormalised log probability of classes with these ``logits``; the shape is kept."""
        raise NotImplementedError

    @property
    def num_classes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Rows of the class weights that were last given to `update`."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Columns of the class weights that were last given to `update`."""
        return self.weight.shape[1]

    def update(self, weight: Tensor, rows: Tensor | None = None, *, bias: Tensor | None = None) -> None:
        """Copy the class weights, all of them or only ``rows``."""
        checks.tables(weight, bias)
        pairs = [("weight", weight.detach()), ("bias", weight.new_zeros(0) if bias is None else bias.detach())]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        for name, new in pairs:
            old = getattr(self, name)
            fits = old.shape == new.shape and old.dtype == dtype and old.device == new.device
            # A tensor made in inference mode cannot be changed outside of it.
            if not fits or (old.is_inference() and not torch.is_inference_mode_enabled()):
                setattr(self, name, new.to(dtype, copy=True))
            elif rows is None:
                old.copy_(new)
            elif len(new):
                checked = checks.indices("rows", rows, len(weight), validate=self.validate)
                old[checked] = new[checked].to(dtype)

    def _flatten(self, query, exclude, context):
        if self.num_classes == 0:
            raise ValueError(f"{type(self).__name__} has seen no class weights yet: call update(weight) first")
        return super()._flatten(query, exclude, context)

    def _logits(self, query: Tensor) -> Tensor:
        """Return the logits of all classes, shape ``(batch, num_classes)``, in the dtype of the class weights."""
        return F.linear(query.to(self.weight.dtype), self.weight, self.bias if len(self.bias) else None)

    def log_total(self, query: Tensor) -> Tensor:
        """Return the log of the sum over all classes."""
        parts = query.split(max(1, chunks.MAX_LOGITS // self.num_classes))
        return torch.cat(
            [self._log_masses(self._logits(part), None).logsumexp(dim=-1).to(query.dtype) for part in parts]
        )

    def _log_masses(self, logits: Tensor, exclude: Tensor | None) -> Tensor:
        """Return the unnormalised log q of all classes, shape ``(batch, num_classes)``, float64."""
        log_mass = self.log_mass(logits.double())
        # In the log domain and before normalising: the rest keeps its precision however large the positive is.
        return log_mass if exclude is None else log_mass.scatter(-1, exclude.unsqueeze(-1), -torch.inf)

    def _masses(self, logits: Tensor, exclude: Tensor | None) -> Tensor:
        """Return the unnormalised q of all classes ``(batch, num_classes)``, with one scale per example."""
        log_mass = self._log_masses(logits, exclude)
        return log_mass.sub_(log_mass.amax(dim=-1, keepdim=True)).exp_()

    def _check_total(self, total: Tensor, valid: Tensor) -> None:
        if self.validate and not bool(valid.all()):
            raise ValueError(
                f"{type(self).__name__} has no probabilities: the logits' total mass is {float(total.sum())}; "
                "class weights must be finite and some class must have mass"
            )

    def _draw(self, query, uniform, exclude, context):
        results = []
        for part, numbers, positive in self._chunks(self.num_classes, query, uniform, exclude):
            logits = self._logits(part)
            for each in self._chunks(self.num_classes, logits, numbers, positive, CACHED):
                results.append(self._inverted(*each))
        ids, log_prob = zip(*results, strict=True)
        return torch.cat(ids), torch.cat(log_prob)

    def _inverted(self, logits: Tensor, uniform: Tensor, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the ids and log probabilities at which the distribution function reaches ``uniform``."""
        mass = self._masses(logits, exclude)
        cumulative = mass.cumsum(dim=-1)
        total = cumulative[:, -1:]
        self._check_total(total, torch.isfinite(total) & (total > 0))
        ids = torch.searchsorted(cumulative, uniform[..., 0] * total, right=True)
        return ids, mass.gather(-1, ids).log() - total.log()

    def _log_prob(self, query, ids, exclude, context):
        found = []
        for part, chunk, positive in self._chunks(self.num_classes, query, ids, exclude):
            log_mass = self._log_masses(self._logits(part), positive)
            total = log_mass.logsumexp(dim=-1, keepdim=True)
            self._check_total(total, torch.isfinite(total))
            found.append(log_mass.gather(-1, chunk) - total)
        return torch.cat(found)


class Softmax(Dense):
    """q = p ∝ exp(o), or exp(|o|) for ``prediction="absolute"``: the only q without bias (Theorem 2.1)."""

    q = "exp(o)"
    cost = "O(n·d)"
    use = "the only one without bias: the oracle"

    def __init__(self, prediction: str = "softmax") -> None:
        super().__init__()
        checks.one_of("prediction", prediction, functional.PREDICTIONS)
        self.prediction = prediction

    def log_mass(self, logits: Tensor) -> Tensor:
        """Return the output unchanged."""
        return functional.output(logits, self.prediction)

    def extra_repr(self) -> str:
        """Show what it predicts."""
        return f"prediction={self.prediction!r}, {super().extra_repr()}"


class Kernel(Dense):
    """q_i ∝ K(h, w_i) for any kernel that is a function of the logit, scored densely."""

    def __init__(self, kernel: kernels.Kernel) -> None:
        super().__init__()
        if not callable(getattr(kernel, "value", None)):
            raise TypeError(f"kernel must have a method value(logits), got {kernel!r}")
        self.kernel = kernel

    def log_mass(self, logits: Tensor) -> Tensor:
        """Return ``ln K``."""
        return self._value(logits).log()

    def _value(self, logits: Tensor) -> Tensor:
        value = self.kernel.value(logits)
        if self.validate and bool((value.amin(dim=-1) < 0).any()):  # reads all values once
            raise ValueError(f"kernel must not be negative, got {float(value.min())} from {self.kernel!r}")
        return value

    def _masses(self, logits: Tensor, exclude: Tensor | None) -> Tensor:
        """Return the kernel values without taking logarithms."""
        value = self._value(logits.double())
        return value if exclude is None else value.scatter(-1, exclude.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        """Show the kernel."""
        return f"{self.kernel!r}, {super().extra_repr()}"
