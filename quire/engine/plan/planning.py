"""From wishes to decisions: what an engine will use, computed before anything is allocated, each
with its reason.

`resolve` is a pure function of the user's config, the model's declaration and the machine. Its
outcome is printed by `quire plan` and followed exactly: no profiling run, no value that is
filled in later.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.common.gpu_bounds import MAX_PARTIAL_BYTES
from quire.common.graph_shapes import largest_size
from quire.common.kv_formats import KV_FORMATS, OTHER_NAMES
from quire.common.numbers import align_down, ceil_div, format_bytes, parse_bytes
from quire.config.engine import EngineConfig
from quire.config.limits import POLICIES, Policy, SchedulerLimits
from quire.core.step_cost import UnitCosts
from quire.engine.plan import attention, memory, ranks, speculation
from quire.engine.plan.adapters import AdapterPlan, plan_adapters
from quire.engine.plan.applicable import check_options
from quire.engine.plan.experts import ExpertPlan, plan_experts, suggesting
from quire.engine.plan.graphs import MIN_GRAPH_TOKENS, GraphPlan, KVGroups, plan_graphs
from quire.engine.plan.images import ImagePlan, plan_images
from quire.engine.plan.machine import Machine
from quire.engine.plan.speculation import DraftDeclaration, DraftPlan
from quire.engine.plan.step_costs import estimate
from quire.engine.plan.tiers import TierPlan, plan_tiers
from quire.errors import CapacityError, ConfigError
from quire.models.declaration import DecoderSpec
from quire.models.image_processing import ImageProcessing
from quire.models.kv_layout import KVLayout, lay_out
from quire.models.pooling import PoolingSpec
from quire.quant.formats import WeightFormats

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_SEQS = 256
LARGE_GPU_BYTES, LARGE_GPU_MAX_NUM_SEQS = 64 << 30, 1024
"""A GPU with so much memory holds the caches of more sequences,
all of which one reading of the weights serves."""
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_TARGET_STEP_MS = 200.0
"""On a CPU: a stream that gets five tokens a second is still read as fast as it comes."""
DEFAULT_MAX_NUM_PARTIAL_PREFILLS = 4
DEFAULT_MAX_KV_BYTES = 4 << 30
"""Where the user names no size, the KV cache is not made larger than this:
a laptop has other uses for its memory."""
GPU_CONTEXT_BYTES = 768 << 20
"""What torch's context, its libraries and the compiled kernels take of a GPU before any tensor.
Estimated, not measured."""
HALF = "float16"
"""A type of weights that no kernel computes in."""
CPU_OVERLAP_REASON = "the cores that would plan the next step are those that compute this one"


class Decision(NamedTuple):
    """One value and why it was chosen."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Everything that an engine is built from."""

    config: EngineConfig
    spec: DecoderSpec
    formats: WeightFormats
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    kv_format: str
    """One of `quire.common.kv_formats.KV_FORMATS`."""
    attention_module: str | None
    """The library whose attention a GPU computes with; None for the kernels here."""
    limits: SchedulerLimits
    step_costs: UnitCosts
    """What steps are estimated to cost."""
    pooling: PoolingSpec | None
    """What vectors are made of; None where the model makes none."""
    generates: bool
    """Whether the model makes text."""
    target_step_s: float | None
    """How long a step should take where outputs are streamed; None where it may take any time."""
    is_overlapped: bool
    """Whether each step is planned while the one before it is computed."""
    graphs: GraphPlan | None
    """Of steps that are recorded and replayed; None where every step is launched."""
    num_threads: int
    """Of each rank."""
    weight_bytes: int
    kv_layout: KVLayout
    kv_bytes_per_token: int
    """Of all groups of layers, as long as none has given anything back."""
    kv_bytes: int
    is_kv_populated: bool
    """Whether all of it is resident from the start."""
    workspace_bytes: int
    adapters: AdapterPlan | None
    """Room for adapters; None where none are served."""
    images: ImagePlan | None
    """How images are read; None where the model reads none."""
    draft: DraftPlan | None
    """A model that drafts beside it; None where none does."""
    experts: ExpertPlan | None
    """Which experts are in memory; None where all are, or there are none."""
    tiers: TierPlan | None
    """What is kept of the KV cache besides the pool; None where nothing is."""
    decisions: tuple[Decision, ...]

    @property
    def adapter_bytes(self) -> int:
        """Memory of adapters, at most."""
        return 0 if self.adapters is None else self.adapters.num_bytes

    @property
    def image_bytes(self) -> int:
        """Memory of encoded images, at most."""
        return 0 if self.images is None else self.images.num_bytes

    @property
    def total_bytes(self) -> int:
        """Memory at most: weights, KV cache, workspace, adapters, encoded images, a draft model."""
        kept = (self.adapters, self.images, self.draft, self.tiers)
        others = sum(each.num_bytes for each in kept if each is not None)
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes + others


