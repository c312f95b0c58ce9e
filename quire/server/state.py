"""What all endpoints of one server share."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from quire.config.api import ApiConfig
from quire.core.params import generation_defaults
from quire.core.request import FIRST_VERSION
from quire.engine.front.client import Client
from quire.server.api.adapters import AdapterGauge, ServedAdapters
from quire.server.api.generation import Generator, Tracer
from quire.server.api.prompt_encoder import Parsers, PromptEncoder, read_template
from quire.server.http.call import Call
from quire.server.http.errors import ApiError, bad_request
from quire.server.ops.metrics import Metrics
from quire.server.quota.admission import AdmissionControl
from quire.server.quota.cost import Bounds, room_for_logprobs
from quire.server.quota.tenants import KeyRing


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
            client.tokenizer,
            info,
            read_template(config.chat_template),
            client.images,
            Parsers(config.tool_parser, config.reasoning_parser),
        )
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

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: of the engine and the weights that it computes with now,
        and of the template that makes its prompts."""
        version = self.client.weight_version
        return self._fingerprint if version == FIRST_VERSION else self._with(version)

    def fingerprint_of(self, call: Call) -> str:
        """Return `fingerprint`, of the adapter as well that a request is answered with."""
        adapter, version = call.adapter, self.client.weight_version
        if adapter is None:
            return self.fingerprint
        digest = adapter.adapter.digest
        return self._with(f"{digest}" if version == FIRST_VERSION else f"{digest} {version}")

    def _with(self, what: str) -> str:
        decisive = f"{self._fingerprint} {what}".encode()
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
