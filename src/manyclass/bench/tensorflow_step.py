"""The sampled softmax of TensorFlow, which draws one log-uniform pool for the batch."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

LEARNING_RATE = 0.1


def available() -> bool:
    """Return whether TensorFlow is installed."""
    return find_spec("tensorflow") is not None


def make(
    num_classes: int,
    num_samples: int,
    query: Tensor,  # shape: (batch, in_features)
    target: Tensor,  # shape: (batch,)
) -> Callable[[], float]:
    """Build a training step in float32: forward, backward (to the query too), sparse SGD; it returns the loss.

    TensorFlow takes as many threads as torch has.
    """
    import tensorflow  # pyright: ignore

    tf: Any = tensorflow
    threads = torch.get_num_threads()
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    bound = query.shape[1] ** -0.5
    weight = tf.Variable(tf.random.uniform((num_classes, query.shape[1]), -bound, bound))
    biases = tf.zeros(num_classes)
    inputs, labels = tf.constant(query.numpy()), tf.constant(target.unsqueeze(-1).numpy())

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            losses = tf.nn.sampled_softmax_loss(weight, biases, labels, inputs, num_samples, num_classes)
            loss = tf.reduce_mean(losses)
        of_weight, of_query = tape.gradient(loss, [weight, inputs])
        weight.scatter_sub(tf.IndexedSlices(LEARNING_RATE * of_weight.values, of_weight.indices))
        return loss, of_query

    return lambda: float(step()[0])
