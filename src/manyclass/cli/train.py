"""`manyclass train`: one command for each task, with its settings as options."""

import dataclasses
import inspect
import math
from typing import Annotated, Any, Literal

import typer

from ..train.settings import PANELS, PRESETS, ClassifySettings, LanguageSettings, NextItemSettings, Settings, shown
from .options import protocol, warn_of_device

app = typer.Typer(help="Train a model from your files. The run's folder holds all results.", no_args_is_help=True)


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.1f}" if loss < 50 else "beyond all bounds"


def _place(field: "dataclasses.Field[Any]") -> int:
    """Return the position of a setting in ``--help``."""
    heading = shown(field).panel
    return PANELS.index(heading) if heading else -1


def _annotation(field: "dataclasses.Field[Any]") -> Any:
    """Return the type of a setting, and its option or argument."""
    how = shown(field)
    if how.panel is None:
        option = typer.Argument(help=how.help, **how.more)
    else:
        option = typer.Option(*how.names, help=how.help, rich_help_panel=how.panel, **how.more)
    return Annotated[field.type.__origin__, option]  # pyright: ignore


def _preset(task: str) -> inspect.Parameter:
    """Return the option that selects other defaults."""
    what = "Other defaults. `ptb-medium`: Zaremba's medium LSTM for Penn Tree Bank, 7 to 10 hours on one core."
    option = typer.Option(help=what, rich_help_panel=PANELS[0])
    kind = Literal[tuple(PRESETS[task])] | None  # pyright: ignore
    return inspect.Parameter("preset", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option], default=None)


def _with_preset(task: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a preset's values for those that were not given."""
    preset, context = options.pop("preset", None), options.pop("context", None)
    if preset is None:
        return options
    given = {name for name in options if context.get_parameter_source(name).name != "DEFAULT"}
    return options | {name: value for name, value in PRESETS[task][preset].items() if name not in given}


def _train_command(name: str, kind: type[Settings]) -> None:
    """Make ``manyclass train NAME``: every field of its settings is an option."""

    def command(**options: Any) -> None:
        from ..train import processes
        from ..train.run import best
        from . import console as show

        settings = kind(**_with_preset(name, options))
        settings.resume = settings.resume or processes.restarted()
        joined = processes.join(settings.timeout)
        console = show.start(settings.threads, joined)
        warn_of_device(settings.device)
        task = show.prepare(name, settings, console, joined)
        counts = [f"{task.train_examples:,} training", f"{task.heldout_examples:,} held-out"]
        counts += [f"{task.test_examples:,} test"] if task.test_examples else []
        console.print(
            f"{task.num_classes:,} classes; {', '.join(counts[:-1])} and {counts[-1]} examples; "
            f"{task.steps_per_epoch:,} steps per epoch",
            soft_wrap=True,
        )
        with show.progress_bars(console) as progress:
            rows, stopped = show.train(task, progress, settings.sampler)
        last = rows[-1]
        perplexity = f", perplexity {_perplexity(last.heldout_loss)}" if name == "lm" else ""
        console.print(
            f"evaluated at step {last.step}: held-out loss {last.heldout_loss:.4f} nats{perplexity}", soft_wrap=True
        )
        measure, row = task.selects, best(rows, task.selects)
        if measure is not None and row is not None:
            ranked = "" if measure == "loss" or name != "next-item" else f"; {protocol(False)}"
            kept = f"kept: step {row.step}, best by held-out {measure}: {row.measure(measure):.4f}{ranked}"
            console.print(kept, soft_wrap=True)
        if stopped:
            console.print("stopped; give the same command with --resume to continue")
            raise typer.Exit(130)
        console.print(f"next: manyclass evaluate {settings.out}  or  manyclass predict {settings.out}", soft_wrap=True)

    fields = sorted(dataclasses.fields(kind), key=_place)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=_annotation(field),
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
        )
        for field in fields
    ]
    if name in PRESETS:
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        parameters += [_preset(name), context]
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = kind.__doc__
    app.command(name)(command)


_train_command("lm", LanguageSettings)
_train_command("next-item", NextItemSettings)
_train_command("classify", ClassifySettings)
