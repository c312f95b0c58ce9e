"""`LLM.decide`: questions about one state, answered by the probabilities of their options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.engine.front.adapters import LoRARequests
from quire.engine.front.digest import Digest
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import Prompt
from quire.errors import InvalidParameterError

if TYPE_CHECKING:
    from quire.engine.decisions.answers import Answer
    from quire.engine.decisions.prompts import DecisionPrompts, Message
    from quire.engine.decisions.questions import Question


class DecisionCalls:
    """Mixed into `LLM`, which runs the requests."""

    def _run_digests(
        self,
        prompts: Sequence[Prompt],
        digests: Sequence[Digest],
        use_tqdm: bool | Callable[..., Any],
        lora_request: LoRARequests,
        places: Sequence[str] = (),
    ) -> list[RequestOutput]:
        """Compute requests; their outputs in order."""
        raise NotImplementedError

    def _decision_prompts(self) -> DecisionPrompts:
        """Make what puts questions to the model."""
        raise NotImplementedError

    @cached_property
    def _decisions(self) -> DecisionPrompts:
        return self._decision_prompts()

    def decide(
        self,
        state: str | Sequence[Message],
        questions: Question | Sequence[Question],
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        lora_request: LoRARequests = None,
    ) -> list[Answer]:
        """Answer questions about a text or a conversation, in order; the state is computed once.

        An answer's numbers depend on the state and its question alone, not on the other questions.
        `lora_request` is one adapter for all. Raises a QuireError for models that generate no text,
        and where state and question do not fit the context.
        """
        # most programs never ask any, and these take a thirtieth of the import of `LLM`
        from quire.engine.decisions.answers import answer_to
        from quire.engine.decisions.questions import Choice, Predicate, Score

        is_several = isinstance(questions, Iterable)
        listed: list[Any] = list(questions) if is_several else [questions]  # type: ignore[arg-type]
        if not listed or not all(isinstance(each, Predicate | Choice | Score) for each in listed):
            raise InvalidParameterError(
                "questions must be a Predicate, a Choice or a Score, or a list of these",
                param="questions",
            )
        shared = self._decisions.state(state)
        prompts = [self._decisions.question(shared, each) for each in listed]
        outputs = self._run_digests(
            [{"prompt_token_ids": each.token_ids} for each in prompts],
            [each.digest for each in prompts],
            use_tqdm,
            lora_request,
            [f"questions[{number}]" for number in range(len(prompts))],
        )
        return [answer_to(*each) for each in zip(listed, outputs, strict=True)]
