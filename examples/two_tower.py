"""A two-tower recommender: items are what a network makes of their attributes, so new items can be recommended, too.

    python examples/two_tower.py --items 100000 --sampler blocks
    python examples/two_tower.py --items 100000 --sampler in_batch

Data is synthetic. A user has a taste, a point in the space of attributes, and clicks items near it. One item in ten is
new: it is in no training example. The script prints the exact loss and the recall of old and of new items.
"""

import argparse
import time

import torch
from torch import Tensor, nn

import manyclass

CATEGORIES, BRANDS, NUMBERS = 50, 200, 6


class Items:
    """Attributes of items, and users who click them."""

    def __init__(self, number: int, generator: torch.Generator) -> None:
        self.category = torch.randint(CATEGORIES, (number,), generator=generator)
        self.brand = torch.randint(BRANDS, (number,), generator=generator)
        self.numbers = torch.randn(number, NUMBERS, generator=generator)
        places = torch.randn(CATEGORIES, 8, generator=generator), torch.randn(BRANDS, 8, generator=generator)
        mixing = torch.randn(NUMBERS, 8, generator=generator)
        self.place = places[0][self.category] + 0.5 * places[1][self.brand] + 0.5 * self.numbers @ mixing
        self.is_new = torch.rand(number, generator=generator) < 0.1
        self.old, self.new = (~self.is_new).nonzero().squeeze(1), self.is_new.nonzero().squeeze(1)

    def clicks(self, users: int, choices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Items that users clicked before, ``(users, 5)``, all old, and the next, one of ``choices``."""
        taste = self.place[choices[torch.randint(len(choices), (users,), generator=generator)]]

        def near(items: Tensor, count: int) -> Tensor:
            seen = items[torch.randint(len(items), (users, 512), generator=generator)]
            distance = (self.place[seen] - taste.unsqueeze(1)).square().sum(dim=-1)
            return seen.gather(1, distance.topk(count, largest=False).indices)

        return near(self.old, 5), near(choices, 1).squeeze(1)


class ItemTower(nn.Module):
    """Item ids to embeddings, by their attributes."""

    def __init__(self, items: Items, features: int) -> None:
        super().__init__()
        self.register_buffer("category_of", items.category)
        self.register_buffer("brand_of", items.brand)
        self.register_buffer("numbers", items.numbers)
        self.category, self.brand = nn.Embedding(CATEGORIES, 16), nn.Embedding(BRANDS, 16)
        self.layers = nn.Sequential(nn.Linear(32 + NUMBERS, 128), nn.ReLU(), nn.Linear(128, features))

    def forward(self, ids: Tensor) -> Tensor:
        """Ids ``(*shape)`` → ``(*shape, features)``."""
        parts = self.category(self.category_of[ids]), self.brand(self.brand_of[ids]), self.numbers[ids]
        return self.layers(torch.cat(parts, dim=-1))


class UserTower(nn.Module):
    """The items that a user clicked to a query; their embeddings come from the item tower."""

    def __init__(self, item_tower: ItemTower, features: int) -> None:
        super().__init__()
        self.item_tower = item_tower
        self.layers = nn.Sequential(nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, features))

    def forward(self, history: Tensor) -> Tensor:
        """Items ``(users, k)`` → ``(users, features)``."""
        return self.layers(self.item_tower(history).mean(dim=1))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate; return what is printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--num-samples", type=int, default=1024)
    parser.add_argument("--sampler", choices=["blocks", "uniform", "in_batch", "full"], default="blocks")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    items = Items(options.items, generator)
    tower = ItemTower(items, options.features)
    users = UserTower(tower, options.features)
    if options.sampler == "full":
        head = manyclass.FullSoftmax(options.features, options.items, classes=tower)
    else:
        more = {"blocks": {"own": 8}, "uniform": {"scope": "batch"}, "in_batch": {}}[options.sampler]
        head = manyclass.SampledSoftmax(
            options.features, options.items, options.sampler, options.num_samples, classes=tower, **more
        )
    parameters = {*users.parameters(), *head.parameters()}  # the item tower is in both
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    start = time.perf_counter()
    for _ in range(options.steps):
        history, target = items.clicks(options.batch, items.old, generator)
        loss = head(users(history), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start

    head.refresh()  # exact results need embeddings of all items, made by the tower as it is now
    head.eval()
    result = {"milliseconds per step": 1000 * seconds / options.steps}
    with torch.no_grad():
        for kind, choices in (("old", items.old), ("new", items.new)):
            history, target = items.clicks(512, choices, generator)
            query = users(history)
            result[f"loss of {kind} items"] = float(head(query, target))
            found = head.topk(query, min(100, options.items))[1]
            result[f"recall@100 of {kind} items"] = float((found == target.unsqueeze(1)).any(dim=1).double().mean())
    for name, value in result.items():
        print(f"{name:25} {value:8.3f}")
    return result


if __name__ == "__main__":
    main()
