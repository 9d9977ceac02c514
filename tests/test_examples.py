"""The scripts in ``examples/``, on tiny data."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = {
    "two_tower": ["--items", "300", "--steps", "100", "--batch", "32", "--num-samples", "64", "--features", "8"],
    "label_names": ["--labels", "300", "--steps", "100", "--batch", "32", "--num-samples", "64", "--features", "16"],
    "identities": ["--identities", "300", "--steps", "100", "--batch", "32", "--num-samples", "64", "--features", "16"],
}


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == TINY.keys()


@pytest.mark.parametrize("name", TINY)
def test_an_example_runs_and_learns(name, capsys):
    result = example(name).main(TINY[name])
    assert all(math.isfinite(value) for value in result.values())
    assert capsys.readouterr().out.count("\n") == len(result)
    losses = [value for key, value in result.items() if key.startswith("loss of old")]
    assert all(loss < math.log(300) - 0.1 for loss in losses)
    if name == "identities":
        assert result["right by learned vectors"] > 0.05  # of 200


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
