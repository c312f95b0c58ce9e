"""What programs look up of a loaded model: its limits and what its `config.json` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

from quire.engine.plan.engine_plan import EnginePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model as `llm.llm_engine.model_config` shows it. Lengths in tokens."""

    model: str
    tokenizer: str
    max_model_len: int
    dtype: str
    """What is computed in."""
    seed: int
    hf_config: SimpleNamespace
    """The keys of `config.json` as attributes."""
    vocab_size: int
    hidden_size: int
    num_layers: int

    @property
    def hf_text_config(self) -> SimpleNamespace:
        """The same: models that generate text have one config."""
        return self.hf_config

    @property
    def served_model_name(self) -> str:
        """The model's name as it was given."""
        return self.model

    def get_vocab_size(self) -> int:
        """Columns of the logits."""
        return self.vocab_size

    def get_hidden_size(self) -> int:
        """Return values in a hidden state."""
        return self.hidden_size

    @classmethod
    def of(cls, plan: EnginePlan, config: Mapping[str, object]) -> ModelView:
        """Make the view of a plan and the parsed `config.json`."""
        return cls(
            model=plan.config.model,
            tokenizer=plan.config.tokenizer or plan.config.model,
            max_model_len=plan.limits.max_model_len,
            dtype=plan.dtype,
            seed=plan.config.seed,
            hf_config=SimpleNamespace(**config),
            vocab_size=plan.spec.vocab_size,
            hidden_size=plan.spec.hidden_size,
            num_layers=len(plan.spec.blocks),
        )
