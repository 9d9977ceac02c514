"""Face-like identities: cosine logits with an angular margin over many classes, judged on identities never seen.

    python examples/identities.py --identities 200000 --margin arcface

Data is synthetic. A picture is a vector: the identity's own, through a fixed random network that also mixes in a
nuisance such as light. The model learns a vector for each picture so that pictures of one identity are close. The
script prints how often the closest of 200 pictures is the one of the same identity, for new identities.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyclass

PIXELS, NUISANCE = 128, 16


class Camera:
    """Makes pictures of identities."""

    def __init__(self, identities: int, generator: torch.Generator) -> None:
        self.faces = torch.randn(identities, 32, generator=generator)
        self.first = torch.randn(32 + NUISANCE, PIXELS, generator=generator) / 5
        self.second = torch.randn(PIXELS, PIXELS, generator=generator) / 8

    def pictures(self, identities: Tensor, generator: torch.Generator) -> Tensor:
        """Identities ``(k,)`` → ``(k, PIXELS)``, different at every call."""
        light = 2.5 * torch.randn(len(identities), NUISANCE, generator=generator)
        pixels = torch.cat([self.faces[identities], light], dim=1) @ self.first
        return pixels.tanh() @ self.second


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate; return what is printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--identities", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--num-samples", type=int, default=2048)
    parser.add_argument("--margin", choices=["none", "cosface", "arcface"], default="arcface")
    parser.add_argument("--scale", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    new = 1000
    camera = Camera(options.identities + new, generator)  # the last ones are never seen in training
    margins = {"none": None, "cosface": manyclass.CosFace(0.2), "arcface": manyclass.ArcFace(0.2)}
    cosine = manyclass.Cosine(options.scale, margin=margins[options.margin])
    trunk = nn.Sequential(nn.Linear(PIXELS, 256), nn.ReLU(), nn.Linear(256, options.features))
    head = manyclass.SampledSoftmax(
        options.features, options.identities, num_samples=options.num_samples, own=16, cosine=cosine
    )
    optimizer = manyclass.optim.Adam([*trunk.parameters(), *head.parameters()], lr=3e-3)
    start = time.perf_counter()
    for _ in range(options.steps):
        identity = torch.randint(options.identities, (options.batch,), generator=generator)
        loss = head(trunk(camera.pictures(identity, generator)), identity)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start

    identity = options.identities + torch.randperm(new, generator=generator)[:200]
    with torch.no_grad():
        first, second = (F.normalize(trunk(camera.pictures(identity, generator)), dim=1) for _ in range(2))
        raw = [F.normalize(camera.pictures(identity, generator), dim=1) for _ in range(2)]
    right = torch.arange(len(identity))
    result = {
        "milliseconds per step": 1000 * seconds / options.steps,
        "bias of the loss": head.diagnostics().bias,
        "right by raw pictures": float(((raw[0] @ raw[1].T).argmax(dim=1) == right).double().mean()),
        "right by learned vectors": float(((first @ second.T).argmax(dim=1) == right).double().mean()),
    }
    for name, value in result.items():
        print(f"{name:25} {value:8.3f}")
    return result


if __name__ == "__main__":
    main()
