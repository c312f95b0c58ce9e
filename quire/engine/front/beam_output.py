"""From the end of a request for beams to what `beam_search` returns."""

from __future__ import annotations

from quire.core.beam import score
from quire.core.beam_params import BeamSearchParams
from quire.engine.front.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput


def beam_output(output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
    """Return the beams of a request that has ended, best first, or the error that ended it."""
    prompt_token_ids = list(output.prompt_token_ids)
    found = BeamSearchOutput(output.request_id, [], prompt_token_ids, output.prompt, output.error)
    for each in output.outputs:
        if output.error is None and each.token_ids:
            logprob, reason = each.cumulative_logprob, each.finish_reason
            assert logprob is not None and reason is not None
            found.sequences.append(
                BeamSearchSequence(
                    token_ids=list(each.token_ids),
                    text=each.text,
                    cumulative_logprob=logprob,
                    score=score(logprob, len(each.token_ids), params.length_penalty),
                    finish_reason=reason,
                    prompt_token_ids=prompt_token_ids,
                )
            )
    return found
