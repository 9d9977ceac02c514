"""Classes that a network makes, on the command line: item towers, and words by their characters."""

import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from test_commands import fails
from test_training import train, write_items, write_sequences

from manyclass.cli import runs
from manyclass.train import training
from manyclass.train.data.characters import BUCKETS, SIZES, ngrams
from manyclass.train.data.items import FARTHEST, Feature, Items, read_items
from manyclass.train.data.items import write_items as write
from manyclass.train.data.vocabulary import ranking
from manyclass.train.model import Model
from manyclass.train.models import Attributes, Tower
from manyclass.train.models.towers import look_up
from manyclass.train.run import Run

GROUPS, COLD = 6, 5


def write_shop(folder):
    """Users walk from group to group of items; some items of each group are never taken."""
    numbers = random.Random(0)
    rows = [f"i{item},g{item % GROUPS}" for item in range(GROUPS * (COLD + 5))]
    (folder / "shop.csv").write_text("\n".join(["item,group", *rows]))
    clicks = [
        f"u{user},i{(user + step) % GROUPS + GROUPS * numbers.randrange(5)},{step}"
        for user, step in itertools.product(range(80), range(8))
    ]
    (folder / "clicks.csv").write_text("\n".join(["user,item,timestamp", *clicks]))
    return {"interactions": folder / "clicks.csv", "items": folder / "shop.csv", "item_feature": ["group"]}


def test_items_that_nobody_took_are_predicted(tmp_path):
    options = {"history": 4, "features": 16, "steps": 60, "evaluations": 1, "num_samples": 16, "own": 4, "batch": 16}
    settings = training.TASKS["next-item"][0](**write_shop(tmp_path), **options, out=tmp_path / "run")
    task = training.prepare("next-item", settings)
    assert task.num_classes == GROUPS * (COLD + 5)
    assert (task.vocabulary.counts == 0).sum() == GROUPS * COLD
    training.train(task)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a stale cache would warn
        model, task, _ = training.load(Run(tmp_path / "run"))
        best = model.predict(["i0 i1 i2"], k=COLD + 5)[0]
    # All items of the next group have the same attributes, so cold ones are as probable as the others.
    assert {one.name for one in best} == {f"i{3 + GROUPS * place}" for place in range(COLD + 5)}
    assert best[-1].score == pytest.approx(best[0].score, rel=1e-4)
    cold = f"i{3 + GROUPS * 9}"
    assert {one.name for one in model.similar(cold, 9)} == {one.name for one in best} - {cold}
    runs.export(tmp_path / "run")
    torch.testing.assert_close(
        torch.from_numpy(np.load(tmp_path / "run" / "export" / "classes.npy")), model.head.weight
    )
    task.part = (0, 2)
    with pytest.raises(ValueError, match="are trained by one process"):
        Model(task, task.settings)
    assert model.predict([f"i0 i1 {cold}"], k=1)[0][0].score == pytest.approx(  # as a part of a history, too
        model.predict(["i0 i1 i3"], k=1)[0][0].score, rel=1e-4
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lm", {"output": "characters", "own": 2}),
        ("next-item", {"item_feature": ["kind", "title:text"], "own": 2}),
    ],
)
def test_evaluations_and_loaded_models_are_fresh(tmp_path, name, options):
    """And no parameter has a row for each class."""

    class Stop(training.Observer):
        def stopped(self):
            return True  # after a step, not after an evaluation

    _, task = train(name, tmp_path, steps=4, num_samples=5, evaluations=1, **options)
    settings = task.settings
    settings.steps, settings.resume, settings.schedule = 8, True, "linear"
    training.train(training.prepare(name, settings), Stop())
    assert Run(tmp_path / "run").checkpoints()[-1].name.endswith("5")
    model, task, _ = training.load(Run(tmp_path / "run"))
    with torch.no_grad():
        rows = model.head.classes(torch.arange(task.num_classes))
    torch.testing.assert_close(model.head.weight, rows)
    assert all(task.num_classes not in parameter.shape for parameter in model.parameters())
    found = training.evaluate(model, task)["loss"]
    with torch.no_grad():
        model.head.classes.layers[2].weight *= 3
    assert training.evaluate(model, task)["loss"] != found  # it encodes all classes again


def test_ngrams_of_names():
    names = ["netdev", "", "i", "dev", "näme"]
    rows = ngrams(names)
    marked = [f"<{name}>" for name in names]
    counts = [sum(max(0, len(name) - size + 1) for size in SIZES) + 1 for name in marked]
    assert rows.lengths().tolist() == counts
    assert ((rows.values >= 0) & (rows.values < BUCKETS)).all()
    for place, name in enumerate(names):  # a name's n-grams do not depend on the others
        assert ngrams([name]).row(0).tolist() == rows.row(place).tolist()
    assert len(set(rows.row(0)) & set(rows.row(3))) == 3  # dev, ev> and dev>
    assert len({tuple(ngrams([name]).row(0)[-1:]) for name in ("ab", "ba", "aab", "b", "a")}) == 5


