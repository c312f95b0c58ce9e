"""Strict, typed reading of a Hugging Face `config.json`.

Owns: types, defaults, allowed values and the refusal of keys that were not read. A family requests
every key that it understands; whatever is left over must be on the list of keys that cannot change
the numbers, or be off (null, false or empty). So a key that changes the arithmetic is never ignored
in silence. Never executes anything (`auto_map` is a string to us), never reads a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from quire.errors import UnsupportedModelError

_T = TypeVar("_T")

_MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e30
_MAX_KEY_CHARS = 120

# Keys that describe training, bookkeeping, generation defaults or other programs' settings.
_HARMLESS = """
    architectures model_type auto_map name_or_path torch_dtype dtype use_cache initializer_range
    pretraining_tp output_attentions output_hidden_states output_past return_dict
    return_dict_in_generate torchscript use_bfloat16 tokenizer_class prefix problem_type
    finetuning_task task_specific_params id2label label2id num_labels chunk_size_feed_forward
    gradient_checkpointing cache_implementation keys_to_ignore_at_inference is_llama_config n_ctx
    n_special predict_special_tokens context_window_size prefill_chunk_size max_batch_size
    tensor_parallel_shards max_sequence_length model_max_length resid_pdrop embd_pdrop attn_pdrop
    attention_dropout hidden_dropout classifier_dropout mlp_dropout temperature top_k top_p
    typical_p do_sample max_length min_length num_beams num_beam_groups num_return_sequences
    early_stopping repetition_penalty encoder_no_repeat_ngram_size no_repeat_ngram_size
    length_penalty diversity_penalty output_scores bad_words_ids suppress_tokens
    begin_suppress_tokens remove_invalid_values forced_bos_token_id forced_eos_token_id
    exponential_decay_length_penalty tie_encoder_decoder cross_attention_hidden_size is_decoder
    attn_implementation attention_implementation use_flash_attn
