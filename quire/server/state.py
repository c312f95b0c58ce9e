"""What all endpoints of one server share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.config.api import ApiConfig
from quire.core.params import ThinkTags, generation_defaults
from quire.core.structure import StructuredOutputsParams
from quire.engine.front.client import Client
from quire.engine.front.think_tags import tokens_of_tags
from quire.server.api.adapters import AdapterGauge, ServedAdapters
from quire.server.api.answer_format import AnswerFormat, ReasoningTags, is_json
from quire.server.api.conversation import ChatPrompt, Conversation, EncodedChat
from quire.server.api.generation import Generator, Tracer
from quire.server.api.prompt_encoder import PromptEncoder, read_template
from quire.server.api.structure import Asked, asks_for_json, settle
from quire.server.api.tools import Demand, Function, ToolUse, settle_tools
from quire.server.http.call import Call
from quire.server.http.errors import ApiError, bad_request, unavailable_feature
from quire.server.ops.metrics import Metrics
from quire.server.quota.admission import AdmissionControl
from quire.server.quota.cost import Bounds, room_for_logprobs
from quire.server.quota.tenants import KeyRing
from quire.text.reasoning import REASONING_FORMATS, is_thinking, reasoning_of_template
from quire.text.tools import FORMATS, ToolFormat, format_of_template


class Api:
    """One served model: its client, its prompts, who may use it, and the accounting."""

    def __init__(
        self, config: ApiConfig, client: Client, keys: KeyRing, tracer: Tracer | None = None
    ) -> None:
        self.config = config
        self.client = client
        self.keys = keys
        self.created = int(time.time())
        info = client.model
        self.model_names = model_names(config, info.name)
        self.prompts = PromptEncoder(
            client.tokenizer, info, read_template(config.chat_template), client.images
        )
        is_auto = config.tool_parser == "auto"
        self.tool_format = (
            format_of_template(self.prompts.template_source)
            if is_auto
            else FORMATS[config.tool_parser]
        )
        self.tags = self._tags(config.reasoning_parser)
        self.admission = AdmissionControl(config, keys.tenants, lambda: client.status().num_running)
        self.metrics = Metrics(config.metrics_prefix, self.model_names[0], client, self.admission)
        self.generator = Generator(
            client, self.admission, self.metrics, Bounds(config, info.vocab_size)
        )
        self.generator.tracer = tracer
        self.adapters = ServedAdapters(client.adapter_store, config, self.model_names)
        if client.adapter_store is not None:
            in_flight = self.generator.adapted
            gauge = AdapterGauge(
                config.metrics_prefix,
                info.max_loras,
                lambda: [run.adapter_use for run in in_flight],
            )
            self.metrics.add(gauge)
        self.sampling_defaults = generation_defaults(info.generation_config)
        decisive = (
            f"{info.fingerprint} {sorted(self.sampling_defaults.items())} "
            f"{self.prompts.template_source}"
        )
        self._fingerprint = f"fp_{hashlib.blake2b(decisive.encode(), digest_size=12).hexdigest()}"

    def default_max_tokens(self, num_top_logprobs: int | None, num_sequences: int) -> int | None:
        """Return the limit of an answer whose request gives none, besides the context: the model's
        own, or what its log-probabilities leave room for.
        """
        if num_top_logprobs is not None and num_top_logprobs < 0:
            num_top_logprobs = self.client.model.vocab_size
        room = room_for_logprobs(num_top_logprobs, num_sequences, self.config.max_logprob_entries)
        limits = [
            limit for limit in (self.sampling_defaults.get("max_tokens"), room) if limit is not None
        ]
        return min(limits, default=None)

    def _tags(self, parser: str) -> ReasoningTags | None:
        is_auto = parser == "auto"
        form = (
            reasoning_of_template(self.prompts.template_source)
            if is_auto
            else REASONING_FORMATS.get(parser)
        )
        if form is None:
            return None
        (begin, is_first_special), (end, is_last_special) = (
            self._token(form.begin),
            self._token(form.end),
        )
        is_special = (is_first_special and is_last_special) or form.has_special_parts
        return ReasoningTags(form, begin, end, is_special)

    def answer_format(
        self,
        tools: ToolUse | None,
        form: StructuredOutputsParams | None,
        prompt: str,
        continued: str | None = None,
    ) -> AnswerFormat:
        """Return how the answers to a request are read. `prompt` is the rendered chat, `continued`
        the message that the answer goes on with, if it does. Reasoning may come before JSON; forms
        of other kinds leave no room for them.
        """
        is_call = tools is not None and tools.is_enforced
        tags = self.tags if form is None or is_call or is_json(form) else None
        return AnswerFormat(
            tags, tags is not None and is_thinking(tags.form, prompt, continued), tools
        )

    async def tools(
        self, offered: tuple[Sequence[Function], Demand], asked: Sequence[Asked]
    ) -> ToolUse | None:
        """Settle which of the offered tools may be called, beside the requested form of text
        answers. Raises ApiError 400."""
        functions, demand = offered
        has_form = asks_for_json(asked)
        return await settle_tools(functions, demand, self.tool_notation, has_form=has_form)

    async def prompt(
        self, conversation: Conversation, encoded: EncodedChat | None = None
    ) -> ChatPrompt:
        """Render and encode a conversation, unless it has been, and settle the format of its
        answers. Raises ApiError 400."""
        text, token_ids, images = encoded or await self.prompts.encode_chat(conversation)
        form = await settle(conversation.asked)
        answer_format = self.answer_format(
            conversation.tools, form, text, conversation.continued_text
        )
        return ChatPrompt(text, token_ids, answer_format, form, images)

    async def thinking(
        self,
        budget: int | None,
        answer_format: AnswerFormat | None = None,
        param: str = "thinking_token_budget",
    ) -> dict[str, Any]:
        """Return the sampling parameters that a budget for reasoning needs, for an answer that is
        read so, or not read at all.

        None and -1 are no budget. Raises ApiError 400 for a model whose reasoning cannot be told
        apart.
        """
        if budget is None or budget < 0:
            return {}
        tokenizer = self.client.tokenizer
        if self.tags is not None and not self.tags.form.is_countable:
            raise unavailable_feature(
                param,
                f"the marks of {self.tags.form.name} are several tokens, which are not counted",
            )
        if self.tags is None or tokenizer is None:
            why = (
                "what this model thinks is not told apart from its answers, so it cannot be counted"
            )
            raise unavailable_feature(
                param, f"{why} (the operator can say how it marks its thoughts: --reasoning-parser)"
            )
        # the output schema leaves no room for reasoning
        if answer_format is not None and answer_format.tags is None:
            return {}
        marks = ThinkTags(
            self.tags.form.begin,
            self.tags.form.end,
            None if answer_format is None else answer_format.is_inside,
        )
        num_tokens = self.client.model.vocab_size
        await self.prompts.work(
            num_tokens, lambda: tokens_of_tags(tokenizer, marks[:2], num_tokens)
        )
        return {"thinking_token_budget": budget, "thinking_marks": marks}

    @property
    def tool_notation(self) -> tuple[ToolFormat | None, int | None]:
        """How the model writes calls, if that is known,
        and the id of the marker where that is a special token."""
        form = self.tool_format
        marker, is_special = (
            (None, False) if form is None or not form.begin else self._token(form.begin)
        )
        return form, marker if is_special else None

    def _token(self, text: str) -> tuple[int | None, bool]:
        """(id of the token that has this text, if any; whether it is a special one)."""
        tokenizer = self.client.tokenizer
        token_id = None if tokenizer is None else tokenizer.token_to_id(text)
        return (
            token_id,
            tokenizer is not None
            and token_id is not None
            and token_id in tokenizer.special_token_ids,
        )

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: of the engine,
        and of the template that makes its prompts."""
        return self._fingerprint

    def fingerprint_of(self, call: Call) -> str:
        """Return `fingerprint`, of the adapter as well that a request is answered with."""
        if call.adapter is None:
            return self._fingerprint
        decisive = f"{self._fingerprint} {call.adapter.adapter.digest}".encode()
        return f"fp_{hashlib.blake2b(decisive, digest_size=12).hexdigest()}"

    def choose_model(self, call: Call, name: str | None) -> str:
        """Do as `check_model`; the adapter that a name stands for is the call's from now on."""
        name = self.check_model(name)
        call.adapter = self.adapters.find(name)
        return name

    def choose_generator(self, call: Call, name: str | None) -> str:
        """Do as `choose_model`, for answers of text. Raises ApiError 400 where the model makes
        none."""
        name = self.choose_model(call, name)
        if not self.client.model.generates:
            raise bad_request(
                f"the model {name[:128]!r} makes no text; {self.client.pooling.advice}",
                param="model",
                code="model_not_supported",
            )
        return name

    def check_model(self, name: str | None) -> str:
        """Return the name to answer under. Raises ApiError 404 for a model that is not served
        here."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names and self.adapters.find(name) is None:
            raise ApiError(
                404,
                f"the model {name[:128]!r} is not served here; /v1/models lists those that are",
                param="model", code="model_not_found",
            )  # fmt: skip
        return name


def model_names(config: ApiConfig, name: str) -> tuple[str, ...]:
    """Return the names under which a model is served."""
    return config.served_names or (_shown_name(name),)


def _shown_name(name: str) -> str:
    """Return the name of a model; a folder is served under its last part: paths are not for
    clients."""
    is_path = "/" in name and (name.startswith(("/", ".", "~")) or Path(name).exists())
    return Path(name).name or "model" if is_path else name
