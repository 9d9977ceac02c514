"""Sweeps of `manyclass train`: the paper's experiments, and complete trainings compared."""
