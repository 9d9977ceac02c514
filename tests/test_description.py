"""Samplers describe themselves: names, options, scopes and data in errors, help and docs come from the classes."""

import dataclasses
import inspect
import re

import pytest
import readme
import torch

from manyclass import SampledSoftmax, distributed, samplers
from manyclass.budget import NUM_SAMPLES
from manyclass.train.settings import LanguageSettings, shown

MEANING = "umber of sampled negatives that every example is compared with"


class Weighted(samplers.Unigram):
    """A user's sampler: forwards what it does not know."""

    def __init__(self, *arguments, boost=1.0, **more):
        super().__init__(*arguments, **more)
        self.boost = boost


class Anything(samplers.Uniform):
    """A user's sampler that takes any option."""

    def __init__(self, num_classes, **given):
        super().__init__(num_classes)
        self.given = given


class OneMore(samplers.Uniform):
    """A user's sampler for another number of classes."""

    def __init__(self, num_classes):
        super().__init__(num_classes + 1)


class Sizeless(samplers.Sampler):
    """A user's sampler that forgets its number of classes."""


def test_the_page_has_the_table():
    text = readme.PAGE.read_text("utf-8")
    assert readme.with_table(text) == text, f"run `make readme`; the table is:\n{samplers.table()}"


@pytest.mark.parametrize(
    "page", [readme.README, readme.MEASURED, readme.OVERVIEW, readme.REPRODUCTION], ids=lambda page: page.name
)
def test_tables_of_results_are_those_of_the_files(page):
    assert readme.generated()[page] == page.read_text("utf-8"), "run `make readme`"


def test_a_table_that_differs_is_rewritten():
    text = readme.PAGE.read_text("utf-8")
    for stale in (text.replace("`own=`", "`wide=`"), text.replace('| `"uniform"` |', '| `"even"` |')):
        assert stale != text
        assert readme.with_table(stale) == text
    with pytest.raises(AssertionError, match="not 0 times"):
        readme.with_table(text.replace("<!-- end of samplers -->", ""))


@pytest.mark.parametrize("name", samplers.names())
def test_every_named_sampler_is_described(name):
    kind = samplers.named(name)
    assert all((kind.q, kind.cost, kind.use)), kind
    (row,) = [line for line in samplers.table().splitlines() if line.startswith(f'| `"{name}"` |')]
    assert row.count("|") == 7
    for option, default in samplers.options(name).items():
        assert f"`{option}={'` (required)' if default is inspect.Parameter.empty else '`'}" in row
    assert (f'`"{kind.scope}"`') in row


def test_the_scope_of_a_sampler_made_by_name_is_the_one_it_says():
    data = {"counts": torch.ones(9), "pairs": torch.zeros(1, 2, dtype=torch.long)}
    for name in samplers.names():
        options = {option: data[option] for option in samplers.options(name) if option in data}
        made = samplers.create(name, 9, 4, **options)
        assert made.scope == samplers.named(name).scope
        assert made.needs_context == samplers.named(name).needs_context
        if "scope" in samplers.options(name):
            assert samplers.create(name, 9, 4, scope="batch", **options).scope == "batch"


def test_options_follow_the_constructors():
    assert samplers.options("blocks") == {"own": 32, "probe": 96, "block_size": 8}
    assert samplers.options("softmax") == {}
    assert samplers.options("unigram")["counts"] is inspect.Parameter.empty
    assert samplers.options(Weighted).keys() == {"counts", "power", "scope", "boost"}


def test_a_class_that_forwards_its_arguments():
    made = samplers.create(Weighted, 9, 4, counts=torch.ones(9), boost=2.0, power=0.5)
    assert (made.boost, made.power, made.num_classes) == (2.0, 0.5, 9)
    assert samplers.create(Anything, 9, 4, colour="red").given == {"colour": "red"}
    with pytest.raises(ValueError, match="sampler=Weighted needs counts="):
        samplers.create(Weighted, 9, 4)
    with pytest.raises(TypeError, match="colour"):
        samplers.create(Weighted, 9, 4, counts=torch.ones(9), colour="red")


@pytest.mark.parametrize(
    ("sampler", "options", "error", "message"),
    [
        (OneMore, {}, ValueError, "sampler OneMore must have num_classes = 9, as the layer has, got 10"),
        (OneMore(9), {}, ValueError, "sampler OneMore must have num_classes = 9, as the layer has, got 10"),
        (Sizeless, {}, ValueError, "sampler Sizeless must have num_classes = 9, as the layer has, got None"),
        (OneMore, {"own": 3}, TypeError, "sampler=OneMore has no option 'own': it has no options"),
        ("unigram", {"counts": torch.ones(8)}, ValueError, r"counts must have shape \(9,\), got \(8,\)"),
        ("unigram", {}, ValueError, "sampler='unigram' needs counts=…, see the docstring of Unigram"),
        ("blocks", {"alpha": 1.0}, TypeError, "has no option 'alpha': its options are own, probe, block_size"),
    ],
)
def test_errors_name_what_is_wrong(sampler, options, error, message):
    with pytest.raises(error, match=message):
        SampledSoftmax(4, 9, sampler, **options)


