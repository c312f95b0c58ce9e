"""What all endpoints of one server share."""

from __future__ import annotations

import time
from pathlib import Path

from quire.config.api import ApiConfig
from quire.core.params import generation_defaults
from quire.engine.client import EngineClient
from quire.errors import ConfigError
from quire.server.admission import Admission
from quire.server.errors import ApiError
from quire.server.generation import Generator
from quire.server.metrics import Metrics
from quire.server.tenants import KeyRing, key_ring, keys_from_text, read_keys_file
from quire.server.texts import Texts


class Api:
    """One served model: its client, its texts, who may use it, and the books."""

    def __init__(self, config: ApiConfig, client: EngineClient, keys: KeyRing) -> None:
        self.config = config
        self.client = client
        self.keys = keys
        self.created = int(time.time())
        info = client.model
        self.model_names = config.served_names or (_shown_name(info.name),)
        self.texts = Texts(client.tokenizer, info, _template_source(config))
        self.admission = Admission(config, keys.tenants, lambda: client.status().num_running)
        self.metrics = Metrics(config.metrics_prefix, self.model_names[0], client, self.admission)
        self.generator = Generator(client, self.admission, self.metrics)
        self.sampling_defaults = generation_defaults(info.generation_config)

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`."""
        return f"fp_{self.client.model.fingerprint[:24]}"

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises ApiError 404 for a model that is not served here."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404, f"the model {name[:128]!r} is not served here; /v1/models lists those that are", param="model",
                code="model_not_found",
            )  # fmt: skip
        return name


def read_keys(config: ApiConfig, environment: str | None = None) -> KeyRing:
    """All keys of the options and of the environment variable's text. Raises ConfigError."""
    tenants = read_keys_file(config.api_keys_file) if config.api_keys_file is not None else []
    for text in (config.api_keys, environment):
        if text is not None:
            given = keys_from_text(text)
            if not given:
                raise ConfigError("API keys were asked for, but none is given; without keys, leave the option out")
            tenants += given
    return key_ring(tenants)


def _shown_name(name: str) -> str:
    """A folder is served under its last part: paths are not for clients."""
    is_path = "/" in name and (name.startswith(("/", ".", "~")) or Path(name).exists())
    return Path(name).name or "model" if is_path else name


def _template_source(config: ApiConfig) -> str | None:
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template={config.chat_template!r} cannot be read: {type(error).__name__}") from None
