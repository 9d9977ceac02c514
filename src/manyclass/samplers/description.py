"""How a sampler class describes itself, for the table of samplers, the command line's help and errors."""

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .draw import Part

if TYPE_CHECKING:
    from .base import Sampler

SCOPES = ("example", "batch")
#: Arguments that a layer passes to every constructor that takes them. All others are the sampler's options.
PASSED = ("num_classes", "in_features", "prediction", "bias")
#: The default of a required option.
REQUIRED = inspect.Parameter.empty


class Described:
    """How a sampler class describes itself; `options` reads its options from the constructor."""

    #: Probability of a class, one line for the table of samplers.
    q: ClassVar[str] = ""
    #: Cost of a draw, for the table.
    cost: ClassVar[str] = ""
    #: When to use it, for the table.
    use: ClassVar[str] = ""
    #: ``"example"`` if every example has its own negatives, ``"batch"`` if the batch shares a pool.
    scope = "example"
    #: Whether `draw` and `log_prob` need ``context``.
    needs_context = False

    @classmethod
    def restrict(cls, options: dict[str, Any], part: Part) -> tuple[type["Sampler"], dict[str, Any]]:
        """Return the class and the options of a sampler for a range of the classes, as each rank of a shard needs it.

        ``options`` are those for all classes. The constructor also gets the ``num_classes`` of the range if it has
        this argument. The default keeps the options, which is right unless they have one entry per class.
        """
        return cls, options  # pyright: ignore[reportReturnType]

    @classmethod
    def make(cls, **arguments: Any) -> "Sampler":
        """Construct the sampler. A subclass may choose another class by the size of the problem."""
        return cls(**arguments)  # pyright: ignore[reportReturnType]


def options(kind: type[Described]) -> dict[str, Any]:
    """Return the options of a sampler class and their defaults, `REQUIRED` for those without."""
    return {name: parameter.default for name, parameter in _parameters(kind)[0].items() if name not in PASSED}


def check_options(label: str, kind: type[Described], given: Iterable[str]) -> None:
    """Raise unless ``given`` are options of a sampler class and none that it requires is missing."""
    allowed = options(kind)
    for name in () if _parameters(kind)[1] else sorted(set(given) - allowed.keys()):
        hint = f"its options are {', '.join(allowed)}" if allowed else "it has no options"
        raise TypeError(f"sampler={label} has no option {name!r}: {hint}")
    for name, default in allowed.items():
        if default is REQUIRED and name not in given:
            raise ValueError(f"sampler={label} needs {name}=…, see the docstring of {kind.__name__}")


def passed(kind: type[Described], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``values``, by the names in `PASSED`, that the constructor of a sampler class takes."""
    return {name: value for name, value in values.items() if name in _parameters(kind)[0]}


def _parameters(kind: type) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the named arguments of a constructor, and whether ``**`` forwards others to the base class."""
    named: dict[str, inspect.Parameter] = {}
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    for number, constructor in enumerate(constructors):
        _, *parameters = inspect.signature(constructor).parameters.values()
        kinds = {parameter.name: parameter.kind for parameter in parameters}
        variadic = [name for name, how in kinds.items() if how in (how.VAR_POSITIONAL, how.VAR_KEYWORD)]
        named = {**{each.name: each for each in parameters if each.name not in variadic}, **named}
        if inspect.Parameter.VAR_KEYWORD not in kinds.values():
            return named, number > 0
    return named, True


def table(kinds: Mapping[str, type[Described]]) -> str:
    """Describe samplers by name in a Markdown table."""
    header = ("sampler", "q(class)", "scope", "options", "cost of a draw", "use")
    rows = [header, ("---",) * len(header)]
    for name, kind in kinds.items():
        scope = " or ".join(f'`"{scope}"`' for scope in scopes(kind))
        rows.append((f'`"{name}"`', kind.q, scope, _options(kind), kind.cost, kind.use))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def scopes(kind: type[Described]) -> tuple[str, ...]:
    """Return the scopes that a sampler class can have."""
    return SCOPES if "scope" in options(kind) else (kind.scope,)


def _options(kind: type[Described]) -> str:
    named = [f"`{name}=`{' (required)' if default is REQUIRED else ''}" for name, default in options(kind).items()]
    return ", ".join([*named, *(["`context=` in every call (required)"] if kind.needs_context else [])]) or "none"
