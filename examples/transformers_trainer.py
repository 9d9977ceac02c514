"""A small causal language model of Hugging Face Transformers, with tied embeddings, trained by their Trainer.

    pip install transformers accelerate
    python examples/transformers_trainer.py --words 50000

Input and output embeddings are one table with sparse gradients. Data is synthetic: in a made language every word is
followed by one of four others. A model that knows the language has a loss of log 4 = 1.386.
"""

import argparse
import tempfile

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model, Trainer, TrainingArguments

import manyclass


# --8<-- [start:model]
class LanguageModel(nn.Module):
    """A GPT-2 trunk and an output layer that shares its table of word embeddings."""

    def __init__(self, config: GPT2Config, num_samples: int) -> None:
        super().__init__()
        self.trunk = GPT2Model(config)
        words = nn.Embedding(config.vocab_size, config.n_embd, sparse=True)
        words.weight.data.copy_(self.trunk.get_input_embeddings().weight)
        self.trunk.set_input_embeddings(words)
        self.head = manyclass.SampledSoftmax(config.n_embd, config.vocab_size, num_samples=num_samples, embedding=words)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Token ids ``(batch, length)`` → the loss of the next token; −100 in ``labels`` is left out."""
        hidden = self.trunk(input_ids=input_ids).last_hidden_state
        return {"loss": self.head(hidden[:, :-1], labels[:, 1:])}


# --8<-- [end:model]
def made_text(words: int, sequences: int, length: int, generator: torch.Generator) -> list[dict[str, Tensor]]:
    """Sequences of words, as the Trainer takes them."""
    followers = torch.randint(words, (words, 4), generator=torch.Generator().manual_seed(1))
    tokens = [torch.randint(words, (sequences,), generator=generator)]
    for _ in range(length - 1):
        tokens.append(followers[tokens[-1], torch.randint(4, (sequences,), generator=generator)])
    return [{"input_ids": row, "labels": row} for row in torch.stack(tokens, dim=1)]


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate; return what is printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--num-samples", type=int, default=2048)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    config = GPT2Config(
        vocab_size=options.words,
        n_positions=32,
        n_embd=options.features,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    model = LanguageModel(config, options.num_samples)
    optimizer = manyclass.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.batch,
                max_grad_norm=1.0,
                prediction_loss_only=True,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=made_text(options.words, options.steps * options.batch, 32, generator),
            eval_dataset=made_text(options.words, 100, 32, generator),
            optimizers=(optimizer, None),
        )
        # --8<-- [start:trainer]
        trainer.accelerator.clip_grad_norm_ = manyclass.clip_grad_norm_  # torch's own fails on sparse gradients
        trainer.train()
        optimizer.flush()  # rows without a recent gradient catch up
        result = {"exact loss": trainer.evaluate()["eval_loss"]}  # over all words
        # --8<-- [end:trainer]
    for name, value in result.items():
        print(f"{name:12} {value:8.3f}")
    return result


if __name__ == "__main__":
    main()
