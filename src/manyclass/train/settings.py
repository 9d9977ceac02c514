"""Settings of a training run: the options of the command line, and the contents of ``config.json``."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from .. import checks, losses, samplers
from ..budget import NUM_SAMPLES
from .data.files import check_encoding
from .records import first_line, quoted, typed

PANELS = DATA, MODEL, LAYER, TRAINING, RUN = ("Data", "Model", "Output layer", "Training", "Run")
#: Settings that do not change what is learned, so a resumed run may have other values.
FREE = ("out", "resume", "threads", "device", "timeout", "checkpoint_every", "tensorboard")
#: Settings of the length of a run, which a resumed run may extend.
LENGTH = ("steps", "epochs", "patience")
#: The name for no sampler: the exact loss over all classes.
FULL = "full"
#: The loss that is not one of `losses`: the softmax, sampled or full.
SOFTMAX = "softmax"
#: Settings that are options of samplers; None leaves the sampler's default.
SAMPLER_OPTIONS = ("own", "probe", "scope", "power")
DEVICE = "Device to compute on, such as cuda:0. Tested on a simulated device only, not on a GPU."


class Shown(NamedTuple):
    """How the command line shows a setting."""

    #: Heading in ``--help``; None for positional arguments.
    panel: str | None
    help: str | None
    #: Names of the option; the field's name by default.
    names: tuple[str, ...]
    #: Further arguments of `typer.Option` or `typer.Argument`, such as ``min``.
    more: dict[str, Any]


def _option(panel: str, help: str, *names: str, **more: Any) -> Shown:
    return Shown(panel, help, names, more)


def shown(field: "dataclasses.Field[Any]") -> Shown:
    """Return how the command line shows a field of some settings."""
    return field.type.__metadata__[0]  # pyright: ignore


def takers(option: str) -> list[str]:
    """Return the names of the samplers that have an option."""
    return [name for name in samplers.names() if option in samplers.options(name)]


def _sampler_option(name: str, help: str, **more: Any) -> Shown:
    """Show an option of some samplers: which ones, and its default."""
    names = takers(name)
    default = samplers.options(names[0])[name]
    return _option(LAYER, f"For {', '.join(f'`{each}`' for each in names)}: {help}; default: {default}.", **more)


if TYPE_CHECKING:
    SamplerName = LossName = str
else:
    SamplerName, LossName = Literal[(FULL, *samplers.names())], Literal[(SOFTMAX, *losses.names())]
_DISTRIBUTIONS = "; ".join(f"`{name}`: {samplers.named(name).q}" for name in samplers.names())
Sampler = Annotated[SamplerName, _option(LAYER, f"Distribution of the negatives. `full` scores all. {_DISTRIBUTIONS}.")]
Loss = Annotated[
    LossName,
    _option(LAYER, "The loss of training. Those other than `softmax` are baselines of related work to compare with."),
]
NumSamples = Annotated[
    int | None,
    _option(
        LAYER,
        "Number of sampled negatives that every example is compared with. Default: "
        f"{NUM_SAMPLES['example']} if they are drawn per example, {NUM_SAMPLES['batch']} if the sampler's scope is "
        "`batch`, so that the batch shares them. `blocks` adds --own.",
        min=1,
    ),
]
Own = Annotated[int | None, _sampler_option("own", "negatives of each example alone, beside the pool", min=1)]
Probe = Annotated[int | None, _sampler_option("probe", "blocks that each example visits in training", min=1)]
Scope = Annotated[
    Literal["example", "batch"] | None,
    _sampler_option("scope", "negatives for each `example`, or one pool that the `batch` shares"),
]
Power = Annotated[float | None, _sampler_option("power", "exponent of the class counts, which come from the data")]
Tolerance = Annotated[
    float | None, _option(LAYER, "Instead of --num-samples: the largest measured bias, in nats, such as 0.02.")
]
Prediction = Annotated[
    Literal["softmax", "absolute"],
    _option(LAYER, "p ∝ exp(o), or p ∝ exp(|o|), which suits `quadratic` and `quartic`."),
]
Features = Annotated[int, _option(MODEL, "Size of embeddings and hidden layers.", min=1, max=100_000)]
Dropout = Annotated[float, _option(MODEL, "Share of hidden values to drop in training.", min=0.0, max=0.95)]
Layers = Annotated[int, _option(MODEL, "Layers of the LSTM or of the transformer.", min=1, max=100)]
Tied = Annotated[bool, _option(MODEL, "Use the input embeddings as output weights, too.", "--tied")]
Heldout = Annotated[
    Path | None, _option(DATA, "File to evaluate on in training; default: a part of the data is held out.")
]
Test = Annotated[Path | None, _option(DATA, "File for the final figures. It is not used in training or selection.")]
MinCount = Annotated[int, _option(DATA, "Smallest number of occurrences of a class.", min=1)]
Batch = Annotated[int, _option(TRAINING, "Streams of text, users, or documents in a step.", min=1, max=10_000_000)]
Epochs = Annotated[float, _option(TRAINING, "Passes over the data.", min=0.0)]
Optimizer = Annotated[
    Literal["adagrad", "sgd", "adam", "adamw"],
    _option(TRAINING, "Optimiser. A typical --lr is 0.05 for adagrad, and 0.003 for adam and adamw."),
]
Rate = Annotated[float, _option(TRAINING, "Learning rate.", "--lr")]


@dataclass(kw_only=True)
class Settings:
    """Options of every task."""

    sampler: Sampler = "blocks"
    num_samples: NumSamples = None
    own: Own = None
    probe: Probe = None
    tolerance: Tolerance = None
    scope: Scope = None
    power: Power = None
    prediction: Prediction = "softmax"
    offsets: Annotated[
        bool,
        _option(
            LAYER,
            "Classes have an offset that starts at the log of their frequency. For a large vocabulary, training "
            "then needs far fewer steps.",
            "--offsets",
        ),
    ] = False
    loss: Loss = SOFTMAX
    tree: Annotated[
        Path | None,
        _option(
            LAYER, "For the loss `hierarchical`: a run whose class vectors make the tree; default: a Huffman tree."
        ),
    ] = None
    optimizer: Optimizer = "adagrad"
    lr: Rate = 0.05
    schedule: Annotated[
        Literal["constant", "linear", "exponential"],
        _option(
            TRAINING,
            "Learning rate: constant; falling to 0 over the second half; or, as in the paper, falling by 0.8 for each "
            "39th of the run after six of them.",
        ),
    ] = "linear"
    clip: Annotated[float, _option(TRAINING, "Largest norm of the gradients of a step.")] = 5.0
    epochs: Epochs = 1.0
    steps: Annotated[int | None, _option(TRAINING, "Training steps, instead of --epochs.", min=1, max=999_999_999)] = (
        None
    )
    select: Annotated[
        Literal["loss", "recall@10", "recall@20", "ndcg@10", "mrr@10"] | None,
        _option(
            TRAINING,
            "Keep the checkpoint that is best by this held-out measure; default, if there are test data: loss, or "
            "ndcg@10 for next-item.",
        ),
    ] = None
    patience: Annotated[
        int | None, _option(TRAINING, "Stop after this many evaluations without a better one; needs --select.", min=1)
    ] = None
    init: Annotated[
        Path | None, _option(TRAINING, "Run to copy initial weights from. Classes are matched by name.")
    ] = None
    seed: Annotated[int, _option(TRAINING, "Seed of weights, order of the data, and draws.", min=0, max=2**40)] = 0
    evaluations: Annotated[
        int, _option(RUN, "Evaluations at even intervals, with a checkpoint each.", min=1, max=100_000)
    ] = 10
    eval_examples: Annotated[
        int, _option(RUN, "Held-out examples per evaluation. `manyclass evaluate` uses all.", min=1)
    ] = 10_000
    checkpoint_every: Annotated[int, _option(RUN, "Steps between further checkpoints.", min=1)] = 1000
    out: Annotated[Path, _option(RUN, "The run's folder.")] = Path("run")
    resume: Annotated[bool, _option(RUN, "Resume the run in --out, or start it if there is none.", "--resume")] = False
    threads: Annotated[int | None, _option(RUN, "CPU threads; default: what torch chooses.", min=1)] = None
    device: Annotated[str, _option(RUN, DEVICE)] = "cpu"
    timeout: Annotated[
        float, _option(RUN, "Under torchrun: seconds after which a process that does not answer ends the run.", min=1)
    ] = 300.0
    encoding: Annotated[str, _option(DATA, "Encoding of text files, such as latin-1.")] = "utf-8"
    tensorboard: Annotated[bool, _option(RUN, "Also write events for TensorBoard.", "--tensorboard")] = False

    def __post_init__(self) -> None:
        self.encoding = check_encoding(self.encoding)
        for name in ("lr", "clip", "epochs", "tolerance"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name} must be positive and finite, got {value}")
        if self.patience is not None and self.select is None:
            raise ValueError("--patience needs --select, the measure that must improve")
        if self.num_samples is not None and self.tolerance is not None:
            raise ValueError("give --num-samples or --tolerance, not both")
        checks.one_of("--sampler", self.sampler, (FULL, *samplers.names()))
        if self.sampler == FULL:
            for name in ("num_samples", "tolerance"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--sampler full has no negatives, so it takes no --{name.replace('_', '-')}")
        for name in self.sampler_options():
            if self.sampler not in takers(name):
                raise ValueError(f"--{name} is for {', '.join(takers(name))}, not for {self.sampler}")

        if self.tree is not None and self.loss != "hierarchical":
            raise ValueError(f"--tree is for --loss hierarchical, not for --loss {self.loss}")
        if self.loss != SOFTMAX:
            self._check_baseline()

    def _check_baseline(self) -> None:
        """Raise if there are options that the loss does not take."""
        checks.one_of("--loss", self.loss, (SOFTMAX, *losses.names()))
        refused: dict[str, Any] = {"tolerance": None, "prediction": SOFTMAX, "offsets": False}
        if not losses.draws(self.loss):
            refused |= {"sampler": Settings.sampler, "num_samples": None, **dict.fromkeys(SAMPLER_OPTIONS)}
        elif self.sampler == FULL:
            raise ValueError(f"--loss {self.loss} needs negatives, so it takes no --sampler full")
        for name, default in refused.items():
            if getattr(self, name) != default:
                raise ValueError(f"--loss {self.loss} takes no --{name.replace('_', '-')}")

    @property
    def draws(self) -> bool:
        """Whether training draws negatives."""
        return self.sampler != FULL if self.loss == SOFTMAX else losses.draws(self.loss)

    @property
    def estimates(self) -> bool:
        """Whether the training loss stands for the exact one over all classes, so that it has a bias."""
        return self.sampler != FULL if self.loss == SOFTMAX else self.loss == "sce"

    def sampler_options(self) -> dict[str, Any]:
        """Return the options of the sampler that were given."""
        return {name: value for name in SAMPLER_OPTIONS if (value := getattr(self, name)) is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON types."""
        return {
            name: [str(part) for part in value]
            if isinstance(value, list)
            else str(value)
            if isinstance(value, Path)
            else value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], file: Path) -> Any:
        """Read what `to_json` returned. Settings that are missing, since an older version wrote them, are defaults."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in values.keys() - fields.keys():
            raise ValueError(f"{file}: unknown setting {quoted(name)}; a newer version may have written it")
        found = {}
        for name, value in values.items():
            what, more = f"{file}: setting {name!r}", shown(fields[name]).more
            found[name] = typed(value, fields[name].type.__origin__, what)  # pyright: ignore
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{what} must be finite, got {value}")
            if isinstance(value, int | float) and not more.get("min", value) <= value <= more.get("max", value):
                raise ValueError(f"{what} must be in [{more.get('min', '…')}, {more.get('max', '…')}], got {value}")
        try:
            return cls(**found)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: {first_line(error)}") from None

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Return the names of settings that differ from another run's and change what is learned."""
        taken = {} if self.sampler == FULL else samplers.options(self.sampler)
        defaults = {field.name: field.default for field in dataclasses.fields(self)}

        def effective(settings: dict[str, Any], name: str) -> Any:
            value = settings.get(name, defaults[name])
            return taken.get(name) if name in SAMPLER_OPTIONS and (value is None or name not in taken) else value

        mine = self.to_json()
        return [name for name in mine if name not in FREE and effective(mine, name) != effective(other, name)]


