"""`LLM`: offline generation. A synchronous face on the engine, with names that users of vLLM know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from quire.config.engine import EngineConfig
from quire.core.params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.engine.builder import build_engine
from quire.engine.engine import Engine
from quire.engine.outputs import BeamSearchOutput, RequestOutput
from quire.engine.prompts import Prompt, as_prompts
from quire.errors import ConfigError, EngineError, InvalidParameterError
from quire.grammar.judge import judge
from quire.text.chat import ChatTemplate, encode_chat
from quire.text.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, Any]]
"""Messages, each `{"role": ..., "content": ...}`."""


class LLM:
    """A model in this process.

    `LLM("quire-storyteller").generate("Once upon a time")` is all it takes. `options` are the fields of `EngineConfig`; an
    unknown one raises ConfigError with what it may have meant.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = EngineConfig.from_options(model, options)
        self.engine: Engine = build_engine(self.config)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the order of the prompts.

        `sampling_params` is one for all or one for each; by default the model's own. A prompt that cannot be served raises
        before anything is computed; a request that fails on the way comes back with `finish_reason` "error".
        """
        listed = as_prompts(prompts)
        params = self._params_for(listed, sampling_params)
        for each in params:
            each.output_kind = RequestOutputKind.FINAL_ONLY
            if each.structured_outputs is not None:
                judge.check(each.structured_outputs.wire)
        outputs = self._run(listed, params, use_tqdm=use_tqdm, priority=priority)
        return [output for output in outputs if isinstance(output, RequestOutput)]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, each a list of `{"role": ..., "content": ...}`, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokenizer = self._chat_tokenizer()
        template = _chat_template(tokenizer, chat_template)
        prompts: list[Prompt] = []
        for conversation in conversations:
            rendered = template.render(
                conversation,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
            )
            prompts.append({"prompt": rendered, "prompt_token_ids": encode_chat(tokenizer, rendered)})
        return self.generate(prompts, sampling_params, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, as Transformers defines beam search.

        A search that fails on the way comes back without sequences and with `error` set.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidParameterError(f"beam_search takes BeamSearchParams, not {type(params).__name__}", param="params")
        listed = as_prompts(prompts)
        outputs = self._run(listed, [params] * len(listed), use_tqdm=use_tqdm)
        return [output for output in outputs if isinstance(output, BeamSearchOutput)]

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float]]:
        """Not offered by models that generate text; raises ConfigError."""
        raise ConfigError(
            f"{self.engine.plan.spec.architecture} generates text and makes no embeddings; load an embedding model"
        )

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, or None with `skip_tokenizer_init`."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where no parameters are given."""
        return self.engine.default_params()

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _chat_tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise InvalidParameterError("chat needs a tokenizer, and this engine has none", param="messages")
        return self.engine.tokenizer

    def _params_for(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.engine.default_params()
        if isinstance(params, SamplingParams):
            return [params.clone() for _ in prompts]
        if not isinstance(params, list | tuple) or not all(isinstance(each, SamplingParams) for each in params):
            raise InvalidParameterError("sampling_params must be SamplingParams, or a list of them", param="sampling_params")
        if len(params) != len(prompts):
            raise InvalidParameterError(
                f"{len(params)} sampling_params for {len(prompts)} prompts; give one for all or one for each",
                param="sampling_params",
            )
        return [each.clone() for each in params]

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | BeamSearchParams],
        *,
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput | BeamSearchOutput]:
        """Run requests to their end; if anything goes wrong on the way in, or Ctrl-C is pressed, none of them stays."""
        if priority is not None and len(priority) != len(prompts):
            raise InvalidParameterError(f"{len(priority)} priorities for {len(prompts)} prompts", param="priority")
        ids: list[str] = []
        finished: dict[str, RequestOutput | BeamSearchOutput] = {}
        try:
            for place, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
                request_id = str(self._num_requests)
                self.engine.add_request(request_id, prompt, each, priority=priority[place] if priority else 0)
                self._num_requests += 1
                ids.append(request_id)
            from tqdm import tqdm  # here, for it takes a twentieth of a second that a start need not wait for

            with tqdm(total=len(ids), desc="Generating", unit="request", disable=not use_tqdm) as bar:
                for request_id, output in self._finish_all(len(ids)):
                    finished[request_id] = output
                    bar.update()
        finally:
            for request_id in ids:
                if request_id not in finished:
                    self.engine.abort(request_id)
        return [finished[request_id] for request_id in ids]

    def _finish_all(self, num_requests: int) -> Iterator[tuple[str, RequestOutput | BeamSearchOutput]]:
        num_finished = 0
        while num_finished < num_requests:
            if not self.engine.has_work:
                raise EngineError("the engine lost a request; this is a bug")
            for output in self.engine.step():
                if isinstance(output, BeamSearchOutput) or output.finished:
                    num_finished += 1
                    yield output.request_id, output


def _chat_template(tokenizer: Tokenizer, source: str | None) -> ChatTemplate:
    """The model's chat template, or one made from `source`."""
    return ChatTemplate.from_tokenizer(tokenizer) if source is None else ChatTemplate(source, tokenizer.config.named_tokens)
