"""A planned model as requests are made for it: what an engine knows of it before anything runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quire.core.params import SamplingParams
from quire.engine.front.adapters import RequestedAdapters
from quire.engine.front.digest import Digest
from quire.engine.front.images import image_reader
from quire.engine.front.model_view import ModelView
from quire.engine.front.requests import RequestBuilder
from quire.engine.plan.engine_plan import EnginePlan
from quire.errors import ConfigError
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.text.pretrained import PretrainedTokenizer


class ServedModel:
    """What every engine has, wherever it computes."""

    def __init__(
        self,
        plan: EnginePlan,
        *,
        tokenizer: Tokenizer | None = None,
        generation_config: Mapping[str, Any] | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        model_config: Mapping[str, object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        self.generation_config = dict(generation_config or {})
        self.model = ModelView.of(plan, model_config or {})
        self.adapters = RequestedAdapters(plan.spec, plan.adapters)
        self.images = image_reader(plan)
        """What reads the images of prompts; None where the model reads none."""
        self.request_builder = RequestBuilder(plan, tokenizer, eos_token_ids, clock)

    def default_params(self, **overrides: Any) -> SamplingParams:
        """Sampling parameters as the model's `generation_config.json` wants them."""
        return SamplingParams.from_generation_config(self.generation_config, **overrides)

    def pretrained_tokenizer(self) -> PretrainedTokenizer:
        """Return the tokenizer, with the methods that transformers' have.
        ConfigError where there is none."""
        if self.tokenizer is None:
            raise ConfigError(
                "this engine has no tokenizer (skip_tokenizer_init); load the model with one"
            )
        from quire.text.pretrained import PretrainedTokenizer

        return PretrainedTokenizer(self.tokenizer, name=self.model.tokenizer)

    def digest(self, params: SamplingParams) -> Digest:
        """Read parameters once, for `add_request` with any number of prompts; later changes to
        `params` do not count.

        Safe in any thread. Raises a RequestError.
        """
        return self.request_builder.digest(params.clone())

    def close_model(self) -> None:
        """Delete what requests left in files and memory. Idempotent."""
        self.adapters.close()
        if self.images is not None:
            self.images.close()
