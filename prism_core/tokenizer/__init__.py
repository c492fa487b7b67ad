"""Tokenizers of GGUF files: BPE and SPM, special tokens, incremental text."""

from prism_core.tokenizer.stream import TextStream
from prism_core.tokenizer.tokenizer import MAX_INPUT_BYTES, Tokenizer

__all__ = ["MAX_INPUT_BYTES", "TextStream", "Tokenizer"]
