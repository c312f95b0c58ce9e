"""From a beam search that has ended to what its user reads.
A failure here is the error of that search alone."""

from __future__ import annotations

import logging
from typing import NamedTuple

from quire.common.failures import log_failure
from quire.core.beam import BeamSearch, Hypothesis
from quire.core.params import BeamSearchParams
from quire.core.request import FinishReason, Request
from quire.engine.front.outputs import BeamSearchOutput, BeamSearchSequence
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class BeamState(NamedTuple):
    """A running search, and what its user requested."""

    request: Request
    params: BeamSearchParams
    prompt: str | None


def beam_output(state: BeamState, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """Return the hypotheses of a search, best first, or the error that ended it."""
    request = state.request
    output = BeamSearchOutput(
        request.request_id, [], list(request.prompt_token_ids), state.prompt, request.error
    )
    if output.error is not None:
        return output
    assert isinstance(request.strategy, BeamSearch)
    try:
        output.sequences = [
            BeamSearchSequence(
                token_ids=list(hypothesis.token_ids),
                text="" if tokenizer is None else _text(state, hypothesis, tokenizer),
                cumulative_logprob=hypothesis.cumulative_logprob,
                score=hypothesis.score,
                finish_reason=hypothesis.finish_reason.value,
                prompt_token_ids=output.prompt_token_ids,
            )
            for hypothesis in request.strategy.hypotheses
        ]
    except Exception as error:
        log_failure(logger, f"request {request.request_id} failed while its output was made", error)
        output.error = f"the output could not be made: {type(error).__name__}"
    return output


def _text(state: BeamState, hypothesis: Hypothesis, tokenizer: Tokenizer) -> str:
    """Return the text that follows the prompt; the token that ended it is part of it
    only if the user wants so."""
    is_cut = (
        hypothesis.finish_reason is FinishReason.STOP
        and not state.params.include_stop_str_in_output
    )
    detokenizer = Detokenizer(
        tokenizer,
        state.request.prompt_token_ids,
        skip_special_tokens=state.params.skip_special_tokens,
    )
    return (
        detokenizer.append(hypothesis.token_ids[:-1] if is_cut else hypothesis.token_ids)
        + detokenizer.flush()
    )
