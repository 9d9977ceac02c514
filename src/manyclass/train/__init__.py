"""The application's training: from files to a run's folder, and back to a model."""

from .model import Model, Prediction
from .run import Run
from .training import load

__all__ = ["Model", "Prediction", "Run", "load"]
