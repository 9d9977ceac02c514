"""A small version of `make fuzz`, with a fixed seed and without sanitizers; and proof that it would find something."""

import random

import fuzz
import fuzz_api
import fuzz_native
import fuzz_rules
import pytest
import torch

from manyclass import SampledSoftmax, checks, functional, ops, samplers


@pytest.mark.parametrize(("part", "calls"), [("native", 300), ("api", 150)])
def test_random_calls(part, calls):
    if part == "native" and not ops.native_available():
        pytest.skip("the native core was not built")
    assert list(fuzz.watch(part, 0, range(calls))) == []


def test_every_sampler_is_called_at_random():
    called = fuzz_api.sampler_arguments(random.Random(0), 5, 3)
    assert {samplers.named(name) for name in samplers.names()} <= called.keys()


def test_errors_crashes_and_calls_that_never_return_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "SILENCE", 5)
    script = tmp_path / "child.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "first = int(sys.argv[sys.argv.index('--first') + 1])\n"
        "for number in range(first, first + int(sys.argv[sys.argv.index('--calls') + 1])):\n"
        "    print(number, flush=True)\n"
        "    if number == 1: print('failed', flush=True)\n"
        "    if number == 3: os.abort()\n"
        "    if number == 5: signal.setitimer(signal.ITIMER_PROF, 0.2)\n"
        "    while number == 5: pass\n"
        "    if number == 7: time.sleep(60)\n"
    )
    failures = dict(fuzz.watch("native", 0, range(9), str(script)))
    assert list(failures) == [1, 3, 5, 7]
    assert "raised" in failures[1]
    assert "ended the process with code -6" in failures[3]
    assert "did not return" in failures[5]
    assert "did not return" in failures[7]


def failing(part, calls):
    """Numbers of the calls that raise, without a child process."""
    numbers = []
    for number in range(calls):
        torch.manual_seed(number)
        try:
            part.one_call(random.Random(f"{number}"))
        except AssertionError:
            numbers.append(number)
    return numbers


@pytest.mark.parametrize("name", fuzz_native.MAKERS)
def test_a_wrong_native_result_is_found(name):
    found = 0
    for seed in range(20):
        torch.manual_seed(seed)
        arguments, truth = fuzz_native.MAKERS[name](random.Random(seed))
        given = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
        results = getattr(torch.ops.manyclass, name)(*given.values())
        results = () if results is None else results if isinstance(results, tuple) else (results,)
        truth(results, given)
        first = next(iter(given))  # what operations in place write to
        try:
            truth(tuple(result + 1 for result in results), {**given, first: given[first] + 1})
        except (AssertionError, IndexError):
            found += 1
    assert found > 5


def test_arguments_that_are_taken_although_they_are_wrong_are_found(monkeypatch):
    monkeypatch.setattr(fuzz_native, "right", lambda name, arguments: False)
    assert failing(fuzz_native, 30)


def test_a_wrong_loss_is_found(monkeypatch):
    monkeypatch.setattr(functional, "full_softmax_loss", lambda query, *rest, **options: query.sum(-1) * 0 + 3.0)
    assert failing(fuzz_api, 60)


def test_a_wrong_count_is_found(monkeypatch):
    original = samplers.Uniform._log_prob
    monkeypatch.setattr(samplers.Uniform, "_log_prob", lambda *arguments: original(*arguments) + 0.1)
    assert failing(fuzz_api, 200)


def test_an_error_without_a_name_is_found(monkeypatch):
    def vague(*arguments, **options):
        raise ValueError("something is wrong")

    monkeypatch.setattr(checks, "positive_int", vague)
    with pytest.raises(ValueError, match="something is wrong"):
        SampledSoftmax(3, 4)
    call = fuzz_api.Caller(random.Random(0))
    call.spoils, call.spoiled = True, "num_classes"
    with pytest.raises(AssertionError, match="the error names no argument"):
        call(SampledSoftmax, in_features=3, num_classes=4)


def test_rules_know_wrong_from_right():
    assert set(fuzz_rules.RULES) == set(fuzz_native.MAKERS)
    for name, make in fuzz_native.MAKERS.items():
        for seed in range(5):
            torch.manual_seed(seed)
            arguments, _ = make(random.Random(seed))
            assert fuzz_rules.right(name, arguments) is True
            tensor = next(iter(fuzz_rules.DTYPES[name]))
            assert fuzz_rules.right(name, {**arguments, tensor: arguments[tensor].unsqueeze(0)}) is False
