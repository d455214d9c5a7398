"""A tokenizer for tiny models: one token a byte, and two special tokens."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from aspire_llm.sampling.detokenize import byte_level_alphabet

EOS = 256
VOCAB = 258


def byte_tokenizer() -> Tokenizer:
    vocabulary = dict(byte_level_alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<pad>", special=True)])
    return tokenizer
