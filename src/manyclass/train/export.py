"""The trained class embeddings as files that other programs read."""

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import checks, functional
from .atomic import replacing

FORMATS = ("npy", "faiss", "safetensors")


def export(
    weight: Tensor,  # shape: (num_classes, in_features)
    bias: Tensor | None,  # shape: (num_classes,)
    names: list[str],
    prediction: str,
    to: str,
    out: Path,
) -> list[Path]:
    """Write the classes to the folder ``out`` and return the files: the embeddings, and ``classes.parquet``.

    Row i is class i everywhere; ``classes.parquet`` has the columns ``id`` and ``name``. The score of a class is the
    inner product of its row and the query. If there are offsets, ``npy`` and ``faiss`` have them as a last column:
    append a 1 to the query. For ``prediction="absolute"`` the score is the absolute value of that.

    Args:
        weight: class embeddings.
        bias: offsets per class, or None.
        names: of the classes, by id.
        prediction: ``"softmax"`` or ``"absolute"``, what the classes were trained for.
        to: ``"npy"``: ``classes.npy``, float32. ``"faiss"``: ``classes.faiss``, an exact index by inner product.
            ``"safetensors"``: ``classes.safetensors`` with ``weight``, ``bias`` (if any), metadata ``prediction``.
        out: made if it is missing.
    """
    checks.one_of("to", to, FORMATS)
    checks.one_of("prediction", prediction, functional.PREDICTIONS)
    if to == "faiss" and prediction == "absolute":
        raise ValueError(
            "prediction='absolute' ranks classes by |score|, which a search by inner product cannot find; "
            "take to='npy' or to='safetensors'"
        )
    if weight.dim() != 2 or len(names) != len(weight):
        raise ValueError(f"weight must have shape ({len(names)} names, in_features), got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({len(weight)},), got {tuple(bias.shape)}")

    polars = _optional("polars")
    library = {"npy": "numpy", "faiss": "faiss", "safetensors": "safetensors.torch"}[to]
    write = {"npy": _npy, "faiss": _faiss, "safetensors": _safetensors}[to]
    parts = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    parts = {name: part.detach().to("cpu", torch.float32).contiguous() for name, part in parts.items()}
    files = [out / f"classes.{to}", out / "classes.parquet"]
    with replacing(files[0]) as temporary:
        write(_optional(library), parts, prediction, temporary)
    with replacing(files[1]) as temporary:
        table = {"id": range(len(names)), "name": names}
        polars.DataFrame(table, schema={"id": polars.Int64, "name": polars.String}).write_parquet(temporary)
    return files


def _npy(numpy: Any, parts: dict[str, Tensor], _prediction: str, file: Path) -> None:
    numpy.save(file, _rows(parts).numpy())


def _faiss(faiss: Any, parts: dict[str, Tensor], _prediction: str, file: Path) -> None:
    rows = _rows(parts)
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows.numpy())
    faiss.write_index(index, str(file))


def _safetensors(safetensors: Any, parts: dict[str, Tensor], prediction: str, file: Path) -> None:
    safetensors.save_file(parts, file, metadata={"prediction": prediction})


def _rows(parts: dict[str, Tensor]) -> Tensor:
    """Return the class embeddings with the offsets, if any, as a last column."""
    if "bias" not in parts:
        return parts["weight"]
    return torch.cat([parts["weight"], parts["bias"].unsqueeze(1)], dim=1)


def _optional(name: str) -> Any:
    """Import an optional library."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = {"faiss": "faiss-cpu"}.get(name, name.partition(".")[0])
        raise ValueError(f"export needs {package}: pip install {package}") from error