@dataclass(kw_only=True)
class LanguageSettings(Settings):
    """Train a language model: predict each word of a text from the words before it.

    Needs only a text:  manyclass train lm --text book.txt
    """

    text: Annotated[
        list[Path] | None, _option(DATA, "Plain text, UTF-8; several files may follow; .gz, .xz, .bz2 too.")
    ] = None
    more_text: Annotated[list[Path] | None, Shown(None, None, (), {"hidden": True, "metavar": "[FILE]..."})] = None
    corpus: Annotated[
        Literal["python"] | None, _option(DATA, "Instead of --text: the sources of this Python's standard library.")
    ] = None
    split: Annotated[
        Literal["words", "blanks"],
        _option(DATA, "words and symbols; or text between blanks, with <eos> at the end of a line."),
    ] = "words"
    heldout: Heldout = None
    test: Test = None
    min_count: MinCount = 2
    output: Annotated[
        Literal["table", "characters"],
        _option(
            MODEL,
            "Where word embeddings come from, at the input and at the output: a table with a row for each word; or "
            "its character n-grams, hashed, and a small network, so that weights do not grow with the vocabulary.",
        ),
    ] = "table"
    features: Features = 128
    layers: Layers = 1
    dropout: Dropout = 0.0
    tied: Tied = False
    batch: Batch = 32
    length: Annotated[int, _option(TRAINING, "Words that gradients flow back through.", min=1, max=100_000)] = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text, self.more_text = [*(self.text or []), *(self.more_text or [])] or None, None
        if (self.text is None) == (self.corpus is None):
            raise ValueError("give a text, --text FILE, or --corpus python")
        if self.select not in (None, "loss"):
            raise ValueError(f"--select {self.select}: language models are selected by their loss")


