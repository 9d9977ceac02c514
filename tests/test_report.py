"""Reports and exports of trained runs, from run directories made here."""

import base64
import csv
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from manyclass import SampledSoftmax, report
from manyclass.report import compare, curves
from manyclass.train.export import FORMATS, export
from manyclass.train.run import Metrics

#: Those that every version wrote.
COLUMNS = Metrics._fields[:8]
VOID = {"meta", "img"}


def make_run(folder: Path, sampler="blocks", *, losses=(9.0, 6.0, 5.0), speed=10.0, task="lm", evaluation=None, **more):
    """Write a run directory of evaluations 100 steps apart, and load it."""
    folder.mkdir(parents=True)
    settings = {"features": 128, "sampler": sampler, "num_samples": None, "lr": 0.1, "seed": 0}
    config = {"task": task, "manyclass": "0.1.0", "torch": "2.13.0", "num_classes": 69919, "heldout_examples": 45}
    settings |= {key: more.pop(key) for key in set(more) & {"lr", "scope", "seed", "power"}}
    (folder / "config.json").write_text(json.dumps(config | {"threads": 2, "settings": settings} | more))
    num_samples = {"full": "", "blocks": 4096}.get(sampler, 64)
    with (folder / "metrics.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for index, loss in enumerate(losses):
            bias = "" if sampler == "full" or index == 0 else -0.02
            rows.writerow([100 * index, index, 100 * index / speed, 0.1, "", loss, bias, num_samples])
    if evaluation is not None:
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    return report.load(folder)


class Page(HTMLParser):
    """A well-formed page: every element is closed, in order. Keeps tables as rows of texts, and all texts."""

    def __init__(self, file: Path):
        super().__init__()
        self.source = file.read_text(encoding="utf-8")
        self.open, self.tags, self.texts = [], [], []
        self.tables: list[list[list[str]]] = []
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    def count(self, tag):
        return sum(found == tag for found, _ in self.tags)


def written(runs, folder: Path) -> Page:
    report.write(runs, folder / "report.html")
    assert [path.name for path in folder.glob("*.html")] == ["report.html"]
    return Page(folder / "report.html")


def printed(runs) -> str:
    console = Console(record=True, width=200)
    console.print(report.table(runs))
    return console.export_text()


def cells(text: str, name: str) -> list[str]:
    """The cells of a printed row."""
    (line,) = [line for line in text.splitlines() if re.match(rf"│ {re.escape(name)} ", line)]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_load(tmp_path):
    run = make_run(tmp_path / "first", evaluation={"step": 200, "loss": 5.1})
    assert run.name == "first"
    assert run.config["num_classes"] == 69919
    assert run.column("heldout_loss") == [9.0, 6.0, 5.0]
    assert math.isnan(run.rows[0]["bias"])
    assert run.evaluation == {"step": 200, "loss": 5.1}
    assert make_run(tmp_path / "second").evaluation is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", "\udcff", "not valid JSON"),
        ("config.json", "[]", "must hold an object, not list"),
        ("config.json", '{"task": "lm", "num_classes": 9}', "'settings' must be of type dict"),
        ("config.json", '{"task": "lm", "num_classes": 9, "settings": {}}', "'settings' must name the 'sampler'"),
        ("evaluation.json", "nonsense", "not valid JSON"),
        ("metrics.csv", "", "has no rows yet"),
        ("metrics.csv", ",".join(COLUMNS) + "\n", "has no rows yet"),
        ("metrics.csv", "step,epoch,seconds,lr,train_loss,bias\n0,0,0,1,1,0\n", "lacks the column heldout_loss, num_s"),
        ("metrics.csv", ",".join(COLUMNS) + "\n0,0,0,1,,9,,\n100,1,10", "line 3 is cut short"),
        ("metrics.csv", ",".join(COLUMNS) + "\n0,0,0,1,,nine,,\n", "could not convert string to float: 'nine'"),
        ("metrics.csv", ",".join(COLUMNS) + "\n,0,0,1,,9,,\n", "line 2 lacks the step or the seconds"),
    ],
)
def test_broken_runs_name_the_file(tmp_path, file, content, message):
    make_run(tmp_path / "run")
    (tmp_path / "run" / file).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        report.load(tmp_path / "run")
    assert str(caught.value).startswith(f"{tmp_path / 'run' / file}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["config.json", "metrics.csv"])
def test_missing_files_are_named(tmp_path, file):
    make_run(tmp_path / "run")
    (tmp_path / "run" / file).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{re.escape(str(tmp_path / 'run'))}.*{re.escape(file)}"):
        report.load(tmp_path / "run")


def test_no_runs(tmp_path):
    for call in (lambda: report.table([]), lambda: report.plot([], tmp_path / "x"), lambda: report.write([], tmp_path)):
        with pytest.raises(ValueError, match="there are no runs"):
            call()


def test_table(tmp_path):
    runs = [
        make_run(tmp_path / "sampled", speed=31.0),
        make_run(tmp_path / "each", "unigram", losses=(9, 4), speed=20),
        make_run(tmp_path / "pool", "unigram", scope="batch"),
        make_run(tmp_path / "all", "full", speed=2.5),
        make_run(tmp_path / "later", "full", speed=5),
        make_run(tmp_path / "untrained", losses=(9,)),
    ]
    text = printed(runs)
    assert compare.TITLE in text
    assert cells(text, "sampled") == ["sampled", "blocks", "32 each, 4096 shared", "5.000", "148", "31", "12.4×"]
    assert cells(text, "each") == ["each", "unigram", "64 each", "4.000", "54.6", "20", "8.0×"]
    assert cells(text, "pool")[2] == "64 shared"
    assert cells(text, "all") == ["all", "full", "all", "5.000", "148", "2.5", "1.0×"]
    assert cells(text, "later")[-1] == "2.0×"
    assert cells(text, "untrained")[-2:] == ["–", "–"]
    assert "speed-up" in text
    assert "speed-up" not in printed(runs[:3])  # nothing to compare with
    assert "do not compare" not in text


def test_metrics_stand_for_perplexity_beyond_language(tmp_path):
    evaluation = {"step": 200, "examples": 45, "loss": 5.1, "perplexity": 164.0, "recall@10": 0.31237}
    runs = [make_run(tmp_path / "with", task="next-item", evaluation=evaluation)]
    runs.append(make_run(tmp_path / "without", task="next-item"))
    text = printed(runs)
    assert "perplexity" not in text
    assert "recall@10" in text
    assert cells(text, "with")[4] == "0.3124"
    assert cells(text, "without")[4] == "–"


def test_how_items_were_ranked_is_said(tmp_path):
    way = {"step": 200, "examples": 3000, "on": "test", "exclude_seen": True, "recall@10": 0.5}
    changes = [{}, {}, {"on": "heldout"}, {"exclude_seen": False}, {"examples": 3}, {"probe": 4}]
    runs = [
        make_run(tmp_path / str(number), task="next-item", evaluation=way | change)
        for number, change in enumerate(changes)
    ]
    said = "Rankings on 3,000 test examples; items that a user had before are left out of them."
    assert said in " ".join(printed(runs[:2]).split())
    assert said in written(runs[:2], tmp_path).texts
    for other in runs[2:]:
        assert "their recall, MRR and NDCG do not compare" in " ".join(printed([runs[0], other]).split())
    edited = make_run(tmp_path / "edited", task="next-item", evaluation={"step": 200, "on": [], "recall@10": 0.5})
    assert "Rankings on None [] examples" in printed([edited])
    classified = make_run(tmp_path / "classified", task="classify", evaluation=way)
    assert "Rankings on 3,000 test examples." in printed([classified])


def test_measures_are_of_the_checkpoint_and_cut_off_of_the_table(tmp_path):
    """The loss is that of the checkpoint that the run keeps; measures of another one are not shown beside it."""
    found = {"examples": 9, "loss": 4.0, "recall@5": 0.25, "recall@10": 0.5}
    losses, config = (9, 4, 6), {"task": "next-item", "select": "loss"}
    best = make_run(tmp_path / "best", losses=losses, evaluation={"step": 100, **found}, **config)
    stale = make_run(tmp_path / "stale", losses=losses, evaluation={"step": 200, **found}, **config)
    last = make_run(tmp_path / "last", losses=losses, task="next-item", evaluation={"step": 200, "recall@5": 0.75})
    text = printed([best, stale, last])
    assert "recall@5" in text
    assert "recall@10" not in text
    assert cells(text, "best")[3:5] == ["4.000", "0.25"]
    assert cells(text, "stale")[3:5] == ["4.000", "–"]
    assert cells(text, "last")[3:5] == ["6.000", "0.75"]


def test_runs_that_do_not_compare(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", num_classes=50)]
    message = "The runs have different numbers of classes: their losses do not compare."
    assert message in " ".join(printed(runs).split())
    html = written(runs, tmp_path)
    assert message in html.texts
    assert "Language model over 50 to 69,919 classes" in html.texts
    assert not any("Lowest" in text for text in html.texts)


def test_page(tmp_path):
    evaluation = {"step": 200, "examples": 45, "loss": 5.1, "perplexity": 164.0219}
    full = make_run(tmp_path / "full", "full", losses=(9, 5, 4.5), speed=2.5)
    sampled = make_run(tmp_path / "sampled", evaluation=evaluation, speed=31)
    html = written([full, sampled], tmp_path)
    summary, metrics, settings, versions = html.tables
    assert summary[0] == ["run", "sampler", "negatives", "loss", "perplexity", "steps/s", "speed-up"]
    assert summary[2] == ["sampled", "blocks", "32 each, 4096 shared", "5.000", "148", "31", "12.4×"]
    assert metrics == [["run", *evaluation], ["sampled", "200", "45", "5.1", "164"]]
    assert settings[0] == ["setting", "full", "sampled"]
    assert ["torch", "2.13.0"] in versions
    assert ["threads", "2"] in versions
    assert "Language model over 69,919 classes" in html.texts
    assert "Lowest held-out loss at the end: full, 4.500 nats after 200 steps, 80.0 seconds of training." in html.texts
    assert html.count("figure") == 1
    # Steps, time and bias; the full softmax has no bias to show.
    panels = compare._panels([full, sampled])
    assert [panel.x_label for panel in panels] == [compare.STEPS, compare.SECONDS, compare.STEPS]
    assert panels[0].curves[0] == ([0, 100, 200], [9, 5, 4.5])
    assert panels[1].curves[0] == ([0, 40, 80], [9, 5, 4.5])
    assert len(compare._panels([full])) == 2


def test_labels_do_not_overlap(tmp_path):
    """Boxes of titles, tick labels, axis labels and the legend, as they are drawn."""
    more = {"losses": [9.123456, 5.1, 4.9], "speed": 0.0031}
    runs = [make_run(tmp_path / f"a-long-name-of-a-run-{index}", **more) for index in range(9)]
    figure = curves.draw(compare._title(runs), compare._legend(runs), compare._panels(runs))
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.savefig(tmp_path / "report.png")
    texts = [figure._suptitle, *figure.legends]
    for axes in figure.axes:
        texts += [axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
            texts += [label for place, label in ticks if low <= place <= high and label.get_text()]
    boxes = [text.get_window_extent(renderer) for text in texts]
    assert len(boxes) > 30
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index]), texts[index]
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert 0 <= box.y0 < box.y1 <= figure.bbox.y1


def test_page_needs_nothing_else(tmp_path):
    html = written([make_run(tmp_path / "run", evaluation={"loss": 5.0})], tmp_path)
    (picture,) = [attributes["src"] for tag, attributes in html.tags if tag == "img"]
    assert picture.startswith("data:image/svg+xml;base64,")
    assert not re.search(r"https?:|url\(|@import|//", html.source.replace(picture, ""))
    assert not {"script", "link", "iframe", "image", "use"} & {tag for tag, _ in html.tags}
    assert not any({"href", "xlink:href"} & attributes.keys() for _, attributes in html.tags)
    drawn = base64.b64decode(picture.partition(",")[2]).decode()
    assert not re.search(r"href=\"[^#]|url\([^#]|<script|<image", drawn)
    assert "prefers-color-scheme: dark" in html.source


def test_differing_settings_come_first(tmp_path):
    runs = [make_run(tmp_path / "a", lr=0.100001, seed=3), make_run(tmp_path / "b", lr=0.1, seed=3, power=0.75)]
    html = written(runs, tmp_path)
    settings = html.tables[1]
    assert [row[0] for row in settings] == ["setting", "● lr", "● power", "features", "sampler", "num_samples", "seed"]
    assert settings[1:4] == [["● lr", "0.100001", "0.1"], ["● power", "–", "0.75"], ["features", "128"]]
    assert html.tags.count(("tr", {"class": "differs"})) == 2
    assert html.tags.count(("td", {"colspan": "2"})) == 4 + 6  # the other settings, and what was run
    alone = written(runs[:1], tmp_path)
    assert "●" not in "".join(alone.texts)


def test_names_are_escaped(tmp_path):
    name = "<b>&amp;\"'[red]$x_"
    run = make_run(tmp_path / name, losses=(9, math.nan))
    html = written([run], tmp_path)
    assert "b" not in {tag for tag, _ in html.tags}
    assert html.tables[0][1][0] == name
    assert f"curves of {name} (diverged)" in [attributes.get("alt") for _, attributes in html.tags]
    assert cells(printed([run]), name)[0] == name
    report.plot([run, make_run(tmp_path / "_$\\frac$")], tmp_path / "plot.png")


def test_same_folder_names(tmp_path):
    runs = [make_run(tmp_path / path) for path in ("x/run", "y/run", "p/z/again", "q/z/again", "alone")]
    names = [row[0] for row in written(runs, tmp_path).tables[0][1:]]
    assert names == ["x/run", "y/run", "p/z/again", "q/z/again", "alone"]
    twice = [row[0] for row in written([runs[0], runs[0]], tmp_path).tables[0][1:]]
    assert twice == [str(tmp_path / "x/run")] * 2


@pytest.mark.parametrize("losses", [(9, math.nan), (9, 1e30, math.inf, math.nan), (math.nan, math.nan), (math.inf,)])
def test_diverged(tmp_path, losses):
    bad, good = make_run(tmp_path / "bad", losses=losses), make_run(tmp_path / "good", "full")
    assert cells(printed([bad, good]), "bad")[3:5] == ["diverged", "–"]
    for runs in ([bad], [bad, good]):
        html = written(runs, tmp_path)
        assert html.tables[0][1][3] == "diverged"
        assert compare._legend(runs)[0] == "bad (diverged)"
        report.plot(runs, tmp_path / "plot.png")
    assert any("Lowest held-out loss at the end: good, 5.000" in text for text in html.texts)
    assert "The run diverged." in written([bad], tmp_path).texts
    assert "Every run diverged." in written([bad, bad], tmp_path).texts


def test_gaps(tmp_path):
    run = make_run(tmp_path / "run", "full", losses=(9, 8, math.inf, 7, 6))
    figure = curves.draw("title", ["run"], compare._panels([run]))
    (line,) = figure.axes[0].lines
    assert line.get_xdata().tolist() == [0, 100, 200, 300, 400]
    np.testing.assert_array_equal(line.get_ydata(), [9, 8, math.nan, 7, 6])
    low, high = figure.axes[0].get_ylim()
    assert 5.5 < low < 6 < 9 < high < 9.5


def test_a_diverging_run_does_not_squeeze_the_others(tmp_path):
    runs = [make_run(tmp_path / "bad", losses=(10, 1e9, math.nan)), make_run(tmp_path / "good")]
    low, high = compare._loss_limits(runs)
    assert 4.5 < low < 5
    assert 10 < high < 13


def test_huge_losses_have_no_perplexity(tmp_path):
    assert cells(printed([make_run(tmp_path / "huge", losses=(9, 1000)), make_run(tmp_path / "b")]), "huge")[4] == "–"


def test_plot(tmp_path):
    runs = [make_run(tmp_path / f"{index}-{'long' * 30}", lr=index) for index in range(30)]
    report.plot(runs[:2], tmp_path / "new" / "two.png")
    report.plot(runs, tmp_path / "thirty.png")
    sizes = []
    for file in (tmp_path / "new" / "two.png", tmp_path / "thirty.png"):
        data = file.read_bytes()
        assert data[:4] == b"\x89PNG"
        sizes.append(int.from_bytes(data[20:24], "big"))
    assert sizes[1] > sizes[0] + 300  # room for the legend
    looks = {(index % len(curves.COLOURS), index % len(curves.MARKERS)) for index in range(30)}
    assert len(looks) == 30


def test_long_curves_have_few_markers(tmp_path):
    run = make_run(tmp_path / "full", "full", losses=[5.0] * 1000)
    (line,) = curves.draw("title", ["run"], compare._panels([run])).axes[0].lines
    assert len(line.get_xdata()) == 1000
    assert line.get_markevery() == 40


def test_limits():
    assert curves.limits([1.0, 2.0]) == pytest.approx((0.96, 2.04))
    assert curves.limits([1.0, 2.0, math.nan, math.inf, 100.0], most=3.0) == pytest.approx((0.92, 3.08))
    for values in ([], [math.nan], [0.0], [5.0], [-5.0]):
        low, high = curves.limits(values)
        assert low < high


NAMES = [f"class {i} ü" for i in range(50)]


def trained(*, bias: bool, dtype=torch.float32) -> SampledSoftmax:
    torch.manual_seed(0)
    return SampledSoftmax(8, 50, "uniform", 5, bias=bias, dtype=dtype).eval()


@pytest.mark.parametrize("to", FORMATS)
def test_export_names(tmp_path, to):
    polars = pytest.importorskip("polars")
    if to != "npy":
        pytest.importorskip(to)
    head = trained(bias=False)
    out = tmp_path / "new" / "folder"
    files = export(head.weight, None, NAMES, "softmax", to, out)
    assert files == [out / f"classes.{to}", out / "classes.parquet"]
    assert set(out.iterdir()) == set(files)
    table = polars.read_parquet(files[1])
    assert table["id"].to_list() == list(range(50))
    assert table["name"].to_list() == NAMES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_export_npy(tmp_path, bias, dtype):
    pytest.importorskip("polars")
    head = trained(bias=bias, dtype=dtype)
    file, _ = export(head.weight, head.bias, NAMES, "absolute", "npy", tmp_path)
    rows = np.load(file)
    assert rows.dtype == np.float32
    assert rows.shape == (50, 8 + bias)
    assert np.array_equal(rows[:, :8], head.weight.detach().float().numpy())
    if head.bias is not None:
        assert np.array_equal(rows[:, 8], head.bias.detach().float().numpy())


@pytest.mark.parametrize("bias", [True, False])
def test_export_safetensors(tmp_path, bias):
    pytest.importorskip("polars")
    safetensors = pytest.importorskip("safetensors")
    head = trained(bias=bias, dtype=torch.bfloat16)
    file, _ = export(head.weight, head.bias, NAMES, "absolute", "safetensors", tmp_path)
    with safetensors.safe_open(file, "pt") as found:
        assert found.metadata() == {"prediction": "absolute"}
        assert set(found.keys()) == ({"weight", "bias"} if bias else {"weight"})
        assert found.get_tensor("weight").dtype == torch.float32
        assert torch.equal(found.get_tensor("weight"), head.weight.detach().float())
        if head.bias is not None:
            assert torch.equal(found.get_tensor("bias"), head.bias.detach().float())


@pytest.mark.filterwarnings("ignore:builtin type")
@pytest.mark.parametrize("bias", [True, False])
def test_faiss_finds_what_the_head_finds(tmp_path, bias):
    pytest.importorskip("polars")
    faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    head = trained(bias=bias)
    query = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    file, _ = export(head.weight, head.bias, NAMES, "softmax", "faiss", tmp_path)
    _, expected = head.topk(query, 10)
    with_one = torch.cat([query, torch.ones(20, 1)], dim=1) if bias else query
    scores, found = faiss.read_index(str(file)).search(with_one.numpy(), 10)
    assert found.tolist() == expected.tolist()
    logits = query @ head.weight.T if head.bias is None else query @ head.weight.T + head.bias
    assert torch.allclose(torch.from_numpy(scores), logits.topk(10).values, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"to": "csv"}, "to must be one of 'npy', 'faiss', 'safetensors', got 'csv'"),
        ({"prediction": "sigmoid"}, "prediction must be one of"),
        ({"to": "faiss", "prediction": "absolute"}, "which a search by inner product cannot find"),
        ({"names": NAMES[:-1]}, "weight must have shape (49 names, in_features), got (50, 8)"),
        ({"bias": torch.zeros(50, 1)}, "bias must have shape (50,), got (50, 1)"),
    ],
)
def test_export_errors(tmp_path, change, message):
    arguments = {"weight": torch.zeros(50, 8), "bias": None, "names": NAMES, "prediction": "softmax", "to": "npy"}
    with pytest.raises(ValueError, match=re.escape(message)):
        export(**(arguments | change), out=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "package", "to"),
    [("faiss", "faiss-cpu", "faiss"), ("safetensors.torch", "safetensors", "safetensors"), ("polars", "polars", "npy")],
)
def test_missing_packages(tmp_path, monkeypatch, module, package, to):
    if module != "polars":
        pytest.importorskip("polars")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"^export needs {package}: pip install {package}$"):
        export(torch.zeros(50, 8), None, NAMES, "softmax", to, tmp_path)
    assert list(tmp_path.iterdir()) == []
