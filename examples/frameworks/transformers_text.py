"""The Trainer of Transformers with 1-bit gradients: a small GPT-2, made from a configuration, learns its own source.

    tutti run --workers 2 transformers_text.py

Needs Transformers: pip install '.[transformers]'
"""

import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import tutti
from tutti.integrations.transformers import TuttiTrainer

LENGTH = 64

text = Path(__file__).read_text() * 8
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text])
samples = [
    {"input_ids": tokens[at : at + LENGTH], "labels": tokens[at : at + LENGTH]}
    for at in range(0, len(tokens) - LENGTH, LENGTH)
]
torch.manual_seed(0)
config = GPT2Config(vocab_size=len(letters), n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
arguments = TrainingArguments(
    tempfile.gettempdir() + "/transformers_text",
    per_device_train_batch_size=8,
    max_steps=100,
    learning_rate=3e-3,
    save_strategy="no",
    logging_steps=20,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = TuttiTrainer(
    model=GPT2LMHeadModel(config),
    args=arguments,
    train_dataset=samples,
    eval_dataset=samples[:32],
    strategy="onebit",
)
trainer.train()
evaluation = trainer.evaluate()
tutti.print(f"loss {evaluation['eval_loss']:.2f}")