#: Settings of `manyclass train` by a name, in place of the defaults; by the name of the task.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "lm": {
        # Zaremba et al. (2014), the medium model, trained as in TensorFlow's tutorial, which sums the loss over 35
        # words and takes lr 1 and norm 5; ours is a mean.
        "ptb-medium": {
            "split": "blanks",
            "min_count": 1,
            "features": 650,
            "layers": 2,
            "dropout": 0.5,
            "batch": 20,
            "length": 35,
            "sampler": FULL,
            "optimizer": "sgd",
            "lr": 35.0,
            "clip": 5 / 35,
            "schedule": "exponential",
            "epochs": 39.0,
            "evaluations": 39,
            "eval_examples": 100_000,
        },
    },
}


@dataclass(kw_only=True)
class NextItemSettings(Settings):
    """Train a recommender: predict the next item of a user from the items before it.

    Needs only a table with the columns user, item and timestamp (.csv, .tsv, .parquet, .jsonl; RecBole's .inter;
    MovieLens's .data and .dat), or a text with one sequence of items per line:
    manyclass train next-item --interactions clicks.csv
    """

    interactions: Annotated[
        Path, _option(DATA, "The table, or the sequences; - is the standard input.", show_default=False)
    ]
    heldout: Heldout = None
    test: Test = None
    split: Annotated[
        Literal["last-two", "last", "time"],
        _option(
            DATA,
            "Without --heldout and --test: each user's last item is for the test, and the one before is held out; or "
            "the last is held out, and there is no test; or the last tenth of the time is for the test, and the tenth "
            "before is held out.",
        ),
    ] = "last-two"
    sep: Annotated[
        str | None, _option(DATA, "What separates the fields of a table, such as `;`, `::` or `tab`; default: by name.")
    ] = None
    no_header: Annotated[
        bool, _option(DATA, "The first line of the table is a row; columns have numbers, from 1.", "--no-header")
    ] = False
    sequences: Annotated[
        bool, _option(DATA, "Each line is a sequence, even if it looks like a row of a table.", "--sequences")
    ] = False
    user: Annotated[str, _option(DATA, "Column of the user, by name or number.")] = "user"
    item: Annotated[str, _option(DATA, "Column of the item, by name or number.")] = "item"
    timestamp: Annotated[
        str, _option(DATA, "Column of the time. Without it, interactions are in the order of the file.")
    ] = "timestamp"
    user_feature: Annotated[list[str] | None, _option(DATA, "Column with a feature of the user; repeatable.")] = None
    items: Annotated[
        Path | None, _option(DATA, "A table with a row for each item, in the column --item; for --item-feature.")
    ] = None
    item_feature: Annotated[
        list[str] | None,
        _option(
            DATA,
            "Column of --items that describes an item; repeatable. A network, the item tower, then makes item "
            "embeddings of these columns instead of learning a row for each item, and items that nobody took yet can "
            "be predicted. A column is a category; `price:number` and `title:text` are not.",
        ),
    ] = None
    user_first: Annotated[bool, _option(DATA, "The first word of each line of a text is its user.", "--user-first")] = (
        False
    )
    min_count: MinCount = 1
    model: Annotated[
        Literal["transformer", "feed-forward"],
        _option(MODEL, "A causal transformer, or the paper's network on the three items before."),
    ] = "transformer"
    history: Annotated[
        int | None,
        _option(
            MODEL, "Number of past items that the model reads; default: 50, or 3 for feed-forward.", min=1, max=10_000
        ),
    ] = None
    features: Features = 64
    layers: Layers = 2
    dropout: Dropout = 0.3
    tied: Annotated[
        bool | None,
        _option(
            MODEL,
            "Use the input embeddings as output weights, too; default: --tied for a transformer in one process "
            "without --item-feature.",
            "--tied/--untied",
        ),
    ] = None
    batch: Batch = 128
    epochs: Epochs = 10.0
    optimizer: Optimizer = "adam"
    lr: Rate = 0.003

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sep = {"tab": "\t", "\\t": "\t"}.get(self.sep or "", self.sep)
        if self.sep is not None and (not self.sep or set(self.sep) & set('\r\n"\0')):
            raise ValueError(f"--sep must be characters within a line, got {quoted(self.sep)}")
        if (self.items is None) != (not self.item_feature):
            raise ValueError("give --items FILE and --item-feature COLUMN together: the table, and the columns to use")
        if self.item_feature and self.init is not None:
            raise ValueError("--init takes no --item-feature: the values of another run's columns have other numbers")
        if self.sequences and (self.sep is not None or self.no_header):
            raise ValueError("--sequences is for one sequence per line, so it takes no --sep and no --no-header")
        if self.tied is None and (self.model != "transformer" or self.loss != SOFTMAX or self.item_feature):
            self.tied = False


