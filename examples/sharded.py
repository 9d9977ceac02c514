"""Classes that are divided between processes: each rank holds one shard of the class weights and its optimiser state.

    torchrun --nproc-per-node 2 examples/sharded.py --classes 1000000

The trunk is replicated by DistributedDataParallel. Data is synthetic: every class has a hidden vector, and an input is
the vector of its class with noise.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import manyclass
from manyclass.distributed import ShardedSampledSoftmax, data_parallel


class Model(nn.Module):
    """A small network and a sharded output layer."""

    def __init__(self, classes: int, num_samples: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))
        self.head = ShardedSampledSoftmax(64, classes, num_samples=num_samples)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Inputs ``(batch, 16)`` and classes ``(batch,)`` of this rank → the mean loss."""
        return self.head(self.trunk(inputs), target)


def batch(places: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs ``(size, 16)`` and their classes ``(size,)``."""
    target = torch.randint(len(places), (size,), generator=generator)
    return places[target] + 0.3 * torch.randn(size, places.shape[1], generator=generator), target


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate; return what rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=128, help="of each process")
    parser.add_argument("--num-samples", type=int, default=4096)
    options = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks start with the same trunk
    model = data_parallel(Model(options.classes, options.num_samples))
    parameters = list(model.parameters())
    optimizer = manyclass.optim.AdamW(parameters, lr=3e-3)
    places = torch.randn(options.classes, 16, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())  # each rank has examples of its own
    for _ in range(options.steps):
        optimizer.zero_grad()
        model(*batch(places, options.batch, generator)).backward()
        manyclass.clip_grad_norm_(parameters, 5.0)  # counts the shards of all ranks
        optimizer.step()

    optimizer.flush()  # rows without a recent gradient catch up
    model.eval()
    with torch.no_grad():
        loss = model(*batch(places, 500, generator))  # over the classes of all ranks
    dist.all_reduce(loss)
    result = {"processes": float(dist.get_world_size()), "exact loss": float(loss) / dist.get_world_size()}
    if dist.get_rank() == 0:
        for name, value in result.items():
            print(f"{name:12} {value:8.3f}")
    dist.barrier()  # exiting while a peer still reads breaks its connection
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo can abort a normal exit: https://github.com/pytorch/pytorch/pull/179291
