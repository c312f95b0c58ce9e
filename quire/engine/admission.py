"""The front of an engine that runs elsewhere: requests are judged here, before they travel.

Torch-free. Whatever would make the engine refuse a request is found out here with the same code, so that a client hears of it
at once, in its own thread, and also while the engine is still loading.
"""

from __future__ import annotations

from typing import Any

from quire.core.params import SamplingParams
from quire.engine.builder import PreparedModel
from quire.engine.client import GenerationRequest, ModelInfo
from quire.engine.digest import Digest
from quire.engine.fingerprint import fingerprint
from quire.engine.prompts import ParsedPrompt, check_token_ids
from quire.engine.requests import PreparedRequest, RequestBuilder
from quire.errors import InvalidParameterError


class Admission:
    """Judges requests against one model and its limits."""

    def __init__(self, prepared: PreparedModel) -> None:
        plan = prepared.planned.plan
        self._vocab_size = plan.spec.vocab_size
        self._builder = RequestBuilder(plan, prepared.tokenizer, prepared.eos_token_ids)
        self.model = model_info(prepared)

    def digest(self, params: SamplingParams) -> Digest:
        """See `EngineClient.digest`."""
        return self._builder.digest(params)

    def admit(self, asked: GenerationRequest) -> PreparedRequest:
        """Raises a RequestError for a request that can never be served."""
        if asked.params.logits_processors:
            raise InvalidParameterError(
                "logits_processors are functions, which do not travel to an engine process", param="logits_processors"
            )
        token_ids = check_token_ids(asked.prompt_token_ids, self._vocab_size)
        prompt = ParsedPrompt(asked.prompt, token_ids, asked.cache_salt)
        digest = (asked.digest or self._builder.digest(asked.params)).of(asked.params)
        standing: dict[str, Any] = {"priority": asked.priority, "tenant": asked.tenant, "weight": asked.weight}
        return self._builder.sampling(asked.request_id, prompt, digest, **standing)


def model_info(prepared: PreparedModel) -> ModelInfo:
    """What a server may know of a model that is not loaded yet."""
    plan = prepared.planned.plan
    return ModelInfo(
        name=plan.config.model,
        folder=str(prepared.planned.folder),
        max_model_len=plan.limits.max_model_len,
        vocab_size=plan.spec.vocab_size,
        max_logprobs=plan.config.max_logprobs,
        eos_token_ids=tuple(sorted(prepared.eos_token_ids)),
        generation_config=dict(prepared.generation_config),
        num_kv_slots=plan.limits.num_slots,
        kv={
            "block_size": str(plan.limits.block_size),
            "num_gpu_blocks": str(plan.limits.num_blocks),
            "cache_dtype": plan.config.kv_cache_dtype,
            "enable_prefix_caching": str(plan.limits.enable_prefix_caching),
        },
        policy=plan.limits.policy,
        fingerprint=fingerprint(plan, prepared.planned.files),
    )
