"""One line to the user, which never ends what goes on."""

from __future__ import annotations

import logging
import warnings

logger = logging.getLogger("hotop")


def say(text: str) -> None:
    """Warn; where warnings are errors, log: a report must not stop the measurement it is about."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        logger.warning("%s", text)


def words_of(error: BaseException) -> str:
    """Return an exception's class and text on one line, whatever its text does."""
    try:
        text = str(error)
    except BaseException:
        text = "(its text cannot be read)"
    shown = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return f"{type(error).__name__}: {shown}"
