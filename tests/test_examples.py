"""The scripts in ``examples/``, on tiny data."""

import importlib.util
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
LOOP = ["--classes", "300", "--steps", "100", "--batch", "32", "--num-samples", "64"]
TINY = {
    "plain_loop": LOOP,
    "lightning_module": LOOP,
    "sharded": ["--classes", "300", "--steps", "50", "--batch", "32", "--num-samples", "64"],
    "transformers_trainer": ["--words", "300", "--steps", "60", "--batch", "16", "--num-samples", "64"],
    "word_gpt": ["--steps", "60", "--length", "16", "--features", "32", "--layers", "1", "--num-samples", "64"],
    "two_tower": ["--items", "300", "--steps", "100", "--batch", "32", "--num-samples", "64", "--features", "8"],
    "label_names": ["--labels", "300", "--steps", "100", "--batch", "32", "--num-samples", "64", "--features", "16"],
    "identities": ["--identities", "300", "--steps", "100", "--batch", "32", "--num-samples", "64", "--features", "16"],
}


#: What examples import that manyclass does not need.
NEEDED = {"lightning_module": ["lightning"], "transformers_trainer": ["transformers", "accelerate"]}


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == TINY.keys()


def test_pages_show_parts_of_examples():
    page = (EXAMPLES.parent / "docs" / "how-to" / "frameworks.md").read_text("utf-8")
    parts = re.findall(r"^--8<--\nexamples/(.*):(.*)\n--8<--$", page, re.M)
    assert len(parts) == 3
    assert page.count("--8") == 2 * len(parts)  # no marker is broken, as by a formatter
    for file, part in parts:
        assert f"[start:{part}]" in (EXAMPLES / file).read_text("utf-8")


def made_text(file):
    """Write a text in which each of 300 words is followed by one of three others."""
    numbers = random.Random(0)
    followers = [[numbers.randrange(300) for _ in range(3)] for _ in range(300)]
    words = [0]
    for _ in range(6000):
        words.append(numbers.choice(followers[words[-1]]))
    file.write_text(" ".join(f"w{word}" for word in words), "utf-8")
    return str(file)


@pytest.mark.filterwarnings("default")  # of the libraries that examples import
@pytest.mark.parametrize("name", sorted(TINY.keys() - {"sharded"}))
def test_an_example_runs_and_learns(name, tmp_path, capsys):
    for library in NEEDED.get(name, []):
        pytest.importorskip(library, reason=f"examples/{name}.py needs {library}")
    text = [made_text(tmp_path / "text.txt")] if name == "word_gpt" else []
    result = example(name).main(text + TINY[name])
    assert all(math.isfinite(value) for value in result.values())
    printed = capsys.readouterr().out.splitlines()
    assert [line[: len(key)] for line, key in zip(printed[-len(result) :], result, strict=True)] == list(result)
    losses = [value for key, value in result.items() if key.startswith(("loss of old", "exact loss"))]
    assert losses or name == "identities"
    assert all(loss < math.log(300) - 0.1 for loss in losses)
    if name == "identities":
        assert result["right by learned vectors"] > 0.05  # of 200


def test_the_sharded_example_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLES / "sharded.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, *TINY["sharded"]], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    result = dict(line.rsplit(maxsplit=1) for line in run.stdout.splitlines())
    assert float(result["processes"]) == 2
    assert float(result["exact loss"]) < math.log(300) - 0.1


@pytest.mark.parametrize("sampler", ["uniform", "in_batch", "full"])
def test_the_recommender_with_other_samplers(sampler):
    result = example("two_tower").main([*TINY["two_tower"], "--sampler", sampler])
    assert result["loss of old items"] < math.log(300) - 0.1


@pytest.mark.parametrize("margin", ["none", "cosface"])
def test_identities_with_other_margins(margin):
    result = example("identities").main([*TINY["identities"], "--margin", margin])
    assert math.isfinite(result["bias of the loss"])


def test_missing_words_change_nothing():
    text = example("label_names").Text(["bade", "kilo"], 4).eval()
    with torch.no_grad():
        torch.testing.assert_close(text(torch.tensor([[0, -1, -1]])), text(torch.tensor([[0]])))
