"""The error of a SPEC: the text by which a person names a model, a policy or a section."""

from __future__ import annotations


class SpecError(ValueError):
    """A SPEC that cannot be used. ``option`` is the option of the command line that takes it, such as ``--model``."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option
