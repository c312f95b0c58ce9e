"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.conversation import Conversation
from quire.server.api.openai.chat import MAX_DOCUMENTS
from quire.server.api.openai.messages import Message, check_continuation, for_template
from quire.server.api.openai.shapes import ChatTool
from quire.server.api.openai.tools import CHAT, read_tools
from quire.server.http.body import read_json, shape
from quire.server.http.call import call_of
from quire.server.http.errors import bad_request
from quire.server.http.off_loop import off_loop
from quire.server.http.responses import json_response
from quire.server.state import Api

_MAX_DECODED = 1 << 16
"""Ids, or as many as the context holds: a million at once would keep the
interpreter busy for half a second."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text, or a chat, to encode."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    """None is True, unless the last message is continued."""
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Annotated[Any, shape(ChatTool)]] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids to decode."""

    tokens: list[int]
    model: str | None = None


class Tokens:
    """Both endpoints."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def tokenize(self, request: Request) -> Response:
        """Return the ids that the engine would see for a prompt or a chat."""
        body = await read_json(request, TokenizeRequest, is_strict=self._api.config.strict_fields)
        self._api.check_model(body.model)
        prompts = self._api.prompts
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", param="prompt")
        check_continuation(body.add_generation_prompt, body.continue_final_message)
        if body.prompt is not None:
            token_ids = await prompts.encode(
                body.prompt, add_special_tokens=body.add_special_tokens
            )
        else:
            size = call_of(request).num_body_bytes
            offered = await off_loop(size, lambda: read_tools(body.tools, None, None, CHAT))
            tools = await self._api.prompts.tools(offered, ())
            conversation = Conversation(
                messages=await off_loop(size, lambda: for_template(body.messages or [])),
                tools=tools,
                add_generation_prompt=body.add_generation_prompt is not False,
                is_continued=bool(body.continue_final_message),
                template_kwargs=body.chat_template_kwargs,
                documents=body.documents or None,
                num_body_bytes=size,
                media_scope=call_of(request).tenant.media_scope(None),
            )
            token_ids = (await prompts.encode_chat(conversation)).token_ids
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": prompts.max_model_len,
            "tokens": token_ids,
        }
        raw_token = prompts.tokenizer.raw_token

        def show() -> Response:
            answer["token_strs"] = (
                list(map(raw_token, token_ids)) if body.return_token_strs else None
            )
            return json_response(call_of(request), answer)

        return await off_loop(16 * len(token_ids), show)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        body = await read_json(request, DetokenizeRequest, is_strict=self._api.config.strict_fields)
        self._api.check_model(body.model)
        most = max(_MAX_DECODED, self._api.prompts.max_model_len)
        if len(body.tokens) > most:
            raise bad_request(
                f"tokens: {len(body.tokens)} are given, and at most {most} are decoded at once",
                param="tokens",
            )
        text = await self._api.prompts.decode(body.tokens)
        return await off_loop(len(text), lambda: json_response(call_of(request), {"prompt": text}))