"""
_HARMLESS_KEYS = frozenset(_HARMLESS.split())
_HARMLESS_PATTERN = re.compile(
    r"_.*|.*_token_ids?|.*_token_index|.*version|transformers[._].*|summary_.*|unsloth_.*"
)


class ConfigReader:
    """Typed access to one JSON object; every requested value is marked as read."""

    def __init__(self, values: Mapping[str, object], architecture: str, *, path: str = "") -> None:
        self.architecture = architecture
        self._values = values
        self._path = path
        self._read: set[str] = set()
        self._sections: list[ConfigReader] = []

    def has(self, key: str) -> bool:
        """Return whether the key is present and not null (null means absent everywhere here)."""
        return self._values.get(key) is not None

    def refuse(self, key: str, supported: str) -> UnsupportedModelError:
        """Return the error for a value that Quire does not implement, for the caller to raise."""
        where = f"{self._path}{key}={_shown(self._values.get(key))}"
        return UnsupportedModelError(
            f"{self.architecture}: config.json has {where}; supported: {supported}"
        )

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_INTEGER
    ) -> int:
        """Return a whole number within bounds; without a default the key is required."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.refuse(key, f"an integer from {minimum} to {maximum}")
        return value

    def optional_integer(
        self, key: str, default: int | None = None, *, minimum: int = 1
    ) -> int | None:
        """Return as `integer` does, but null (or absence, without a default) gives None."""
        self._read.add(key)
        present = key in self._values
        if present and self._values[key] is None:
            return None
        return self.integer(key, minimum=minimum) if present else default

    def number(self, key: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        """Return a finite number not below `minimum`; without a default the key is required."""
        value = self._get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not minimum <= value <= _MAX_NUMBER
        ):
            raise self.refuse(key, f"a number from {minimum:g} to {_MAX_NUMBER:g}")
        return float(value)

    def optional_number(
        self, key: str, default: float | None = None, *, minimum: float = 0.0
    ) -> float | None:
        """Return as `number` does, but null (or absence, without a default) gives None."""
        self._read.add(key)
        if key not in self._values:
            return default
        return None if self._values[key] is None else self.number(key, minimum=minimum)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; without a default the key is required."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "a string")
        return value

    def choice(self, key: str, table: Mapping[str, _T], default: str | None = None) -> _T:
        """Return the entry of `table` that the key's string names."""
        value = self.text(key, default)
        if value not in table:
            raise self.refuse(key, ", ".join(sorted(table)))
        return table[value]

    def require(self, key: str, allowed: object) -> None:
        """Refuse any value but `allowed`; absence and null are fine."""
        self._read.add(key)
        if self.has(key) and self._values[key] != allowed:
            raise self.refuse(key, f"{allowed!r} or null")

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a required list of `count` numbers, none below zero."""
        value = self._get(key, None)
        are_numbers = isinstance(value, list) and all(
            type(x) in (int, float) and 0 <= x <= _MAX_NUMBER for x in value
        )
        if not isinstance(value, list) or not are_numbers or len(value) != count:
            raise self.refuse(key, f"a list of {count} numbers from 0 up")
        return tuple(float(x) for x in value)

    def names(self, key: str, allowed: frozenset[str], count: int) -> tuple[str, ...] | None:
        """Return an optional list of `count` names out of `allowed`."""
        self._read.add(key)
        if not self.has(key):
            return None
        value = self._values[key]
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(x in allowed for x in map(str, value))
        ):
            raise self.refuse(key, f"a list of {count} of {', '.join(sorted(allowed))}")
        return tuple(map(str, value))

    def integers(self, key: str, maximum: int) -> tuple[int, ...]:
        """Read an optional list of whole numbers up to `maximum`; nothing where it is absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(
            type(x) is int and 0 <= x <= maximum for x in value
        ):
            raise self.refuse(key, f"a list of integers from 0 to {maximum}")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return an optional list of strings; nothing where it is absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(key, "a list of strings")
        return tuple(value)

    def raw(self, key: str) -> object:
        """Return a value of a kind that no other method reads, for the caller to check."""
        return self._get(key, None)

    def sections(self, key: str) -> tuple[ConfigReader, ...]:
        """Return the objects inside an object, whatever their names; nothing where it is absent."""
        group = self.section(key)
        if group is None:
            return ()
        return tuple(found for name in group._values if (found := group.section(name)) is not None)

    def section(
        self, key: str, defaults: Mapping[str, object] | None = None
    ) -> ConfigReader | None:
        """Return a nested object (None where absent); its own unread keys are
        refused by `finish` of the whole. `defaults` are what its keys are where it lacks them."""
        self._read.add(key)
        if not self.has(key):
            return None
        value = self._values[key]
        if not isinstance(value, Mapping):
            raise self.refuse(key, "an object")
        section = ConfigReader(
            {**(defaults or {}), **value}, self.architecture, path=f"{self._path}{key}."
        )
        self._sections.append(section)
        return section

    def ignore(self, *keys: str) -> None:
        """Declare that these keys do not matter to this family."""
        self._read.update(keys)

    def finish(self) -> None:
        """Refuse every key that was not read and that could change the numbers."""
        for section in self._sections:
            section.finish()
        for key, value in self._values.items():
            is_off = value is None or value is False or value == {} or value == []
            if (
                key in self._read
                or is_off
                or key in _HARMLESS_KEYS
                or _HARMLESS_PATTERN.fullmatch(key)
            ):
                continue
            where = f"{self._path}{key[:_MAX_KEY_CHARS]}={_shown(value)}"
            raise UnsupportedModelError(
                f"{self.architecture}: config.json has {where}, a key that Quire does not "
                "know for this architecture; remove it if it does not change what the model "
                "computes"
            )

    def _get(self, key: str, default: object) -> object:
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedModelError(
                f"{self.architecture}: config.json lacks {self._path}{key}, which is required"
            )
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