def resolve(
    config: EngineConfig,
    spec: DecoderSpec,
    machine: Machine,
    formats: WeightFormats | None = None,
    pooling: PoolingSpec | None = None,
    *,
    generates: bool = True,
    processing: ImageProcessing | None = None,
    draft: DraftDeclaration | None = None,
) -> EnginePlan:
    """Decide. `formats` says which weights are integers, by default none; `pooling` what vectors
    are made of, `generates` whether the model makes text, `processing` what is done to images,
    `draft` is the model that drafts.

    Raises ConfigError, or CapacityError with the numbers, for what cannot work.
    """
    resolver = _Resolver(config, spec, machine, formats or WeightFormats())
    resolver.pooling, resolver.generates, resolver.processing = pooling, generates, processing
    resolver.draft = draft
    return resolver.plan()


class _Resolver:
    def __init__(
        self, config: EngineConfig, spec: DecoderSpec, machine: Machine, formats: WeightFormats
    ) -> None:
        self.config = config
        self.spec = spec
        self.machine = machine
        self.formats = formats
        self.gpu = machine.gpu if config.device == "cuda" else None
        self.decisions: list[Decision] = []
        self.pooling: PoolingSpec | None = None
        self.generates = True
        self.processing: ImageProcessing | None = None
        self.draft: DraftDeclaration | None = None

    def plan(self) -> EnginePlan:
        config, spec = self.config, self.spec
        self._begin()
        dtype = self._dtype()
        self._note_pooling()
        block_size, max_num_seqs = self._block_size(), self._max_num_seqs()
        num_batched = self._num_batched_tokens(max_num_seqs)
        num_threads = self._num_threads()
        self._note_quantization()
        num_cores = num_threads * config.tensor_parallel_size
        computing = replace(self.machine, num_cores=num_cores, gpu=self.gpu)
        experts = self._experts(dtype, num_threads)
        weight_bytes = self.formats.weight_bytes(spec, dtype)
        if experts is not None:
            weight_bytes -= experts.num_bytes_spared
        adapters = self._adapters(dtype)
        images = self._images(dtype, adapters is not None)
        kv_format, is_overlapped = self._kv_format(dtype), self._is_overlapped()
        layout = lay_out(spec.kv_layers, self._longest())
        block_bytes = layout.block_bytes(spec.kv_layers, kv_format, block_size)
        attention_module = self._attention(dtype, kv_format, block_size, layout)
        num_graph_tokens = largest_size(min(num_batched, max(max_num_seqs, MIN_GRAPH_TOKENS)))
        graphs = self._graphs(
            num_graph_tokens, len(layout.windows), block_bytes, block_size, attention_module
        )
        workspace_bytes = self._workspace_bytes(num_batched, max_num_seqs, adapters, images)
        if graphs is not None:
            # with the scratch block
            workspace_bytes += graphs.max_bytes + graphs.input_bytes + block_bytes
        limits = self._limits(block_size, max_num_seqs, num_batched)
        limits = replace(limits, windows=layout.windows, max_steps_in_flight=1 + is_overlapped)
        self._note_groups(layout, limits, block_bytes)
        tiers = self._tiers(len(layout.windows) * block_bytes)
        draft = self._draft(layout, limits, dtype, kv_format)
        if draft is not None:
            block_bytes += draft.block_bytes
        kept = (each for each in (adapters, images, draft, tiers) if each is not None)
        fixed_bytes = weight_bytes + workspace_bytes + sum(each.num_bytes for each in kept)
        with suggesting(config, spec, self.formats, computing, dtype, fixed_bytes):
            limits, kv_bytes = self._pool(limits, block_bytes, fixed_bytes)
        for decision in ranks.decisions(config, spec, self.formats, dtype):
            self._note(*decision)
        missed_s = 0.0 if experts is None else experts.missed_s
        step_costs = estimate(spec, self.formats, dtype, kv_format, computing)
        return EnginePlan(
            config=config,
            spec=spec,
            formats=self.formats,
            device="cpu" if self.gpu is None else "cuda",
            dtype=dtype,
            kv_format=kv_format,
            attention_module=attention_module,
            limits=limits,
            pooling=self.pooling,
            generates=self.generates,
            step_costs=step_costs._replace(step_s=step_costs.step_s + missed_s),
            target_step_s=self._target_step_s(),
            is_overlapped=is_overlapped,
            graphs=graphs,
            num_threads=num_threads,
            weight_bytes=weight_bytes,
            kv_layout=layout,
            kv_bytes_per_token=len(layout.windows) * block_bytes // block_size,
            kv_bytes=kv_bytes,
            is_kv_populated=self._is_kv_populated(),
            workspace_bytes=workspace_bytes,
            adapters=adapters,
            images=images,
            draft=draft,
            experts=experts,
            tiers=tiers,
            decisions=tuple(self.decisions),
        )

    def _num_threads(self) -> int:
        """Of one rank."""
        num_cores, reason = ranks.cores_of_each(self.machine, self.config.tensor_parallel_size)
        return self._given("num_threads", self.config.num_threads, num_cores, reason)

    def _tiers(self, place_bytes: int) -> TierPlan | None:
        tiers = plan_tiers(self.config, self.spec, place_bytes, self.gpu is None)
        if tiers is not None:
            self._note("kv_tiers", tiers.sizes, tiers.reason)
        return tiers

    def _draft(
        self, layout: KVLayout, limits: SchedulerLimits, dtype: str, kv_format: str
    ) -> DraftPlan | None:
        draft = speculation.plan_draft(self.config, self.draft, layout, limits, (dtype, kv_format))
        if draft is not None:
            self._note("draft_model", draft.spec.architecture, draft.reason)
        return draft

    def _begin(self) -> None:
        """Check what needs no numbers, and note what the rest depends on."""
        check_options(self.config, self.spec, generates=self.generates)
        self._note_device()
        self._note_invariance()
        for decision in speculation.decisions(self.config):
            self._note(*decision)

    def _workspace_bytes(
        self,
        num_batched: int,
        max_num_seqs: int,
        adapters: AdapterPlan | None,
        images: ImagePlan | None,
    ) -> int:
        """Return the temporary tensors of a step, but for those of recorded graphs."""
        num_bytes = memory.workspace_bytes(self.spec, num_batched, max_num_seqs)
        if self.gpu is not None:
            num_bytes += GPU_CONTEXT_BYTES + MAX_PARTIAL_BYTES
        if adapters is not None:
            num_bytes += memory.gate_bytes(self.spec)
        return num_bytes + (0 if images is None else images.workspace_bytes)

    def _pool(
        self, limits: SchedulerLimits, block_bytes: int, fixed_bytes: int
    ) -> tuple[SchedulerLimits, int]:
        """Return the limits with the blocks that memory leaves and the longest sequence that they
        hold, and the blocks' bytes."""
        longest, num_others = self._longest(), limits.max_num_seqs - 1
        most_useful = limits.num_blocks_for(longest) + num_others * limits.num_blocks_kept(longest)
        kv_bytes = self._kv_bytes(fixed_bytes, block_bytes * most_useful)
        num_blocks = self._num_blocks(kv_bytes, block_bytes, limits.max_num_seqs)
        limits = replace(limits, num_blocks=max(1, num_blocks))
        longest = limits.longest_len(longest) if num_blocks else 0
        max_model_len = self._max_model_len(longest, limits, block_bytes)
        return replace(limits, max_model_len=max_model_len), num_blocks * block_bytes

    def _block_size(self) -> int:
        if self.spec.is_encoder:
            return self._given("block_size", None, self._longest(), "nothing is kept of a text")
        reason = "a good compromise of waste and speed"
        return self._given("block_size", self.config.block_size, DEFAULT_BLOCK_SIZE, reason)

    def _num_blocks(self, kv_bytes: int, block_bytes: int, max_num_seqs: int) -> int:
        """Of an encoder, places for texts: its blocks hold nothing."""
        if self.spec.is_encoder:
            return max_num_seqs
        num_blocks = kv_bytes // block_bytes
        reason = f"{format_bytes(kv_bytes)} / {format_bytes(block_bytes)} a block"
        self._note("num_blocks", num_blocks, reason)
        return num_blocks

    def _note_pooling(self) -> None:
        if self.pooling is not None:
            for name, reason in self.pooling.sources:
                value, _, source = reason.partition(": ")
                self._note(name, value, source)

    @property
    def _has_chunks(self) -> bool:
        """Whether a prompt may be computed in pieces; an encoder needs all of it at once."""
        return self.config.enable_chunked_prefill and not self.spec.is_encoder

    def _limits(self, block_size: int, max_num_seqs: int, num_batched: int) -> SchedulerLimits:
        """Return the limits, but for what depends on how large the pool is."""
        config, most = (
            self.config,
            DEFAULT_MAX_NUM_PARTIAL_PREFILLS if self._has_chunks else 1,
        )
        reason = (
            "short prompts are computed beside a long one"
            if most > 1
            else "without chunked prefill none is partial"
        )
        num_partial = max(config.max_long_partial_prefills, most)
        return SchedulerLimits(
            num_blocks=1,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=num_batched,
            max_model_len=self._longest(),
            policy=_policy(config.scheduling_policy),
            enable_prefix_caching=config.enable_prefix_caching and not self.spec.is_encoder,
            enable_chunked_prefill=self._has_chunks,
            max_num_partial_prefills=self._given(
                "max_num_partial_prefills", config.max_num_partial_prefills, num_partial, reason
            ),
            max_long_partial_prefills=config.max_long_partial_prefills,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
        )

    def _target_step_s(self) -> float | None:
        given, default = self.config.target_step_ms, DEFAULT_TARGET_STEP_MS
        reason = (
            "default for streamed outputs on a CPU: running streams do not stop for a long prompt"
        )
        if given is not None:
            default, reason = given, "given"
        elif self.gpu is not None:
            default, reason = 0.0, "a GPU's steps are short"
        elif not self._has_chunks:
            default, reason = 0.0, "without chunked prefill each prompt is computed in one step"
        self._note("target_step_ms", f"{default:g}" if default else "off", reason)
        return default / 1000.0 if default else None

    def _adapters(self, dtype: str) -> AdapterPlan | None:
        adapters = plan_adapters(self.config, self.spec, dtype)
        if adapters is None:
            return None
        if self.gpu is not None:
            raise ConfigError(
                "enable_lora=True is for the CPU as yet: the GPU's kernels have no products for "
                "adapters; leave it out, or take device='cpu'"
            )
        self._note("adapters", format_bytes(adapters.num_bytes), adapters.reason)
        return adapters

    def _note_quantization(self) -> None:
        if self.formats.has_integers:
            form = self.config.quantize_to or "as the checkpoint"
            self._note("quantization", form, self.formats.summary)

    def _experts(self, dtype: str, num_threads: int) -> ExpertPlan | None:
        experts = plan_experts(self.config, self.spec, self.formats, dtype, num_threads)
        if experts is not None:
            self._note("expert_memory", format_bytes(experts.num_bytes), experts.reason)
        return experts

    def _images(self, dtype: str, has_adapters: bool) -> ImagePlan | None:
        images = plan_images(self.config, self.spec, self.processing, dtype, self._longest())
        if images is None:
            return None
        if self.gpu is not None or has_adapters:
            beside = "a GPU" if self.gpu is not None else "adapters"
            raise ConfigError(
                f"{self.spec.architecture} reads images, which is not available with {beside} yet; "
                "take device='cpu' without enable_lora"
            )
        self._note("image_cache_memory", format_bytes(images.num_bytes), images.reason)
        return images

    def _note(self, name: str, value: object, reason: str) -> None:
        self.decisions.append(Decision(name, str(value), reason))

    def _given(self, name: str, value: int | None, default: int, reason: str) -> int:
        self._note(name, default if value is None else value, reason if value is None else "given")
        return default if value is None else value

    def _note_device(self) -> None:
        if self.gpu is not None:
            self._note(
                "device",
                "cuda",
                f"given; {self.gpu.name}, {format_bytes(self.gpu.free_memory)} free",
            )
        elif self.config.device == "auto":
            self._note(
                "device",
                "cpu",
                (
                    "default: the GPU kernels have not been tried on a GPU yet; device=cuda asks "
                    "for one"
                ),
            )
        else:
            self._note("device", "cpu", "given")

    def _note_groups(self, layout: KVLayout, limits: SchedulerLimits, block_bytes: int) -> None:
        """What windows spare, where there are any."""
        if layout.windows == (None,):
            return
        longest, windows = self._longest(), Counter(layout.windows)
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
        self._note(
            "kv_groups", f"{len(layout.windows)} groups of {layout.num_places} layers", reason
        )

    def _is_overlapped(self) -> bool:
        given, is_on = self.config.overlap, self.gpu is not None
        reason = "the GPU computes while the next step is planned" if is_on else CPU_OVERLAP_REASON
        if given != "auto":
            is_on, reason = given == "on", "given"
        self._note("overlap", "on" if is_on else "off", reason)
        return is_on

    def _note_invariance(self) -> None:
        if self.config.batch_invariant:
            self._note(
                "batch_invariant",
                True,
                "own products and attention, whose bits do not depend on the batch",
            )
        elif self.gpu is None:
            self._note(
                "batch_invariant",
                True,
                "the CPU kernels are at no cost, so switching it off changes nothing",
            )
        else:
            self._note(
                "batch_invariant",
                False,
                "given; torch's products may serve many rows, as the tuning file says",
            )

    def _graphs(
        self,
        num_tokens: int,
        num_groups: int,
        block_bytes: int,
        block_size: int,
        attention_module: str | None,
    ) -> GraphPlan | None:
        reason = (
            "the CPU has none"
            if self.gpu is None
            else "given: enforce_eager"
            if self.config.enforce_eager
            else None
        )
        if reason is None and attention_module is not None:
            reason = (
                "the attention of a library plans each step on the host, which a graph would not "
                "repeat"
            )
        if reason is not None:
            self._note("graphs", "off", reason)
            return None
        kept = KVGroups(num_groups, block_bytes, block_size)
        graphs, reason = plan_graphs(self.spec, num_tokens, self._longest(), kept)
        self._note("graphs", f"steps of up to {num_tokens} tokens", reason)
        return graphs

    def _dtype(self) -> str:
        config, spec = self.config, self.spec
        if config.dtype not in ("auto", HALF):
            self._note("dtype", config.dtype, "given")
            return config.dtype
        if HALF in (config.dtype, spec.dtype):
            where = "given was" if config.dtype == HALF else "the checkpoint is"
            reason = (
                f"{where} {HALF}, which the kernels do not compute in; dtype=float32 would be exact"
            )
            self._note("dtype", "bfloat16", reason)
            return "bfloat16"
        self._note("dtype", spec.dtype, "as the checkpoint")
        return spec.dtype

    def _kv_format(self, dtype: str) -> str:
        given = self.config.kv_cache_dtype
        chosen = dtype if given == "auto" else OTHER_NAMES.get(given, given)
        odd = [layer.head_dim for layer in self.spec.kv_layers if layer.head_dim % 4]
        if self.gpu is not None and KV_FORMATS[chosen].scale_bytes and odd:
            raise ConfigError(
                f"kv_cache_dtype={given!r} on a GPU needs heads of whole fours, not of "
                f"{odd[0]}; leave it at 'auto'"
            )
        self._note("kv_cache_dtype", chosen, "as the compute dtype" if given == "auto" else "given")
        return chosen

    def _attention(
        self, dtype: str, kv_format: str, block_size: int, layout: KVLayout
    ) -> str | None:
        """Return the module of the library that was chosen."""
        wish = self.config.attention_backend
        if self.gpu is None:
            if wish not in ("auto", attention.OWN):
                raise ConfigError(
                    f"attention_backend={wish!r} is for GPUs; leave it at 'auto', or ask for "
                    "device='cuda'"
                )
            return None
        sizes = frozenset(layer.head_dim for layer in self.spec.kv_layers)
        needs = attention.AttentionNeeds(
            dtype,
            kv_format,
            block_size,
            sizes,
            self.gpu.capability,
            is_invariant=self.config.batch_invariant,
            has_windows=layout.windows != (None,),
            has_sinks=any(each.sinks is not None for each in self.spec.attentions),
        )
        name, reason = attention.choose(wish, needs)
        self._note("attention_backend", name, reason)
        return None if name == attention.OWN else attention.module_for(name, needs)

    def _max_num_seqs(self) -> int:
        default, reason = DEFAULT_MAX_NUM_SEQS, "default"
        if self.gpu is not None and self.gpu.total_memory >= LARGE_GPU_BYTES:
            default, reason = (
                LARGE_GPU_MAX_NUM_SEQS,
                f"default for a GPU of {format_bytes(LARGE_GPU_BYTES)} or more",
            )
        budget = self.config.max_num_batched_tokens
        if budget is not None and budget < default:
            default, reason = budget, "no more than tokens of a step"
        return self._given("max_num_seqs", self.config.max_num_seqs, default, reason)

    def _num_batched_tokens(self, max_num_seqs: int) -> int:
        given = self.config.max_num_batched_tokens
        default = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs)
        if self._has_chunks or (given or default) >= self._longest():
            return self._given("max_num_batched_tokens", given, default, "default")
        reason = "without chunked prefill the longest prompt must fit one step"
        self._note("max_num_batched_tokens", self._longest(), reason)
        return self._longest()

    def _longest(self) -> int:
        """Return the longest sequence that the user, or else the model, has in mind."""
        return self.config.max_model_len or self._context_len

    @property
    def _context_len(self) -> int:
        """The model's, or what its folder says of the texts that vectors are made of."""
        said = None if self.pooling is None or self.generates else self.pooling.max_len
        return self.spec.context_len if said is None else min(said, self.spec.context_len)

    def _kv_bytes(self, other_bytes: int, most_useful: int) -> int:
        config = self.config
        available = self.machine.available_memory if self.gpu is None else self.gpu.free_memory
        where = self.machine.memory_reason if self.gpu is None else "free GPU memory"
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
            self._note("kv_cache_memory", format_bytes(kv_bytes), "given")
            return kv_bytes
        if free <= 0:
            raise CapacityError(
                "the model does not fit: weights and workspace need "
                f"{format_bytes(other_bytes)}, and {budget} is "
                f"{format_bytes(available * config.memory_utilization)}; use a smaller model or "
                "dtype, quantization='int8' or 'int4', or free memory"
            )
        limits = [
            (free, f"what weights and workspace leave of {budget}"),
            (most_useful, "max_num_seqs sequences of the longest length need no more"),
        ]
        if self.gpu is None:
            limits.append((DEFAULT_MAX_KV_BYTES, "default limit; set kv_cache_memory for more"))
        kv_bytes, reason = min(limits)
        self._note("kv_cache_memory", format_bytes(kv_bytes), reason)
        return kv_bytes

    def _is_kv_populated(self) -> bool:
        """Who names a size wants to have it: what the system lacks is noticed at once,
        and no request waits for its pages."""
        if self.gpu is not None:
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
        self._note("populate_kv_cache", "on" if is_populated else "off", reason)
        return is_populated

    def _max_model_len(self, longest: int, limits: SchedulerLimits, block_bytes: int) -> int:
        """`longest` is what the KV cache holds of it."""
        wanted, spec = self.config.max_model_len, self.spec
        if wanted is None:
            reason = (
                "the model's context" if longest == self._context_len else "what the KV cache holds"
            )
            self._note("max_model_len", longest, reason)
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
        self._note("max_model_len", wanted, "given" + doubt * is_beyond)
        return wanted


def _policy(name: str) -> Policy:
    for policy in POLICIES:
        if name == policy:
            return policy
    raise ConfigError(f"scheduling_policy={name!r} is unknown; use one of {', '.join(POLICIES)}")
