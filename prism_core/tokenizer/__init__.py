"""Tokenizers of GGUF files: BPE and SPM, special tokens, incremental text, chat templates."""

from prism_core.tokenizer.chat import Answer, ChatPrompt, ChatTemplate
from prism_core.tokenizer.stream import TextStream
from prism_core.tokenizer.tokenizer import MAX_INPUT_BYTES, Tokenizer

__all__ = ["MAX_INPUT_BYTES", "Answer", "ChatPrompt", "ChatTemplate", "TextStream", "Tokenizer"]
