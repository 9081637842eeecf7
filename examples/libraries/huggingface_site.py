"""A network of transformers and the loss and collator of its Trainer as a site; from_pretrained works the same way."""

import numpy as np
import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments

WORDS = 50


def network():
    small = DistilBertConfig(vocab_size=WORDS, dim=16, hidden_dim=32, n_layers=1, n_heads=2, max_position_embeddings=16)
    return DistilBertForSequenceClassification(small)


trainer = Trainer(network(), TrainingArguments("unused", report_to=[], use_cpu=True))
collate = trainer.data_collator


def step(module, batch):
    loss, outputs = trainer.compute_loss(module, dict(batch), return_outputs=True)
    return loss, outputs.logits, batch["labels"]


def training_data(site):
    rng = np.random.default_rng(len(site))
    texts = rng.integers(1, WORDS, size=(160, 12))
    labels = (texts < 10).sum(1) > 2  # rare words
    return [{"input_ids": torch.tensor(text), "label": int(label)} for text, label in zip(texts, labels, strict=True)]


def evaluation_data(site):
    return training_data(site + " held out")
