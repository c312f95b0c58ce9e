"""`LLM`: offline generation. A synchronous face on the engine,
with names that users of vLLM know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from quire.common.bounded_files import MAX_SETTINGS_BYTES, read_text
from quire.core import checks
from quire.core.beam_params import BeamSearchParams
from quire.core.params import RequestOutputKind, SamplingParams
from quire.engine.decisions.calls import DecisionCalls
from quire.engine.front import absent as without
from quire.engine.front.absent import BoundToProcess, absent
from quire.engine.front.adapters import ChosenAdapter, LoRARequests
from quire.engine.front.digest import Digest
from quire.engine.front.outputs import BeamSearchOutput, RequestOutput
from quire.engine.front.prompts import Prompt, as_prompts, with_truncation
from quire.engine.llm_engine import LLMEngine
from quire.engine.loop.engine import Engine
from quire.engine.loop.sharing import Output, Session, is_last
from quire.engine.pooling.calls import PoolingCalls
from quire.errors import ConfigError, InvalidParameterError, RequestError
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from quire.engine.arg_utils import EngineArgs
    from quire.engine.decisions.prompts import DecisionPrompts
    from quire.engine.front.conversations import Conversation
    from quire.engine.front.metrics import Metric
    from quire.text.chat import ChatTemplate
    from quire.text.content_format import ContentFormat
    from quire.text.pretrained import PretrainedTokenizer

Progress = bool | Callable[..., Any]
"""Whether to show a progress bar, or what makes one, called as `tqdm` is."""


class _Queue(NamedTuple):
    """What `enqueue` has accepted for the next `wait_for_completion`."""

    session: Session
    request_ids: list[str]


class LLM(BoundToProcess, PoolingCalls, DecisionCalls):
    """A model in this process. Safe to use from several threads, whose requests are computed
    together.

    `LLM("quire-storyteller").generate("Once upon a
    time")` is all it takes. `options` are the fields of `EngineConfig`, and `chat_template`: a
    Jinja template, or a file with one, in place of the model's own. An unknown one raises
    ConfigError with what it may have meant.
    """

    def __init__(self, model: str, **options: Any) -> None:
        chat_template = options.pop("chat_template", None)
        self._chat_template = None if chat_template is None else _template_source(chat_template)
        self.llm_engine = LLMEngine(model, **options)
        self.config = self.llm_engine.config
        self._queue = _Queue(Session(self.llm_engine.shared), [])
        self._queue_lock = threading.Lock()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return a model of parsed arguments."""
        return cls(**engine_args.options())

    @property
    def engine(self) -> Engine:
        """The engine itself, for one thread at a time."""
        return self.llm_engine.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        priority: Sequence[int] | None = None,
        *,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_token_ids: Sequence[Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the order of the prompts.

        `sampling_params` is one for all or one for each; by default the model's own. A prompt that
        cannot be served raises before anything is computed; a request that fails on the way comes
        back with `finish_reason` "error". `lora_request` is an adapter for all prompts, or a list
        with one, or None, for each. `prompt_token_ids` is an older way to give prompts of
        token ids.
        """
        listed = _prompts(prompts, prompt_token_ids)
        params = self._params_for(listed, sampling_params, tokenization_kwargs)
        adapters = self.engine.adapters.one_each(lora_request, len(listed))
        outputs = self._run(listed, params, adapters, use_tqdm=use_tqdm, priority=priority)
        return [output for output in outputs if isinstance(output, RequestOutput)]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, lists of `{"role": ..., "content": ...}`, by the chat template.

        Contents may have images: parts such as `{"type": "image_url", "image_url": {"url": ...}}`,
        or `{"type": "image_pil", "image_pil": ...}` with an image of PIL.
        `chat_template_content_format` says how contents reach the template: "string" as text,
        "openai" as lists of parts, "auto" as they are given.
        """
        # not every program chats: the template's part takes a twentieth of the import of `LLM`
        from quire.engine.front.conversations import ConversationPrompts
        from quire.text.chat_arguments import check_chat

        check_chat(messages, tools, chat_template, chat_template_kwargs)
        if self.engine.images is None:
            without.refuse_media(mm_processor_kwargs)
        template = self._template(chat_template)
        render = partial(
            template.render,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )
        made = ConversationPrompts(template, self._chat_tokenizer(), self.engine.images)
        prompts = made.prompts(messages, render, chat_template_content_format, mm_processor_kwargs)
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` best continuations of each prompt, as Transformers defines beam
        search.

        A search that fails on the way comes back without sequences and with `error` set.
        `concurrency_limit` has no effect:
        as many searches run at once as there is memory for.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidParameterError(
                f"beam_search takes BeamSearchParams, not {type(params).__name__}", param="params"
            )
        listed = as_prompts(prompts)
        adapters = self.engine.adapters.one_each(lora_request, len(listed))
        outputs = self._run(listed, [params] * len(listed), adapters, use_tqdm=use_tqdm)
        return [output for output in outputs if isinstance(output, BeamSearchOutput)]

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        use_tqdm: Progress = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Accept prompts without computing them; returns their request ids.
        See `wait_for_completion`."""
        listed = as_prompts(prompts)
        digests = self._digested(self._params_for(listed, sampling_params, tokenization_kwargs))
        adapters = self.engine.adapters.one_each(lora_request, len(listed))
        with self._queue_lock:
            queue = self._queue
            ids = self._add(queue.session, listed, digests, adapters, priority)
            queue.request_ids.extend(ids)
        return ids

    def wait_for_completion(
        self, output_type: object = None, *, use_tqdm: Progress = True
    ) -> list[RequestOutput]:
        """Compute what `enqueue` has accepted, in any thread, and no other call has taken; outputs
        come in the order in which it was."""
        with self._queue_lock:
            queue, self._queue = self._queue, _Queue(Session(self.llm_engine.shared), [])
        outputs = self._finish(queue.session, queue.request_ids, use_tqdm)
        return [output for output in outputs if isinstance(output, RequestOutput)]

    def get_tokenizer(self) -> PretrainedTokenizer:
        """Return the model's tokenizer, with the methods that transformers' have;
        ConfigError with `skip_tokenizer_init`."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what `generate` uses where no parameters are given."""
        return self.engine.default_params()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counters, under the names that vLLM gives them."""
        return self.llm_engine.get_metrics()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Processes that compute: those of one model, and with `include_dp` of all replicas."""
        config = self.config
        return config.num_processes * (config.data_parallel_size if include_dp else 1)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget the cached KV of finished requests; see `LLMEngine.reset_prefix_cache`."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Does nothing: encoded images are known by their content, so none is ever stale."""

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV cache back to the system; see `LLMEngine.sleep`."""
        self.llm_engine.sleep(level)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Bring the memory back; see `LLMEngine.wake_up`."""
        self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Return whether memory is the system's at the moment."""
        return self.llm_engine.is_sleeping()

    def update_weights(
        self,
        source: str | Path | Mapping[str, Tensor],
        *,
        version: str | None = None,
        requests: str = "resume",
    ) -> str:
        """Compute with other weights of the same model; see `LLMEngine.update_weights`."""
        return self.llm_engine.update_weights(source, version=version, requests=requests)

    @property
    def weight_version(self) -> str:
        """What the weights are called that requests are answered with now."""
        return self.llm_engine.weight_version

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call something of every worker; see `LLMEngine.collective_rpc`."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    start_profile = absent("start_profile", without.NO_PROFILE)
    stop_profile = absent("stop_profile", without.NO_PROFILE)
    apply_model = absent("apply_model", without.NO_MODEL_CALL)

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        self.llm_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chat_tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise InvalidParameterError(
                "chat needs a tokenizer, and this engine has none", param="messages"
            )
        return self.engine.tokenizer

    def _decision_prompts(self) -> DecisionPrompts:
        if not self.engine.plan.generates:
            raise InvalidParameterError(
                f"{self.engine.plan.spec.architecture} makes no text here, so it cannot decide; "
                f"{self._pooling.advice}",
                param="model",
            )
        from quire.engine.decisions.prompts import DecisionPrompts

        tokenizer = self._chat_tokenizer()
        has_template = self._chat_template is not None or tokenizer.chat_template is not None
        return DecisionPrompts(tokenizer, self._template(None) if has_template else None)

    def _template(self, source: str | None) -> ChatTemplate:
        """Return the template of a call, else the one given for all, else the model's."""
        from quire.text.chat import ChatTemplate

        tokenizer = self._chat_tokenizer()
        source = self._chat_template if source is None else source
        return (
            ChatTemplate.from_tokenizer(tokenizer)
            if source is None
            else ChatTemplate(source, tokenizer.config.named_tokens)
        )

    def _params_for(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[SamplingParams]:
        """Return one record of parameters for each prompt, checked and our own."""
        params = self.engine.default_params() if params is None else params
        listed: Sequence[SamplingParams] = (
            [params] * len(prompts) if isinstance(params, SamplingParams) else params
        )
        if not isinstance(listed, list | tuple) or not all(
            isinstance(each, SamplingParams) for each in listed
        ):
            raise InvalidParameterError(
                "sampling_params must be SamplingParams, or a list of them", param="sampling_params"
            )
        if len(listed) != len(prompts):
            raise InvalidParameterError(
                f"{len(listed)} sampling_params for {len(prompts)} prompts; give one for all "
                "or one for each",
                param="sampling_params",
            )
        copies = {id(each): with_truncation(each.clone(), tokenization_kwargs) for each in listed}
        for each in copies.values():
            each.output_kind = RequestOutputKind.FINAL_ONLY
            if each.structured_outputs is not None:
                from quire.grammar.judge import judge

                judge.check(each.structured_outputs.wire)
        return [copies[id(each)] for each in listed]

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | BeamSearchParams],
        adapters: Sequence[ChosenAdapter | None],
        *,
        use_tqdm: Progress,
        priority: Sequence[int] | None = None,
    ) -> list[Output]:
        """Run requests to their end; if anything goes wrong on the way in, or Ctrl-C is pressed,
        none of them stays."""
        session = Session(self.llm_engine.shared)
        ids = self._add(session, prompts, self._digested(params), adapters, priority)
        return self._finish(session, ids, use_tqdm)

    def _digested(
        self, params: Sequence[SamplingParams | BeamSearchParams]
    ) -> list[Digest | BeamSearchParams]:
        """Return each object of parameters for samples, read once however many prompts it is
        for."""
        distinct = {id(each): each for each in params}
        digests = {
            key: self.engine.digest(each)
            for key, each in distinct.items()
            if isinstance(each, SamplingParams)
        }
        return [digests[id(each)] if isinstance(each, SamplingParams) else each for each in params]

    def _run_digests(
        self,
        prompts: Sequence[Prompt],
        digests: Sequence[Digest],
        use_tqdm: Progress,
        lora_request: LoRARequests,
        places: Sequence[str] = (),
    ) -> list[RequestOutput]:
        adapters = self.engine.adapters.one_each(lora_request, len(prompts))
        session = Session(self.llm_engine.shared)
        ids = self._add(session, prompts, digests, adapters, None, places)
        outputs = self._finish(session, ids, use_tqdm)
        return [output for output in outputs if isinstance(output, RequestOutput)]

    @staticmethod
    def _add(
        session: Session,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | BeamSearchParams | Digest],
        adapters: Sequence[ChosenAdapter | None],
        priority: Sequence[int] | None,
        places: Sequence[str] = (),
    ) -> list[str]:
        """Add requests, all or none. Errors say which prompt they are about, as `places` call them
        (`prompts[0]` and so on), where there are several."""
        if priority is not None and not isinstance(priority, list | tuple | range):
            checks.refuse("priority", priority, "a list with one for each prompt")
        if priority is not None and len(priority) != len(prompts):
            raise InvalidParameterError(
                f"{len(priority)} priorities for {len(prompts)} prompts", param="priority"
            )
        ids: list[str] = []
        try:
            for prompt, each, adapter, rank in zip(
                prompts, params, adapters, priority or [0] * len(prompts), strict=True
            ):
                ids.append(session.add(prompt, each, adapter=adapter, priority=rank))
        except BaseException as error:
            _abort(session, ids)
            if isinstance(error, RequestError) and len(prompts) > 1:
                error.place = places[len(ids)] if places else f"prompts[{len(ids)}]"
            raise
        return ids

    @staticmethod
    def _finish(session: Session, ids: Sequence[str], use_tqdm: Progress) -> list[Output]:
        """Step until the requests have ended; their outputs in their order."""
        finished: dict[str, Output] = {}
        try:
            with _progress_bar(use_tqdm, len(ids)) as bar:
                for output in _last_outputs(session, len(ids)):
                    finished[output.request_id] = output
                    bar.update(1)
        finally:
            _abort(session, [request_id for request_id in ids if request_id not in finished])
        return [finished[request_id] for request_id in ids]


def _last_outputs(session: Session, num_requests: int) -> Iterator[Output]:
    num_finished = 0
    while num_finished < num_requests:
        for output in session.step():
            if is_last(output):
                num_finished += 1
                yield output


def _abort(session: Session, ids: Sequence[str]) -> None:
    for request_id in ids:
        session.abort(request_id)


def _progress_bar(use_tqdm: Progress, total: int) -> Any:
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="Generating")
    # here, for it takes a twentieth of a second that a start need not wait for
    from tqdm import tqdm

    return tqdm(total=total, desc="Generating", unit="request", disable=not use_tqdm)


def _prompts(
    prompts: Prompt | Sequence[Prompt] | None, token_ids: Sequence[Any] | None
) -> list[Prompt]:
    if (prompts is None) == (token_ids is None):
        raise InvalidParameterError(
            "give prompts, or prompt_token_ids in their place", param="prompts"
        )
    return as_prompts(prompts if prompts is not None else token_ids)  # type: ignore[arg-type]


def _template_source(given: str | Path) -> str:
    """Return a chat template, or the content of the file that is named."""
    text = str(given)
    if isinstance(given, str) and any(sign in text for sign in "{\n"):
        return text
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"chat_template={text!r} is no file, and no template either: one has {{{{ }}}} "
            f"or {{% %}} in it"
        )
    try:
        return read_text(path, MAX_SETTINGS_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"chat_template={text!r} cannot be read: {reason}") from None
