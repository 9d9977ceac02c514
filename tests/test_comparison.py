"""The comparison of all methods, in miniature: real processes, tiny data."""

import csv
import io
import math

import pytest
import readme
from rich.console import Console

from manyclass import losses, samplers
from manyclass.experiments import comparison, comparison_report, reproduce
from manyclass.experiments.comparison import Result, Trial

SMALL = reproduce.Dataset(
    "small",
    {"--interactions": "sequences.txt*"},
    "next-item --model feed-forward --features 8 --dropout 0 --batch 40",
    {"quick": "--steps 99 --evaluations 2"},
)


@pytest.fixture
def data(tmp_path, monkeypatch):
    folder = tmp_path / "data" / "synth"
    folder.mkdir(parents=True)
    lines = [" ".join(f"i{(user + 3 * place) % 61}" for place in range(7)) for user in range(80)]
    (folder / "sequences.txt").write_text("\n".join(lines))
    monkeypatch.setitem(reproduce.DATASETS, "synth", SMALL)
    monkeypatch.setitem(comparison.QUICK, "synth", "--steps 12")
    return tmp_path / "data"


def compare(data, out, methods):
    out.mkdir(exist_ok=True)
    trials = [Trial("quick", "synth", method, 0) for method in methods]
    comparison.sweep(trials, data, out, 1, Console(file=io.StringIO()))
    console = Console(width=120, file=io.StringIO())
    comparison_report.summarise("quick", ["synth"], out, console)
    return console.file.getvalue()


def test_a_comparison_is_trained_once_and_accumulates(tmp_path, data, launched):
    out = tmp_path / "out"
    compare(data, out, ["full"])
    assert launched == [("train", "quick-synth-full-0"), ("evaluate", "quick-synth-full-0")]
    launched.clear()
    page = compare(data, out, ["nce", "full"])
    assert [name for _, name in launched] == ["quick-synth-nce-0"] * 2
    with (out / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["full", "nce"]
    for row in rows:
        assert 0 < float(row["loss"]) < 2 * math.log(61)
        assert 0 < float(row["cpu_seconds"]) < 60
        assert float(row["seconds"]) > 0
        assert int(row["steps"]) == 12
        assert float(row["megabytes"]) > 50
        assert row["method"] in page
    assert len((out / "comparison-curves.csv").read_text().splitlines()) == 1 + 4
    assert (out / "comparison.png").stat().st_size > 5000
    assert not list((out / "runs").iterdir())


def test_every_method_is_a_command_that_trains(tmp_path):
    """All options parse, and every sampler and loss is compared but those that score all classes for each draw."""
    from manyclass.train.settings import NextItemSettings

    seen = set()
    for method, options in comparison.METHODS.items():
        words = options.split()
        given = dict(zip([word.lstrip("-").replace("-", "_") for word in words[::2]], words[1::2], strict=True))
        numbers = {
            name: float(value) if name == "power" else int(value) for name, value in given.items() if value[0].isdigit()
        }
        settings = NextItemSettings(interactions=tmp_path, **(given | numbers))
        seen |= {settings.sampler, settings.loss}
        command = comparison.arguments(Trial("quick", "ptb", method, 0), {}, tmp_path)
        assert command[:2] == ["train", "lm"]
        assert command[-1] == "--resume"
    assert {*samplers.names(), *losses.names(), "full"} - seen == {"log_uniform", "quartic"}


def test_a_tree_of_trained_vectors_is_made_from_a_run_before(tmp_path):
    job = comparison._job(Trial("quick", "ptb", "hierarchical bisection", 1), {}, tmp_path)
    first, second, third = ([*map(str, command)] for command in job.commands)
    folder = first[first.index("--out") + 1]
    assert first[first.index("--sampler") + 1] == "blocks"
    assert second[second.index("--tree") + 1] == folder != second[second.index("--out") + 1]
    assert third[:2] == ["evaluate", str(job.folder)]
    assert third[third.index("--limit") + 1] == str(comparison.LIMIT)
    job = comparison._job(Trial("full", "ptb", "hierarchical", 1), {}, tmp_path)
    assert len(job.commands) == 2
    assert "--tree" not in job.commands[0]
    assert "--limit" not in job.commands[1]


def test_the_docs_show_what_was_measured():
    """The committed tables are those of the committed CSV files; `make readme` writes them."""
    groups, text = readme.comparison_groups(), readme.RELATED.read_text("utf-8")
    assert (readme.RESULTS / comparison_report.PAGE).read_text("utf-8") == comparison_report.page(groups)
    assert text == readme.with_results(text, groups)


def test_labels_of_the_plot_do_not_overlap():
    placed = comparison_report.apart({"b": 1.0, "a": 0.9, "c": 5.0, "d": 1.0}, 0.5)
    assert placed == {"a": 0.9, "b": 1.4, "d": 1.9, "c": 5.0}


def result(method, loss, curve, seed=0, bias=math.nan):
    return Result(Trial("quick", "synth", method, seed), loss, 0.3, 0.1, 100, 10.0, 12.0, 200.0, bias, tuple(curve))


def test_the_table_compares_with_the_full_softmax(tmp_path):
    results = [
        result("full", 5.0, [(5.0, 6.0), (10.0, 5.2)]),
        result("full", 5.2, [(5.0, 6.0), (10.0, 5.0)], seed=1),
        result("blocks", 5.05, [(1.0, 5.6), (2.0, 5.15)], bias=-0.01),
        result("uniform", 6.0, [(1.0, 7.0), (2.0, 6.0)], bias=-0.5),
        result("negative", 4.0, [(1.0, 4.0)]),
    ]
    cells = {row[0]: row[1:] for row in comparison_report.rows(results)}
    # Best first, but those whose outputs are no log probabilities last.
    assert list(cells) == ["blocks", "full", "uniform", "negative"]
    assert cells["blocks"] == ("5.050", "-0.050", "0.3000", "0.1000", "100", "1.0", "2.0", "200", "-0.010")
    assert cells["full"][:2] == ("5.100", "+0.000")
    assert cells["full"][5:7] == ("10.0", "–")  # one seed ends 0.1 above the mean of both
    assert cells["uniform"][5:7] == ("–", "–")
    assert cells["negative"][:2] == ("(4.000)", "–")
    assert cells["negative"][5:] == ("–", "–", "200", "–")
    page = comparison_report.page({"synth": results, "ptb": results[2:3]})
    assert "## Synthetic, 82k items, 100 steps, 2 seeds\n\n| method | loss | Δ full |" in page
    assert "| uniform | 6.000 | +0.900 | 0.3000 |" in page
    assert "| method | synth: Δ full | synth: recall@20 | synth: ms/step | ptb: Δ full |" in page
    assert "| blocks | -0.050 | 0.3000 | 100 | – | 0.3000 | 100 |" in page
    assert "| uniform | +0.900 | 0.3000 | 100 |  |  |  |" in page
    assert comparison_report.rows(results[2:3])[0][2] == "–"  # nothing to compare with
    comparison.write(results, tmp_path)
    again = comparison.read(tmp_path)
    assert [one.trial for one in again.values()] == [one.trial for one in results]
    assert again[results[2].trial] == results[2]
    (tmp_path / "comparison.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"comparison.csv must have the columns preset, dataset"):
        comparison.read(tmp_path)
