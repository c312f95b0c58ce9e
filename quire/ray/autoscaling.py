"""How many replicas there are to be: as many as it takes for few prompt tokens to wait at each.

Requests in flight say little: one may be a word or a book, and a batch of many costs little more
than one of few. What waits is what a further replica would take over at once.
"""

import math
from typing import Any

METRIC = "waiting_tokens"


class WaitingTokens:
    """A policy of Ray Serve, whose delays apply to what it says. Serve copies this module's code to
    its controller, so it imports nothing of Quire's."""

    def __init__(self, target_tokens: float) -> None:
        """`target_tokens` may wait at each replica on average."""
        self._target_tokens = float(target_tokens)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return how many replicas there are to be, and the policy's state, of which it has none.

        More as soon as more waits than may; fewer where nothing waits, down to what the requests in
        flight need at `target_ongoing_requests` each.
        """
        current = context.target_num_replicas
        found = (context.aggregated_metrics or {}).get("waiting_tokens", {})
        waiting = sum(found.values())
        if waiting > self._target_tokens * max(1, len(found)):
            wanted = max(current + 1, math.ceil(waiting / self._target_tokens))
        elif waiting == 0:
            each = context.config.get_target_ongoing_requests()
            wanted = min(current, math.ceil(context.total_num_requests / each))
        else:
            wanted = current
        if current == 0 and context.total_num_requests > 0:
            wanted = max(1, wanted)
        low, high = (
            context.capacity_adjusted_min_replicas,
            context.capacity_adjusted_max_replicas,
        )
        return max(low, min(high, wanted)), {}
