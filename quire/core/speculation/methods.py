"""The methods of speculation by name: what `speculative_config` stands for."""

from __future__ import annotations

from quire.config.speculation import SpeculationConfig
from quire.core.drafts import FORCED, MODELLED
from quire.core.speculation.drafters import Drafter
from quire.core.speculation.forced import MAX_FORCED
from quire.core.speculation.lookup import LookupDrafter, OutputMemory, RecallDrafter
from quire.core.speculation.mixture import BestOf, ModelWorth
from quire.core.speculation.speculator import Speculator
from quire.core.speculation.standing import StandingOrders
from quire.core.step_cost import StepCostModel


def speculator_of(config: SpeculationConfig, costs: StepCostModel | None) -> Speculator:
    """A new speculator, which knows nothing of any request yet."""
    least_chance = 0.0 if config.is_lookup_free else config.suffix_decoding_min_token_prob
    modelled = None
    if config.is_modelled:
        modelled = StandingOrders(MODELLED, config.max_modelled_tokens)
    drafter = _drafter_of(config, modelled)
    worth = None
    if isinstance(drafter, BestOf) and modelled is not None:
        worth = ModelWorth(drafter)
    return Speculator(
        drafter,
        config.max_tokens,
        costs=costs,
        least_chance=least_chance,
        forced=StandingOrders(FORCED, MAX_FORCED),
        modelled=modelled,
        worth=worth,
    )


def _drafter_of(config: SpeculationConfig, modelled: StandingOrders | None) -> Drafter:
    if config.method == "ngram":
        least, most = config.ngram_sizes
        return LookupDrafter(range(least, most + 1), most=most)
    if config.method not in ("suffix", "auto"):
        assert modelled is not None, config.method
        return modelled
    num_outputs = config.suffix_decoding_max_cached_requests
    memory = OutputMemory(max_outputs=num_outputs) if num_outputs else None
    factor = config.suffix_decoding_max_spec_factor
    if config.method == "suffix":
        return LookupDrafter(memory=memory, max_factor=factor)
    sources: list[Drafter] = [LookupDrafter(max_factor=factor)]
    if memory is not None:
        sources.append(RecallDrafter(memory, max_factor=factor))
    if modelled is not None:
        sources.append(modelled)
    return BestOf(sources, counted=-1 if modelled is None else len(sources) - 1)