def attributes():
    generator = torch.Generator().manual_seed(0)
    categories = torch.randint(7, (20, 2), generator=generator, dtype=torch.int32)
    sizes = torch.randint(0, 4, (20,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    values = torch.randint(11, (int(sizes.sum()),), generator=generator, dtype=torch.int32)
    return Attributes(categories, 7, torch.randn(20, 3, generator=generator), [(values, offsets)], 11)


def test_a_tower_is_its_formula():
    parts, tower = attributes(), Tower(attributes(), 4)
    ids = torch.tensor([3, 0, 19, 3, 7])
    values, offsets = parts.bags[0]
    table = tower.bags[0].embedding.weight
    for row, item in zip(tower(ids), ids.tolist(), strict=True):
        bag = values[offsets[item] : offsets[item + 1]].long()
        found = [table[bag].mean(dim=0) if len(bag) else torch.zeros(4)]
        found += [tower.values.weight[value] for value in parts.categories[item].long()]
        found += [tower.scales(parts.numbers[item])]
        torch.testing.assert_close(row, sum(found) + tower.layers(torch.cat(found)))
    tower(ids).sum().backward()
    assert table.grad.is_sparse
    assert table.grad.coalesce()._nnz() == table.grad._nnz()  # each feature once
    torch.testing.assert_close(look_up(tower, ids.view(1, 5)), tower(ids).unsqueeze(0))


def test_attributes_of_items(tmp_path):
    file = tmp_path / "items.csv"
    file.write_text("item,brand,price,title\na,x,1,red car\nb,,3,\nc,y,,red\nd,x,1e9,car red\n")
    features = [Feature.parse(text) for text in ("brand", "price:number", "title:text")]
    table = read_items(file, "item", features, "utf-8", lambda size: None)
    names = ["c", "b", "zzz", "a", "d"]  # zzz is in no row
    items = Items.load(tmp_path, features, 5, write(table, features, names, tmp_path))
    c, b, z, a, d = items.categories[:, 0].tolist()
    assert (b, z, d) == (0, 0, a)
    assert len({a, b, c}) == items.num_values == 3
    assert items.numbers[[0, 2], 0].tolist() == [0.0, 0.0]
    assert abs(items.numbers).max() <= FARTHEST
    assert items.texts[0].lengths().tolist() == [1, 0, 0, 3, 3]
    assert set(items.texts[0].row(0)) <= set(items.texts[0].row(3))
    assert Feature.parse("a:b") == Feature("a:b", "category")
    assert Feature.parse("a:b:text") == Feature("a:b", "text")


def test_listed_items_are_kept():
    assert ranking(np.array([1, 5, 2, 1]), 2).tolist() == [1, 2]
    assert ranking(np.array([1, 5, 2, 1]), 2, [3]).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ("item,kind\n1,a\n", ["--item-feature", "colour"], "no column 'colour'; there are 'item', 'kind'"),
        ("thing,kind\n1,a\n", ["--item-feature", "kind"], "no column 'item'; there are 'thing', 'kind'"),
        ("item,kind\n1,a\n2,b\n1,c\n", ["--item-feature", "kind"], "item '1' has more than one row"),
        ("item,price\n1,2\n2,dear\n", ["--item-feature", "price:number"], "line 3: price must be a number, got 'dear'"),
        ("item,price\n1,inf\n", ["--item-feature", "price:number"], "line 2: price must be a number, got 'inf'"),
        ("item,kind\n1,a\n,b\n", ["--item-feature", "kind"], "line 3: no 'item'"),
        ("item,kind\n1,a\n", [], "give --items FILE and --item-feature COLUMN together"),
        ("item,kind\n1,a\n", ["--item-feature", "kind", "--init", "run"], "--init takes no --item-feature"),
        ("item,kind\n1,a\n", ["--item-feature", "kind", "--loss", "nce"], "--loss nce needs a table of class weights"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, capsys, content, more, message):
    (tmp_path / "items.csv").write_text(content)
    files = ["--interactions", write_sequences(tmp_path), "--items", tmp_path / "items.csv"]
    line = fails(monkeypatch, capsys, "train", "next-item", *files, *more, "--out", tmp_path / "run")
    assert message in line


def test_other_files_of_items(tmp_path, monkeypatch, capsys):
    rows = write_items(tmp_path).read_text().splitlines()
    text = tmp_path / "shop.txt"
    text.write_text("\n".join(rows))
    files = ["--interactions", write_sequences(tmp_path), "--item-feature", "kind", "--out", tmp_path / "run"]
    assert "--items must be a table" in fails(monkeypatch, capsys, "train", "next-item", *files, "--items", text)
    recbole = tmp_path / "shop.item"
    header = "item_id:token\tkind:token\tprice:float\ttitle:token_seq"
    recbole.write_text("\n".join([header, *(row.replace(",", "\t") for row in rows[1:])]))
    features = [Feature("kind", "category"), Feature("title", "text")]
    files = recbole, tmp_path / "items.csv"
    tables = [read_items(file, "item", features, "utf-8", lambda size: None) for file in files]
    assert tables[0] == tables[1]
