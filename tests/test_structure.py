"""The library stands alone: what it imports, how long its files are, and which of its names are public."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "manyclass"
APPLICATION = ("__main__", "bench", "cli", "experiments", "report", "train")
ALLOWED = {"torch", "numpy"} | sys.stdlib_module_names
#: What only the application needs: the extras of pyproject.toml.
EXTRAS = ("faiss", "matplotlib", "polars", "rich", "safetensors", "tensorboard", "typer")
PUBLIC = ("functional", "kernels", "losses", "optim", "samplers", "distributed", "train")
MOST_LINES = 250


def library(package: Path = PACKAGE) -> list[Path]:
    return [file for file in sorted(package.rglob("*.py")) if part(file, package) not in APPLICATION]


def part(file: Path, package: Path) -> str:
    """The module or sub-package right below ``package`` that a file belongs to."""
    return file.relative_to(package).parts[0].removesuffix(".py")


def imports(file: Path, package: Path = PACKAGE) -> Iterator[str]:
    """Full names of all that a file imports, wherever in the file; ``a.b`` for ``from a import b``."""
    here = [package.name, *file.relative_to(package).with_suffix("").parts]
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def foreign(file: Path, package: Path = PACKAGE) -> list[str]:
    """What a library module must not import."""
    names = [name.split(".") for name in imports(file, package)]
    return [
        ".".join(name)
        for name in names
        if (name[1:2] and name[1] in APPLICATION if name[0] == package.name else name[0] not in ALLOWED)
    ]


def too_long(file: Path) -> bool:
    return len(file.read_text("utf-8").splitlines()) > MOST_LINES


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_is_where_it_is_expected():
    expected = {"__init__", "functional", "head", "losses", "samplers", "distributed"}
    assert expected <= {part(file, PACKAGE) for file in library()}
    assert all((PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists() for name in APPLICATION)


@pytest.mark.parametrize("file", library(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_library_imports_torch_and_numpy_only(file):
    assert foreign(file) == []


@pytest.mark.parametrize(
    ("line", "caught"),
    [
        ("import polars", ["polars"]),
        ("import rich.table as t", ["rich.table"]),
        ("def f():\n    from typer import Option", ["typer.Option"]),
        ("from ..train import load", ["manyclass.train.load"]),
        ("from .. import cli, checks", ["manyclass.cli"]),
        ("from ..bench.step import run", ["manyclass.bench.step.run"]),
        ("import manyclass.report", ["manyclass.report"]),
        ("from manyclass import experiments", ["manyclass.experiments"]),
        ("from __future__ import annotations\nimport math, torch.nn, numpy as np\nimport manyclass", []),
        ("from . import base\nfrom .base import train\nfrom ..ops import report", []),
    ],
)
def test_a_forbidden_import_is_caught(line, caught, tmp_path):
    file = tmp_path / "manyclass" / "samplers" / "new.py"
    file.parent.mkdir(parents=True)
    file.write_text(line)
    assert foreign(file, tmp_path / "manyclass") == caught
    assert library(tmp_path / "manyclass") == [file]


def test_library_files_are_short():
    assert not [str(file.relative_to(PACKAGE)) for file in library() if too_long(file)]


def test_import_needs_no_extras():
    block = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))\n"
    found = run(block + "import manyclass, manyclass.distributed\nprint('\\n'.join(sys.modules))").split()
    loaded = {name.split(".")[1] for name in found if name.startswith("manyclass.")}
    assert {"head", "samplers", "distributed"} <= loaded
    assert not loaded & set(APPLICATION)


def test_the_compiler_is_not_loaded():
    """It takes as long as torch itself. (torch's optimisers load it.)"""
    program = """
import sys, torch, manyclass, manyclass.distributed
head = manyclass.SampledSoftmax(4, 50, bias=True)
head(torch.zeros(2, 4, requires_grad=True), torch.tensor([0, 1])).backward()
head.eval()(torch.zeros(2, 4), torch.tensor([0, 1]))
head.topk(torch.zeros(4), 2)
print("torch._dynamo" in sys.modules)
"""
    assert run(program).split() == ["False"]


def test_runs_load_without_the_command_line():
    found = run("import manyclass.train, sys\nprint('\\n'.join(sys.modules))").split()
    assert "manyclass.train.training" in found
    assert not {"typer", "rich", "matplotlib", "manyclass.cli"} & set(found)


def test_the_command_line_names_a_missing_extra():
    program = "import sys; sys.modules['typer'] = None\nfrom manyclass.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "manyclass: the command line needs typer: pip install 'manyclass[cli]'\n"


@pytest.mark.parametrize("name", ["manyclass", *(f"manyclass.{name}" for name in PUBLIC)])
def test_public_names_exist_and_are_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert (getattr(module, public).__doc__ or "").strip(), f"{name}.{public} has no docstring"


def documented(pages: str) -> list[str]:
    """Full names of all that the API reference shows."""
    return re.findall(r"^::: ([\w.]+)$", pages, re.M)


def test_the_reference_shows_every_public_name_once():
    pages = "".join(file.read_text("utf-8") for file in (ROOT / "docs" / "reference").glob("*.md"))
    modules = ["manyclass", *(f"manyclass.{name}" for name in PUBLIC)]
    names = [f"{module}.{name}" for module in modules for name in importlib.import_module(module).__all__]
    assert sorted(documented(pages)) == sorted(set(names) - set(modules))


def used_names(page: str) -> Iterator[tuple[str, str]]:
    """Pairs of a module and a name that a page imports from it or looks up in it."""
    for module, names in re.findall(r"^\s*from (manyclass[\w.]*) import ([\w, ]+)$", page, re.M):
        yield from ((module, name.strip().split(" ")[0]) for name in names.split(","))
    for path in re.findall(r"(?<![\w./-])(manyclass(?:\.[A-Za-z_]\w*)+)", page):
        steps = path.split(".")
        while len(steps) > 2 and ".".join(steps[1:-1]) not in PUBLIC:
            steps.pop()  # attributes of a name
        yield ".".join(steps[:-1]), steps[-1]
    for module, name in re.findall(r"(?<![\w./])(functional|kernels|losses|samplers)\.(?!md\b)([A-Za-z_]\w*)", page):
        yield f"manyclass.{module}", name


def private(page: str) -> set[str]:
    """Names on a page that are not public."""
    modules = {"manyclass", *(f"manyclass.{name}" for name in PUBLIC)}
    return {
        f"{module}.{name}"
        for module, name in used_names(page)
        if f"{module}.{name}" not in modules
        and (module not in modules or name not in importlib.import_module(module).__all__)
    }


@pytest.mark.parametrize(
    "file", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda file: file.name
)
def test_pages_use_public_names(file):
    assert private(file.read_text("utf-8")) == set()


@pytest.mark.parametrize(
    ("page", "caught"),
    [
        ("from manyclass import SampledSoftmax, kernels, samplers", set()),
        ("    from manyclass.train import Run, load", set()),
        ("`manyclass.samplers.Blocks.draw` and `samplers.KernelTree(kernel)`", set()),
        ("`manyclass train lm` reads docs/train.md and train.py", set()),
        ("from manyclass.train.run import Run", {"manyclass.train.run.Run", "manyclass.train.run"}),
        ("`manyclass.checks.one_of`", {"manyclass.checks"}),
        ("`samplers.partition`", {"manyclass.samplers.partition"}),
    ],
)
def test_a_private_name_on_a_page_is_caught(page, caught):
    assert private(page) == caught
