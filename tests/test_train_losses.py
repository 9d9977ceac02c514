"""`manyclass train --loss`: every loss of related work learns, is evaluated and resumes."""

import json
import shutil

import pytest
import test_training
import torch
from test_training import settings_of, train

from manyclass import losses, report
from manyclass.train import evaluation, training
from manyclass.train.model import Model
from manyclass.train.run import Run

CASES = {
    "nce": {"sampler": "unigram", "scope": "batch", "num_samples": 20},
    "negative": {"sampler": "unigram", "power": 0.75, "num_samples": 3},
    "blackout": {"sampler": "unigram", "num_samples": 5},
    "sce": {},
    "hierarchical": {},
    "adaptive": {},
    "spherical": {},
    "taylor": {},
}


def test_every_loss_is_here():
    assert set(CASES) == set(losses.names())


@pytest.mark.parametrize("loss", CASES)
def test_a_loss_learns_and_is_loaded(tmp_path, loss):
    rows, _ = train("lm", tmp_path, loss=loss, steps=80, **CASES[loss])
    assert (rows[-1].bias is None) == (loss != "sce")  # no other is a bound or an estimate of the exact loss
    assert (rows[-1].num_samples is None) == (not losses.draws(loss))
    model, task, step = training.load(Run(tmp_path / "run"))
    assert step == 80
    assert type(model.head) is losses.named(loss)
    found = evaluation.evaluate(model, task, k=(1,))
    assert found["loss"] == pytest.approx(rows[-1].heldout_loss, abs=1e-6)
    assert found["recall@1"] > 0.3  # by chance it would be 1/11
    assert json.loads((tmp_path / "run" / "resources.json").read_text())["peak_bytes"] > 1e7
    sampler = CASES[loss].get("sampler")
    assert report.load(tmp_path / "run").sampler == (f"{loss}, {sampler}" if sampler else loss)


@pytest.mark.parametrize("loss", ["nce", "sce"])
def test_tied_weights(tmp_path, loss):
    rows, _ = train("lm", tmp_path, loss=loss, steps=60, tied=True, **CASES[loss])
    assert rows[-1].heldout_loss < rows[0].heldout_loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "hinge"}, "--loss must be one of 'softmax', 'nce'"),
        ({"loss": "nce", "sampler": "full"}, "--loss nce needs negatives, so it takes no --sampler full"),
        ({"loss": "nce", "sampler": "unigram", "tolerance": 0.1}, "--loss nce takes no --tolerance"),
        ({"loss": "taylor", "prediction": "absolute"}, "--loss taylor takes no --prediction"),
        ({"loss": "nce", "sampler": "unigram", "offsets": True}, "--loss nce takes no --offsets"),
        ({"loss": "sce", "sampler": "uniform"}, "--loss sce takes no --sampler"),
        ({"loss": "hierarchical", "num_samples": 3}, "--loss hierarchical takes no --num-samples"),
    ],
)
def test_options_that_a_loss_does_not_take(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        settings_of("lm", tmp_path, **options)


def test_a_tree_has_no_tied_weights(tmp_path):
    with pytest.raises(ValueError, match="--loss hierarchical takes no --tied"):
        train("lm", tmp_path, loss="hierarchical", tied=True, steps=1)


def test_a_tree_of_the_class_vectors_of_another_run(tmp_path):
    """Its halves are those of the vectors, by name; a checkpoint keeps it, even if the other run is gone."""
    train("lm", tmp_path, steps=40, sampler="uniform", num_samples=5)
    vectors = (tmp_path / "run").rename(tmp_path / "vectors")
    other, before, _ = training.load(Run(vectors))
    rows, task = train("lm", tmp_path, loss="hierarchical", tree=vectors, steps=80)
    assert task.vocabulary.names == before.vocabulary.names
    shutil.rmtree(vectors)
    model, task, _ = training.load(Run(tmp_path / "run"))
    expected = losses.HierarchicalSoftmax(4, task.num_classes, embeddings=other.head.weight.detach())
    for name in ("node", "side", "offsets"):
        assert torch.equal(getattr(model.head, name), getattr(expected, name))
    assert not torch.equal(model.head.node, Model(task, task.settings).head.node)  # no tree of the order of the ids
    found = evaluation.evaluate(model, task, k=(1,))
    assert found["loss"] == pytest.approx(rows[-1].heldout_loss, abs=1e-6)
    assert found["recall@1"] > 0.3


def test_a_tree_needs_class_vectors(tmp_path):
    train("lm", tmp_path, steps=1, loss="hierarchical")
    vectors = (tmp_path / "run").rename(tmp_path / "vectors")
    with pytest.raises(ValueError, match=r"--tree .*vectors: its loss 'hierarchical' has no vector for each class"):
        train("lm", tmp_path, loss="hierarchical", tree=vectors, steps=1)
    with pytest.raises(ValueError, match="--tree is for --loss hierarchical, not for --loss softmax"):
        settings_of("lm", tmp_path, tree=vectors)


def test_a_run_from_before_there_were_losses_resumes(tmp_path):
    train("lm", tmp_path, steps=10)
    file = tmp_path / "run" / "config.json"
    config = json.loads(file.read_text())
    del config["settings"]["loss"]
    file.write_text(json.dumps(config))
    settings = settings_of("lm", tmp_path, steps=10, resume=True)
    assert settings.differences(config["settings"]) == []
    assert training.train(training.prepare("lm", settings))[-1].step == 10
    with pytest.raises(ValueError, match="was begun with loss="):
        training.prepare("lm", settings_of("lm", tmp_path, steps=10, resume=True, loss="sce"))


RESUMED = [
    {"loss": "hierarchical"},
    {"loss": "adaptive"},
    {"loss": "sce"},
    *(
        {"sampler": name, "num_samples": 5}
        for name in ("ngram", "head_tail", "two_pass", "lsh", "multi_index", "positive_features")
    ),
]


@pytest.mark.parametrize("options", RESUMED, ids=lambda options: options.get("loss") or options["sampler"])
def test_a_stopped_run_ends_with_the_same_numbers(tmp_path, options):
    test_training.test_a_stopped_run_goes_on_to_the_same_numbers(tmp_path, "lm", options)
