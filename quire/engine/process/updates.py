"""Other weights for an engine that serves: loaded in a thread beside the steps, taken in between
two of them."""

from __future__ import annotations

import logging
import threading
from typing import Any

from quire.common.failures import log_failure
from quire.engine.loop.step_loop import StepLoop
from quire.engine.process.messages import Done, UpdateWeights
from quire.errors import QuireError

logger = logging.getLogger(__name__)


class WeightUpdate:
    """One update, from its command to its end."""

    def __init__(self, loop: StepLoop, command: UpdateWeights) -> None:
        """Begin to load."""
        self.command = command
        self._loop = loop
        self._loaded: Any = None
        self._error: str | None = None
        self._thread = threading.Thread(target=self._load, name="quire-weights", daemon=True)
        self._thread.start()

    def take_in(self) -> Done | None:
        """Take the weights in, between two steps, if they are loaded and every request that is to
        end before has; returns how that went."""
        if self._thread.is_alive():
            return None
        if self._error is None and self.command.waits and self._loop.has_work:
            if self._loop.can_step:
                return None
            self._error = (
                "the engine is asleep: its requests cannot finish; wake it up"
                if self._loop.asleep
                else "the engine is paused: its requests cannot finish; resume it"
            )
        if self._error is None:
            try:
                self._loop.replace_weights(self._loaded, self.command.version)
            except QuireError as error:
                self._error = str(error)
            self._loaded = None
        return Done(self.command.number, self._loop.asleep, self._error)

    def _load(self) -> None:
        try:
            self._loaded = self._loop.executor.load_weights(self.command.folder)
        except QuireError as error:
            self._error = str(error)
        except Exception as error:
            log_failure(logger, "weights could not be loaded", error)
            self._error = f"the weights could not be loaded: {type(error).__name__}"
