"""The pages that walk from a file to a trained model: every command runs, and prints what the page says."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("language-models", "recommenders", "classification")
#: Pages of Python code only.
CODE = (
    "two-tower",
    "label-names",
    "identities",
    "explanation/theorem",
    "how-to/checkpoints",
    "how-to/faiss",
    "how-to/own-sampler",
)
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.S | re.M)
#: A command, which may go on after a backslash, and what it prints.
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.M)
PREDICTION = re.compile(r"^ +\d\.\d{4}  .+$", re.M)
LINES = re.compile("[\u2500-\u257f]+")  # of tables and progress bars
NUMBER = re.compile(r"(?<![\w-])-?\d+(?:[.,:]\d+)*(?:e[-+]\d+)?|\d+|-:--:--")
#: What makes programs print colours that a page cannot show.
COLOURS = ("FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS")


def steps(page: str) -> Iterator[tuple[list[str], str | None]]:
    """What a reader runs, from top to bottom, and what the page says it prints; None if it does not say."""
    for kind, block in BLOCK.findall(page):
        if kind == "console":
            assert "".join(f"$ {command}\n{shown}" for command, shown in COMMAND.findall(block)) == block
            yield from ((["bash", "-c", command], shown) for command, shown in COMMAND.findall(block))
        elif block.startswith(("import ", "from ")):
            yield [sys.executable, "-c", block], None


def shape(text: str, folder: Path) -> str:
    """What must not change: the text without numbers, predicted names, drawn lines, white space and the folder."""
    text = LINES.sub(" ", PREDICTION.sub("PREDICTION", text.replace(f"{folder}/", "")))
    text = NUMBER.sub("#", text)
    return re.sub(r"#( #)+", "#", " ".join(text.split()))


def follow(page: str, folder: Path) -> None:
    """Do what a page says, in a folder; complain where it is not as the page says."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {name: value for name, value in os.environ.items() if name not in COLOURS}
    environment |= {"PATH": paths, "COLUMNS": "100", "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    for command, shown in steps(page):
        run = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        assert run.returncode == 0, f"{command[-1]}\nexits with {run.returncode}:\n{run.stdout}"
        if shown is not None:
            assert shape(run.stdout, folder) == shape(shown, folder), f"{command[-1]}\nprints:\n{run.stdout}"


def broken(page: str, folder: Path) -> list[str]:
    """Relative links that lead to no file. `make docs` checks those within ``docs/``, and anchors."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page)
    return [link for link in links if "://" not in link and not (folder / link).exists()]


@pytest.mark.parametrize("file", sorted(DOCS.parent.glob("*.md")), ids=lambda file: file.name)
def test_links_lead_somewhere(file):
    assert broken(file.read_text("utf-8"), DOCS.parent) == []


def test_a_broken_link_is_noticed():
    assert broken("[a](docs/blocks.md#idea) [b](https://x.org) ![c](docs/no.png)", DOCS.parent) == ["docs/no.png"]


@pytest.mark.parametrize("name", CODE)
def test_page_of_code(name, tmp_path, monkeypatch):
    page = (DOCS / f"{name}.md").read_text("utf-8")
    programs = BLOCK.findall(page)
    assert len(programs) == page.count("```python") > 0
    monkeypatch.chdir(tmp_path)
    for kind, program in programs:  # in this process: an import of torch takes longer than most of them
        assert kind == "python"
        exec(compile(program, f"{name}.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", PAGES)
def test_page(name, tmp_path):
    page = (DOCS / f"{name}.md").read_text("utf-8")
    assert len(list(steps(page))) >= 8
    follow(page, tmp_path)


@pytest.mark.parametrize(
    "page",
    [
        "```console\n$ echo 12 classes\n7 classes\n```\n",
        "```console\n$ echo 1,234.5 0:00:01 1e-05; \\\n  echo ━━╸ -0.25\n7\n$ true\n```\n",
        "```console\n$ echo '    0.1234  the'\n    0.9999  of\n```\n",
        "```console\n$ pwd; echo $PWD/run; false; echo exit code $?\n$PWD\nrun\nexit code 1\n```\n",
        "```console\n$ echo > made\n```\n\n```python\nfrom pathlib import Path\n\nPath('made').unlink()\n```\n",
        "```python\nnot a program\n```\n",
    ],
)
def test_what_may_differ(page, tmp_path):
    follow(page.replace("$PWD\n", f"{tmp_path}\n"), tmp_path)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```console\n$ echo 12 classes\n12 items\n```\n", "prints"),
        ("```console\n$ echo 12 classes\n```\n", "prints"),
        ("```console\n$ true\nsomething\n```\n", "prints"),
        ("```console\n$ echo '    0.1234  the'\n    0.1234  the\n    0.1000  of\n```\n", "prints"),
        ("```console\n$ echo to stderr >&2\n```\n", "prints"),
        ("```console\n$ echo said; false\nsaid\n```\n", "exits with 1"),
        ("```console\n$ true\n```\n\n```python\nimport nothing_of_this_name\n```\n", "No module named"),
        ("```console\na line before the first command\n$ true\n```\n", "a line before"),
    ],
)
def test_a_stale_page_is_noticed(page, message, tmp_path):
    with pytest.raises(AssertionError, match=message):
        follow(page, tmp_path)
