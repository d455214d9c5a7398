"""A transformers tokenizer from the vocabulary inside a GGUF file.

Byte-level BPE is built here, since transformers' own conversion drops which text is split where before merging
(`tokenizer.ggml.pre`) and takes the BOS token for EOS. SentencePiece vocabularies go through transformers.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from aspire_llm.errors import UserError
from aspire_llm.models.gguf_file import GGUFFile
from aspire_llm.models.quiet import quiet_transformers

SPECIAL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen")
WORDS = (  # of Llama 3 and, with one digit at a time, of Qwen 2
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_from_gguf(file: GGUFFile) -> Any:
    """The tokenizer (transformers' PreTrainedTokenizerFast), with BOS, EOS, padding and chat template."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    model = file.metadata.get("tokenizer.ggml.model")
    tokens = [str(token) for token in file.array("tokenizer.ggml.tokens")]
    if not tokens:
        raise UserError(f"{file.path} holds no tokenizer; supported: files with tokenizer.ggml.tokens")
    names = {
        key: tokens[int(index)]
        for key, field in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
        if 0 <= int(index := file.metadata.get(f"tokenizer.ggml.{field}_token_id", -1)) < len(tokens)
    }
    pre = str(file.metadata.get("tokenizer.ggml.pre", "gpt-2"))
    if model == "gpt2":
        adds_bos = pre in ("llama-bpe", "llama3", "llama-v3")  # where the file does not say
        backend = _byte_level_bpe(file, tokens, pre)
        template = file.metadata.get("tokenizer.chat_template")
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **names
        )
    elif model == "llama":
        adds_bos = True
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
        tokenizer.add_special_tokens(names)
        tokenizer.clean_up_tokenization_spaces = False
    else:
        raise UserError(f"{file.path} has a tokenizer of kind {model!r}; supported: gpt2 (byte-level BPE), llama")
    bos = names.get("bos_token")
    if file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and bos is not None:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokens.index(bos))]
        )
    return tokenizer


def _byte_level_bpe(file: GGUFFile, tokens: list[str], pre: str) -> Tokenizer:
    if pre not in PRE_TOKENIZERS:
        raise UserError(
            f"{file.path} splits text as {pre!r}, which is not supported (supported: {', '.join(PRE_TOKENIZERS)}): "
            "use the model in Hugging Face format"
        )
    llama3 = pre in ("llama-bpe", "llama3", "llama-v3")
    merges: list[tuple[str, str]] = []
    for merge in file.array("tokenizer.ggml.merges"):
        left, _, right = str(merge).partition(" ")
        merges.append((left, right))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=llama3))
    if pre == "gpt-2":
        split: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif pre == "smollm":
        split = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    else:
        words = Regex(WORDS % ("{1,3}" if llama3 else ""))
        split = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(words, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if not llama3:
            tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.array("tokenizer.ggml.token_type")
    for kind, special in ((SPECIAL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(t, normalized=False, special=special) for t, k in zip(tokens, kinds, strict=False) if k == kind
        ]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
    return tokenizer
