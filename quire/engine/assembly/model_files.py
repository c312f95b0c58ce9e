"""Finding a model: which files there are, and what they say before a weight is read.

Owns the forms that MODEL may have: a folder, a hub name, a shipped model's name, a config alone
(dummy weights), a GGUF file. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.common.file_states import lasting_name, states_of
from quire.common.small_files import exists, is_file, is_folder
from quire.config.engine import QUANTIZATIONS, STORED_QUANTIZATIONS, EngineConfig
from quire.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedModelError
from quire.models.declaration import DecoderSpec
from quire.quant.formats import FormSupport, WeightFormats, formats_at_load
from quire.weights.checkpoint import INDEX_NAME
from quire.weights.folder import (
    local_path,
    read_model_config,
    read_preprocessor_config,
    resolve_model,
)

if TYPE_CHECKING:
    from quire.models.image_processing import ImageProcessing
    from quire.quant.gguf_formats import GgufStorage
    from quire.quant.storage import CheckpointStorage
    from quire.weights.gguf.model import GgufModel

_SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "preprocessor_config.json", "processor_config.json", INDEX_NAME,
)  # fmt: skip


class ModelFiles(NamedTuple):
    """A model that was found."""

    folder: Path
    """Where its files lie."""
    config: Mapping[str, object]
    """What its `config.json` says, or would say."""
    gguf: GgufModel | None = None
    """Everything but the weights of a GGUF file, where the model is one."""
    config_path: Path | None = None
    """The config, where the model is nothing else."""

    @property
    def path(self) -> Path:
        """What was found, by a name that means the same wherever a process runs,
        and is never downloaded again."""
        return lasting_name(
            self.config_path or (self.folder if self.gguf is None else self.gguf.file.path)
        )

    @property
    def has_weights(self) -> bool:
        """Whether there are weight files, or an index that names some."""
        if self.config_path is not None:
            return False
        is_listed = exists(self.folder / INDEX_NAME)
        return self.gguf is not None or is_listed or any(self.folder.glob("*.safetensors"))

    def states(self, tokenizer: str | None) -> dict[str, tuple[int, int, str]]:
        """Return the files that decide what the model answers,
        and how they are now (see `file_states.check_unchanged`)."""
        folders = [self.folder] if tokenizer is None else [self.folder, Path(tokenizer)]
        small = [folder / name for folder in folders for name in _SMALL_FILES]
        weights = [] if self.config_path else sorted(self.folder.glob("*.safetensors"))
        own = [] if self.gguf is None else [self.gguf.file.path]
        return states_of([*(path for path in small if path.is_file()), *(own or weights)])

    def storage(
        self, spec: DecoderSpec, config: EngineConfig, back_end: FormSupport
    ) -> CheckpointStorage | GgufStorage | None:
        """Return how weights are stored that are not plain floating point; None where they all
        are."""
        self._check_stored(config)
        if self.gguf is not None:
            from quire.quant.gguf_formats import read_gguf_storage

            return read_gguf_storage(
                self.gguf, spec, config.quantize_to, back_end.mxfp4_scale_bytes
            )
        if config.load_format == "dummy" or self.config.get("quantization_config") is None:
            return None
        from quire.quant.quantization_config import read_storage

        return read_storage(self.config, spec, config.quantize_to, back_end)

    def image_processing(self, spec: DecoderSpec, config: EngineConfig) -> ImageProcessing | None:
        """Return what is done to images before the model reads them; None where it reads none.
        Raises a QuireError."""
        if spec.vision is None:
            return None
        if self.gguf is not None:
            raise UnsupportedModelError(
                f"{spec.architecture}: models that read images are not read from GGUF files; give "
                "a folder of safetensors, whose decoder may be quantized (GPTQ, AWQ, FP8, "
                "compressed-tensors), or quantization='int8' or 'int4'"
            )
        from quire.models.image_places import default_processing
        from quire.models.image_processing import read_image_processing

        values = read_preprocessor_config(self.folder)
        if values is None and config.load_format == "dummy":
            values = default_processing(spec.vision)
        if values is None:
            raise CheckpointError(
                f"{self.folder} has no preprocessor_config.json, which says how images are brought "
                "into the form that the model reads; copy it from where the model was published"
            )
        return read_image_processing({**values, **(config.mm_processor_kwargs or {})})

    def _check_stored(self, config: EngineConfig) -> None:
        """Refuse a wish for a checkpoint's quantization that the checkpoint does not have."""
        wished = STORED_QUANTIZATIONS.get(config.quantization or "")
        section = self.config.get("quantization_config")
        stored = (
            "gguf"
            if self.gguf is not None
            else section.get("quant_method")
            if isinstance(section, Mapping)
            else None
        )
        if wished is not None and stored not in wished:
            found = (
                "is of plain floating point" if stored is None else f"is quantized by {stored!r}"
            )
            raise ConfigError(
                f"quantization={config.quantization!r}, but the checkpoint {found}; leave it "
                "out, or choose "
                f"{' or '.join(map(repr, QUANTIZATIONS))} to quantize weights while they are loaded"
            )


