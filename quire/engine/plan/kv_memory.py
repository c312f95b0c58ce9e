"""The KV cache of a plan: how keys and values are stored, how much memory they get, and how long a
sequence that holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from quire.common.kv_formats import KV_FORMATS, OTHER_NAMES
from quire.common.numbers import align_down, ceil_div, format_bytes, parse_bytes
from quire.config.engine import EngineConfig
from quire.config.limits import SchedulerLimits
from quire.engine.plan.engine_plan import Notes
from quire.engine.plan.machine import Machine
from quire.errors import CapacityError, ConfigError
from quire.models.declaration import DecoderSpec
from quire.models.kv_layout import KVLayout

DEFAULT_MAX_KV_BYTES = 4 << 30
"""Where the user names no size, the KV cache is not made larger than this:
a laptop has other uses for its memory."""


@dataclass(frozen=True, slots=True)
class KVPlanner:
    """Decides, for one model on one machine, and notes what it decides."""

    config: EngineConfig
    spec: DecoderSpec
    machine: Machine
    """Its GPU is the one that is computed on; None on the CPU."""
    notes: Notes
    context_len: int
    """The model's."""
    longest: int
    """Tokens of the longest sequence that the user, or else the model, has in mind."""

    def format(self, dtype: str) -> str:
        """Choose the format that keys and values are stored in."""
        given = self.config.kv_cache_dtype
        chosen = dtype if given == "auto" else OTHER_NAMES.get(given, given)
        odd = [layer.head_dim for layer in self.spec.kv_layers if layer.head_dim % 4]
        if self.machine.gpu is not None and KV_FORMATS[chosen].scale_bytes and odd:
            raise ConfigError(
                f"kv_cache_dtype={given!r} on a GPU needs heads of whole fours, not of "
                f"{odd[0]}; leave it at 'auto'"
            )
        self.notes.add(
            "kv_cache_dtype", chosen, "as the compute dtype" if given == "auto" else "given"
        )
        return chosen

    def note_groups(self, layout: KVLayout, limits: SchedulerLimits, block_bytes: int) -> None:
        """Note what windows spare, where there are any."""
        if layout.windows == (None,):
            return
        longest, windows = self.longest, Counter(layout.windows)
        kinds = [
            f"{count} with {'everything' if window is None else f'a window of {window:,} tokens'}"
            for window, count in windows.items()
        ]
        kept = limits.num_blocks_kept(longest) * block_bytes
        whole = ceil_div(longest, limits.block_size) * len(layout.windows) * block_bytes
        reason = (
            f"{', '.join(kinds)}: {longest:,} tokens take {format_bytes(kept)}, not "
            f"{format_bytes(whole)}"
        )
        self.notes.add(
            "kv_groups", f"{len(layout.windows)} groups of {layout.num_places} layers", reason
        )

    def pool(
        self, limits: SchedulerLimits, block_bytes: int, fixed_bytes: int
    ) -> tuple[SchedulerLimits, int]:
        """Return the limits with the blocks that memory leaves and the longest sequence that they
        hold, and the blocks' bytes."""
        longest, num_others = self.longest, limits.max_num_seqs - 1
        most_useful = limits.num_blocks_for(longest) + num_others * limits.num_blocks_kept(longest)
        kv_bytes = self._kv_bytes(fixed_bytes, block_bytes * most_useful)
        num_blocks = self._num_blocks(kv_bytes, block_bytes, limits.max_num_seqs)
        limits = replace(limits, num_blocks=max(1, num_blocks))
        longest = limits.longest_len(longest) if num_blocks else 0
        max_model_len = self._max_model_len(longest, limits, block_bytes)
        return replace(limits, max_model_len=max_model_len), num_blocks * block_bytes

    def _num_blocks(self, kv_bytes: int, block_bytes: int, max_num_seqs: int) -> int:
        """Of an encoder, places for texts: its blocks hold nothing."""
        if self.spec.is_encoder:
            return max_num_seqs
        num_blocks = kv_bytes // block_bytes
        reason = f"{format_bytes(kv_bytes)} / {format_bytes(block_bytes)} a block"
        self.notes.add("num_blocks", num_blocks, reason)
        return num_blocks

    def _kv_bytes(self, other_bytes: int, most_useful: int) -> int:
        config, machine, gpu = self.config, self.machine, self.machine.gpu
        available = machine.available_memory if gpu is None else gpu.free_memory
        where = machine.memory_reason if gpu is None else "free GPU memory"
        free = int(available * config.memory_utilization) - other_bytes
        budget = f"{config.memory_utilization:.0%} of {format_bytes(available)} {where}"
        if config.kv_cache_memory is not None:
            kv_bytes = parse_bytes(config.kv_cache_memory, option="kv_cache_memory")
            if kv_bytes > free:
                raise CapacityError(
                    f"kv_cache_memory={config.kv_cache_memory!r} does not fit: {budget}, "
                    f"less {format_bytes(other_bytes)} "
                    f"for weights and workspace, leaves {format_bytes(max(0, free))}; lower "
                    "it, or free memory"
                )
            self.notes.add("kv_cache_memory", format_bytes(kv_bytes), "given")
            return kv_bytes
        if free <= 0:
            raise CapacityError(
                f"the model does not fit: weights and workspace need {format_bytes(other_bytes)}, "
                f"and {budget} is {format_bytes(available * config.memory_utilization)}; use a "
                "smaller model or dtype, quantization='int8' or 'int4', a lower max_num_seqs or "
                "max_num_batched_tokens, or free memory"
            )
        limits = [
            (free, f"what weights and workspace leave of {budget}"),
            (most_useful, "max_num_seqs sequences of the longest length need no more"),
        ]
        if gpu is None:
            limits.append((DEFAULT_MAX_KV_BYTES, "default limit; set kv_cache_memory for more"))
        kv_bytes, reason = min(limits)
        self.notes.add("kv_cache_memory", format_bytes(kv_bytes), reason)
        return kv_bytes

    def _max_model_len(self, longest: int, limits: SchedulerLimits, block_bytes: int) -> int:
        """`longest` is what the KV cache holds of it."""
        wanted, spec = self.config.max_model_len, self.spec
        if wanted is None:
            reason = (
                "the model's context" if longest == self.context_len else "what the KV cache holds"
            )
            self.notes.add("max_model_len", longest, reason)
            if longest < 1:
                raise CapacityError(
                    f"the KV cache holds no sequence at all; {limits.block_size} tokens need "
                    f"{format_bytes(len(limits.windows) * block_bytes)}: raise kv_cache_memory"
                )
            return longest
        if wanted > longest:
            needed = limits.num_blocks_for(wanted) * block_bytes
            raise CapacityError(
                f"max_model_len={wanted} needs {format_bytes(needed)} of KV cache, but it has "
                f"{format_bytes(limits.num_blocks * block_bytes)} ({longest} tokens); lower "
                "max_model_len to "
                f"{max(1, align_down(longest, 8))} or raise kv_cache_memory"
            )
        is_beyond = wanted > spec.max_context_len
        doubt = (
            f"; the model was made for {spec.max_context_len}, beyond which its answers may make "
            "no sense"
        )
        self.notes.add("max_model_len", wanted, "given" + doubt * is_beyond)
        return wanted

    def is_populated(self) -> bool:
        """Who names a size wants to have it: what the system lacks is noticed at once,
        and no request waits for its pages."""
        if self.machine.gpu is not None:
            return False  # a GPU's memory is taken when it is allocated
        chosen, is_given = self.config.populate_kv_cache, self.config.kv_cache_memory is not None
        is_populated = chosen == "on" or (chosen == "auto" and is_given)
        reason = (
            "given"
            if chosen != "auto"
            else "kv_cache_memory is given"
            if is_given
            else "the size is a default"
        )
        self.notes.add("populate_kv_cache", "on" if is_populated else "off", reason)
        return is_populated
