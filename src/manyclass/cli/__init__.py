"""The command line. Each command imports what it needs when it runs."""

from typing import Annotated

import typer

from . import bench, compare, reproduce, runs, train, trial

app = typer.Typer(
    invoke_without_command=True,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False,
) -> None:
    """Train a softmax over thousands to millions of classes by adaptive, kernel based sampling."""
    if version:
        from importlib.metadata import version as installed

        print(f"manyclass {installed('manyclass')}")
        raise typer.Exit


for _command in (
    runs.evaluate,
    runs.predict,
    runs.similar,
    runs.export,
    runs.report,
    compare.compare,
    trial.synth,
    trial.demo,
):
    app.command()(_command)
app.add_typer(train.app, name="train")
app.add_typer(bench.app, name="bench")
app.add_typer(reproduce.app, name="reproduce")
