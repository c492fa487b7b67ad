"""The one error tree of Prism.

Every error that a user can meet is a `PrismError`, and its text names the thing, the limit and the value.
Exceptions of a decoder, a sampler or an emit callback are not wrapped: they pass through unchanged.
"""

from __future__ import annotations


class PrismError(Exception):
    """Base of every error that Prism raises on purpose."""


class InvalidRequest(PrismError, ValueError):
    """An argument is outside its documented range, or a Runtime is called while it is busy; nothing was touched."""


class Cancelled(PrismError):
    """The request's cancellation was set; the conversation is back at its last commit."""


class DeadlineExceeded(PrismError, TimeoutError):
    """The request's deadline has passed; the conversation is back at its last commit."""


class RuntimeFaulted(PrismError):
    """An earlier recovery failed: the Runtime refuses work until `reset()` succeeds."""


class RestoreFailed(PrismError):
    """Recovery could not restore the decoder: `__cause__` is the restore error, `original` what led to it."""

    def __init__(self, message: str, original: BaseException | None = None) -> None:
        super().__init__(message)
        self.original = original


class DecoderError(PrismError):
    """A decoder broke its protocol, such as a short or non-finite logits vector."""


class SamplerError(PrismError):
    """A sampler returned something that is no token of the vocabulary, or refused the logits."""


class BudgetExceeded(PrismError):
    """A mandatory snapshot does not fit the checkpoint budget."""


class ModelError(PrismError):
    """A model file cannot be used; the text says which part of it, and why."""