def test_a_name_is_one_of_all():
    with pytest.raises(ValueError, match=", ".join(map(repr, samplers.names()))):
        SampledSoftmax(4, 9, "zipf")


# --- documentation ----------------------------------------------------------------------------------------------------


def help_of(name: str) -> str:
    (field,) = [field for field in dataclasses.fields(LanguageSettings) if field.name == name]
    return shown(field).help or ""


@pytest.mark.parametrize(
    "text",
    [
        samplers.Sampler.draw.__doc__,
        SampledSoftmax.__doc__,
        distributed.ShardedSampledSoftmax.__doc__,
        readme.PAGE.read_text("utf-8"),
        help_of("num_samples"),
    ],
    ids=["draw", "layer", "sharded", "page", "help"],
)
def test_num_samples_has_one_meaning(text):
    assert MEANING in " ".join(text.split())


def test_the_default_numbers_are_those_in_the_docs():
    documented = re.search(r"The default is (\d+) if .* It is (\d+) if", " ".join(SampledSoftmax.__doc__.split()))
    assert documented
    assert tuple(map(int, documented.groups())) == (NUM_SAMPLES["example"], NUM_SAMPLES["batch"])
    for scope in NUM_SAMPLES:
        assert SampledSoftmax(4, 9, "uniform", scope=scope).num_samples == NUM_SAMPLES[scope]


@pytest.mark.parametrize("text", [SampledSoftmax.__doc__, samplers.create.__doc__], ids=["layer", "create"])
def test_docstrings_repeat_no_list_of_samplers(text):
    """Some may be examples; most of them are a list that goes stale."""
    assert sum(f'"{name}"' in text for name in samplers.names()) <= len(samplers.names()) / 2


def test_help_names_samplers_and_their_options():
    assert all(f"`{name}`: {samplers.named(name).q}" in help_of("sampler") for name in samplers.names())
    assert help_of("own").startswith("For `blocks`: ")
    assert help_of("own").endswith("default: 32.")
    assert help_of("scope").startswith("For `uniform`, `log_uniform`, `unigram`: ")


#: Negatives that an option of a sampler adds to num_samples.
ON_TOP = ("own", "head", "uniform")


@pytest.mark.parametrize("number", [7, 20])
@pytest.mark.parametrize("name", [*samplers.names(), "uniform pool"])
def test_num_samples_negatives_are_drawn(name, number):
    """For every sampler, besides those that an option of its own asks for; and diagnostics count all of them."""
    options = {"scope": "batch"} if name == "uniform pool" else {}
    kind, classes = name.split()[0], 200
    given = {"counts": torch.ones(classes), "pairs": torch.arange(classes).repeat(2, 1).T}
    small = {"own": 3, "head": 5, "uniform": 6 if kind == "in_batch" else 0.2, "memory": 64, "features": 16}
    options |= {option: value for option, value in (given | small).items() if option in samplers.options(kind)}
    head = SampledSoftmax(4, classes, kind, number, **options)
    query, target = torch.randn(30, 4), torch.arange(30)
    head(query, target, context=target)
    draw = head.sampler.draw(query, number, exclude=target, context=target)
    on_top = sum(value for option, value in options.items() if option in ON_TOP and isinstance(value, int))
    assert draw.ids.shape[1] + len(draw.pool) == number + on_top
    assert (len(draw.pool) > 0) == (head.sampler.scope == "batch")
    assert (head.diagnostics().own, head.diagnostics().pool) == (draw.ids.shape[1], len(draw.pool))


@pytest.mark.parametrize(
    ("sampler", "options", "numbers"),
    [
        ("uniform", {"scope": "batch"}, (0, 50)),  # with replacement: more slots than classes
        ("blocks", {"own": 3}, (3, 9)),  # each class once at most
    ],
)
def test_more_negatives_than_classes(sampler, options, numbers):
    head = SampledSoftmax(4, 9, sampler, 50, **options)
    query, target = torch.randn(6, 4), torch.arange(6)
    head(query, target)
    draw = head.sampler.draw(query, 50, exclude=target)
    assert (draw.ids.shape[1], len(draw.pool)) == numbers
    assert (head.diagnostics().own, head.diagnostics().pool) == numbers
