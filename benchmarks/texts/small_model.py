"""Tiny Hugging Face language model with random weights, for tests and benchmarks that must not download one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def save_text_model(folder: Path, words: Sequence[str], *, tokens: int = 16, seed: int = 1) -> Path:
    """Save a two-layer BERT that knows `words`, with its tokenizer, and return the folder.

    Args:
        folder: Folder for the model.
        words: Vocabulary; other words are unknown.
        tokens: Longest text, in tokens.
        seed: Draws the weights.

    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(seed)
    config = transformers.BertConfig(vocab_size=len(SPECIAL) + len(words), max_position_embeddings=tokens, **SIZES)
    transformers.BertModel(config).save_pretrained(folder)
    numbers = {word: number for number, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    return folder
