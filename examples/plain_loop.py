"""A plain PyTorch training loop: an output layer over many classes, AdamW, gradient clipping, exact evaluation.

    python examples/plain_loop.py --classes 200000

Data is synthetic. Every class has a hidden vector, and an input is the vector of its class with noise.
"""

import argparse

import torch
from torch import Tensor, nn

import manyclass


def batch(places: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs ``(size, 16)`` and their classes ``(size,)``."""
    target = torch.randint(len(places), (size,), generator=generator)
    return places[target] + 0.3 * torch.randn(size, places.shape[1], generator=generator), target


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate; return what is printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--num-samples", type=int, default=4096)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    places = torch.randn(options.classes, 16, generator=generator)
    trunk = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))
    head = manyclass.SampledSoftmax(64, options.classes, num_samples=options.num_samples)
    parameters = [*trunk.parameters(), *head.parameters()]
    optimizer = manyclass.optim.AdamW(parameters, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    for _ in range(options.steps):
        inputs, target = batch(places, options.batch, generator)
        optimizer.zero_grad()
        loss = head(trunk(inputs), target)  # over a sample of the classes
        loss.backward()
        manyclass.clip_grad_norm_(parameters, 5.0)  # torch's own function fails on sparse gradients
        optimizer.step()
        scheduler.step()

    optimizer.flush()  # rows without a recent gradient catch up
    trunk.eval()
    head.eval()
    with torch.no_grad():
        inputs, target = batch(places, 1000, generator)
        hidden = trunk(inputs)
        exact_loss = head(hidden, target)  # over all classes
        classes = head.topk(hidden, 10)[1]
    right = (classes == target.unsqueeze(1)).any(dim=1).double().mean()
    result = {"exact loss": float(exact_loss), "recall@10": float(right)}
    for name, value in result.items():
        print(f"{name:12} {value:8.3f}")
    return result


if __name__ == "__main__":
    main()
