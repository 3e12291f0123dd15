"""Writes tiny random Qwen3 checkpoints with a tokenizer: `tiny_qwen.py DIR SEED [DIR SEED …]`. The same seed gives the same bytes.

Run it with a Python that has torch, transformers and tokenizers; it is no part of the test package and imports nothing of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

VOCABULARY = 512
TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the merges of a few sentences: every text has tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|pad|>", "<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(
        (f"replica {n} serves policy version {n * 7} of run {n % 5} to the trainer" for n in range(300)), trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>", chat_template=TEMPLATE)


def write(directory: Path, seed: int, tokenizer: PreTrainedTokenizerFast) -> None:
    """Shapes are the same for every seed, so two seeds are two versions of one policy."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.2,  # ten times the default: greedy choices become clear ones
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    tokenizer = make_tokenizer()
    words = sys.argv[1:]
    for directory, seed in zip(words[::2], words[1::2], strict=True):
        write(Path(directory), int(seed), tokenizer)


main()