def weight_formats(
    storage: CheckpointStorage | GgufStorage | None, spec: DecoderSpec, config: EngineConfig
) -> WeightFormats:
    """Say which weights are integers: as they are stored, or as the config has them quantized."""
    if storage is not None:
        return storage.formats
    if config.quantize_to is None:
        return WeightFormats()
    return formats_at_load(spec, config.quantize_to)


def find_model(config: EngineConfig) -> ModelFiles:
    """Raises ModelNotFoundError, CheckpointError or UnsupportedModelError."""
    files = _find(config)
    return (
        files
        if not config.hf_overrides
        else files._replace(config=_overridden(files.config, config.hf_overrides))
    )


def _overridden(values: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """Return a config with keys replaced. `rope_scaling` and `rope_parameters`
    are one key under two names."""
    kept = dict(values)
    if _ROPE_KEYS & set(overrides):
        for key in _ROPE_KEYS:
            kept.pop(key, None)
    return {**kept, **overrides}


_ROPE_KEYS = {"rope_scaling", "rope_parameters"}


def _find(config: EngineConfig) -> ModelFiles:
    path = local_path(config.model)
    if path.suffix == ".json" and is_file(path):
        if config.load_format != "dummy":
            raise ConfigError(
                f"model={config.model!r} is a config alone; it can only run with "
                "load_format='dummy'"
            )
        return ModelFiles(path.parent, read_model_config(path), config_path=path)
    file = _gguf_file(path, config)
    if file is not None:
        from quire.weights.gguf.file import read_gguf
        from quire.weights.gguf.model import GgufModel

        model = GgufModel.of(read_gguf(file))
        return ModelFiles(file.parent, model.config, model)
    folder = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    return ModelFiles(folder, read_model_config(folder))


def _gguf_file(path: Path, config: EngineConfig) -> Path | None:
    """Return the GGUF file that MODEL names: itself, or the only one of a folder that
    `load_format` requests, or that has no config.json."""
    if path.suffix == ".gguf" and is_file(path):
        if config.load_format == "dummy":
            raise ConfigError(
                "load_format='dummy' makes up the weights of a config.json; a GGUF file has its own"
            )
        return path
    is_requested = config.load_format == "gguf"
    if not is_folder(path) or (not is_requested and is_file(path / "config.json")):
        if is_requested:
            raise ModelNotFoundError(
                f"model={config.model!r}: no such GGUF file, or folder that holds one"
            )
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:8])
        raise ModelNotFoundError(
            f"model={config.model!r} holds {len(files)} GGUF files; name one of them: {names}"
        )
    if is_requested:
        raise ModelNotFoundError(f"model={config.model!r} holds no .gguf file")
    return None