@dataclass(kw_only=True)
class ClassifySettings(Settings):
    """Train a classifier: predict the labels of texts, or of documents that have sparse features.

    Needs only a file: fastText's `__label__x some words` per line, a table with the columns text and label (.csv, .tsv,
    .jsonl), or the format of extreme classification, `label,label feature:value feature:value …` per line:
    manyclass train classify --data train.txt
    """

    data: Annotated[Path, _option(DATA, "The documents; - is the standard input.", show_default=False)]
    text_column: Annotated[str, _option(DATA, "Tables: column of the text.")] = "text"
    label_column: Annotated[str, _option(DATA, "Tables: column of the label; a list in .jsonl is several.")] = "label"
    label_sep: Annotated[str | None, _option(DATA, "Tables: between the labels of a cell; default: it has one.")] = None
    ngrams: Annotated[
        int, _option(DATA, "Texts: words in a row that are one feature, up to this many.", min=1, max=10)
    ] = 1
    buckets: Annotated[
        int, _option(DATA, "Texts: features that words and n-grams are hashed to.", min=2, max=2**30)
    ] = 2**18
    heldout: Heldout = None
    test: Test = None
    min_count: MinCount = 1
    features: Features = 256
    dropout: Dropout = 0.2
    batch: Batch = 64
    epochs: Epochs = 10.0
