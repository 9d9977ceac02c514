"""A PyTorch Lightning module with an output layer over many classes.

    pip install lightning
    python examples/lightning_module.py --classes 200000

Two things differ from a module with an ``nn.Linear``: gradients are clipped by manyclass, and the optimiser is flushed
before evaluation.

Data is synthetic. Every class has a hidden vector, and an input is the vector of its class with noise.
"""

import argparse
import logging

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import manyclass


# --8<-- [start:model]
class Classifier(lightning.LightningModule):
    """A small network and its output layer."""

    def __init__(self, features: int, classes: int, num_samples: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, 64))
        self.head = manyclass.SampledSoftmax(64, classes, num_samples=num_samples)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Compute the loss over a sample of the classes."""
        inputs, target = batch
        return self.head(self.trunk(inputs), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use an optimiser that takes sparse gradients."""
        return manyclass.optim.AdamW(self.parameters(), lr=3e-3)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Clip sparse and dense gradients; torch's own function fails on sparse ones."""
        if gradient_clip_val:
            manyclass.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def on_validation_start(self) -> None:
        """Let rows without a recent gradient catch up."""
        if self.trainer.training:
            self.optimizers(use_pl_optimizer=False).flush()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Compute the exact loss: Lightning has called ``eval()``, so the layer uses all classes."""
        inputs, target = batch
        self.log("exact loss", self.head(self.trunk(inputs), target), batch_size=len(target))


# --8<-- [end:model]
def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate; return what is printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--num-samples", type=int, default=4096)
    options = parser.parse_args(arguments)

    lightning.seed_everything(0, verbose=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    places = torch.randn(options.classes, 16)
    target = torch.randint(options.classes, (options.steps * options.batch + 1000,))
    data = TensorDataset(places[target] + 0.3 * torch.randn(len(target), 16), target)
    held_out = torch.utils.data.Subset(data, range(1000))
    train = torch.utils.data.Subset(data, range(1000, len(data)))

    model = Classifier(16, options.classes, options.num_samples)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        gradient_clip_val=5.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(train, options.batch), DataLoader(held_out, 1000))
    result = {"exact loss": float(trainer.callback_metrics["exact loss"])}
    for name, value in result.items():
        print(f"{name:12} {value:8.3f}")
    return result


if __name__ == "__main__":
    main()
