"""From wishes to decisions: what an engine will use, computed before anything is allocated, each
with its reason.

`resolve` is a pure function of the user's config, the model's declaration and the machine. Its
outcome is printed by `quire plan` and followed exactly: no profiling run, no value that is
filled in later.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from quire.common.gpu_bounds import MAX_PARTIAL_BYTES
from quire.common.graph_shapes import largest_size
from quire.common.numbers import format_bytes
from quire.common.platforms import find_platform
from quire.config.engine import EngineConfig
from quire.config.limits import POLICIES, Policy, SchedulerLimits
from quire.core.step_cost import UnitCosts
from quire.engine.plan import attention, memory, ranks, replicas, speculation
from quire.engine.plan.adapters import AdapterPlan, plan_adapters
from quire.engine.plan.applicable import check_options
from quire.engine.plan.engine_plan import EnginePlan, Notes
from quire.engine.plan.experts import ExpertPlan, plan_experts, suggesting
from quire.engine.plan.graphs import MIN_GRAPH_TOKENS, GraphPlan, KVGroups, plan_graphs
from quire.engine.plan.kv_memory import KVPlanner
from quire.engine.plan.machine import Machine
from quire.engine.plan.speculation import DraftDeclaration, DraftPlan
from quire.engine.plan.step_costs import estimate
from quire.engine.plan.tiers import TierPlan, plan_tiers
from quire.engine.plan.transfers import TransferPlan, plan_transfers
from quire.errors import ConfigError
from quire.models.declaration import DecoderSpec
from quire.models.kv_layout import KVLayout, lay_out
from quire.quant.formats import WeightFormats

if TYPE_CHECKING:
    from quire.engine.plan.images import ImagePlan
    from quire.models.image_processing import ImageProcessing
    from quire.models.pooling import PoolingSpec

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_SEQS = 256
LARGE_GPU_BYTES, LARGE_GPU_MAX_NUM_SEQS = 64 << 30, 1024
"""A GPU with so much memory holds the caches of more sequences,
all of which one reading of the weights serves."""
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_TARGET_STEP_MS = 200.0
"""On a CPU: a stream that gets five tokens a second is still read as fast as it comes."""
DEFAULT_MAX_NUM_PARTIAL_PREFILLS = 4
GPU_CONTEXT_BYTES = 768 << 20
"""What torch's context, its libraries and the compiled kernels take of a GPU before any tensor.
Estimated, not measured."""
HALF = "float16"
"""A type of weights that no kernel computes in."""
CPU_OVERLAP_REASON = "the cores that would plan the next step are those that compute this one"


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


class _StepSizes(NamedTuple):
    """What a step computes in, and at most."""

    dtype: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    """Of one rank."""


class _Resolver:
    def __init__(
        self, config: EngineConfig, spec: DecoderSpec, machine: Machine, formats: WeightFormats
    ) -> None:
        self.config = config
        self.spec = spec
        machine = replicas.share_of(machine, config)
        self.machine = machine if config.device == "cuda" else replace(machine, gpu=None)
        self.gpu = self.machine.gpu
        self.formats = formats
        self._notes = Notes()
        self.pooling: PoolingSpec | None = None
        self.generates = True
        self.processing: ImageProcessing | None = None
        self.draft: DraftDeclaration | None = None

    def plan(self) -> EnginePlan:
        config, spec = self.config, self.spec
        self._begin()
        sizes = self._sizes()
        dtype, block_size, num_threads = sizes.dtype, sizes.block_size, sizes.num_threads
        computing = replace(self.machine, num_cores=num_threads * config.num_processes)
        experts = self._experts(dtype, num_threads)
        weight_bytes = self.formats.weight_bytes(spec, dtype)
        weight_bytes -= 0 if experts is None else experts.num_bytes_spared
        adapters, images = self._adapters(dtype), self._images(dtype)
        lengths = self._context_len, self._longest()
        kv = KVPlanner(config, spec, self.machine, self._notes, *lengths)
        kv_format, is_overlapped = kv.format(dtype), self._is_overlapped()
        layout = lay_out(spec.kv_layers, self._longest())
        block_bytes = layout.block_bytes(spec.kv_layers, kv_format, block_size)
        attention_module = self._attention(dtype, kv_format, block_size, layout)
        groups = KVGroups(len(layout.windows), block_bytes, block_size)
        graphs = self._graphs(sizes, groups, attention_module)
        workspace_bytes = self._workspace_bytes(sizes, adapters, images, graphs)
        limits = self._limits(sizes, layout, is_overlapped=is_overlapped)
        self._check_images(images, limits)
        kv.note_groups(layout, limits, block_bytes)
        tiers, transfers = self._tiers(kv_format, groups.num * block_bytes), self._transfers()
        draft = self._draft(layout, limits, dtype, kv_format)
        block_bytes += 0 if draft is None else draft.block_bytes
        kept = (each for each in (adapters, images, draft, tiers, transfers) if each is not None)
        fixed_bytes = weight_bytes + workspace_bytes + sum(each.num_bytes for each in kept)
        with suggesting(config, spec, self.formats, computing, dtype, fixed_bytes):
            limits, kv_bytes = kv.pool(limits, block_bytes, fixed_bytes)
        self._notes.extend(ranks.decisions(config, spec, self.formats, dtype))
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
            step_costs=self._step_costs(dtype, kv_format, computing, experts),
            target_step_s=self._target_step_s(),
            is_overlapped=is_overlapped,
            graphs=graphs,
            num_threads=num_threads,
            weight_bytes=weight_bytes,
            kv_layout=layout,
            kv_bytes_per_token=groups.num * block_bytes // block_size,
            kv_bytes=kv_bytes,
            is_kv_populated=kv.is_populated(),
            workspace_bytes=workspace_bytes,
            adapters=adapters,
            images=images,
            draft=draft,
            experts=experts,
            tiers=tiers,
            transfers=transfers,
            decisions=tuple(self._notes.decisions),
        )

    def _sizes(self) -> _StepSizes:
        """Decide what is computed in, and how much of it in a step."""
        dtype = self._dtype()
        self._note_pooling()
        block_size, max_num_seqs = self._block_size(), self._max_num_seqs()
        num_batched = self._num_batched_tokens(max_num_seqs)
        num_threads = self._num_threads()
        self._note_quantization()
        return _StepSizes(dtype, block_size, max_num_seqs, num_batched, num_threads)

    def _step_costs(
        self, dtype: str, kv_format: str, machine: Machine, experts: ExpertPlan | None
    ) -> UnitCosts:
        """Estimate steps on the cores that compute, with the reading of experts that are not in
        memory."""
        costs = estimate(self.spec, self.formats, dtype, kv_format, machine)
        return costs if experts is None else costs._replace(step_s=costs.step_s + experts.missed_s)

    def _num_threads(self) -> int:
        """Of one rank."""
        num_cores, reason = ranks.cores_of_each(self.machine, self.config.num_processes)
        return self._notes.given("num_threads", self.config.num_threads, num_cores, reason)

    def _tiers(self, kv_format: str, place_bytes: int) -> TierPlan | None:
        tiers = plan_tiers(self.config, self.spec, kv_format, place_bytes, self.gpu is None)
        if tiers is not None:
            self._notes.add("kv_tiers", tiers.sizes, tiers.reason)
        return tiers

    def _transfers(self) -> TransferPlan | None:
        transfers = plan_transfers(self.config, self.spec, self.gpu is None)
        if transfers is not None:
            self._notes.add("kv_transfer", transfers.config.kv_role, transfers.reason)
        return transfers

    def _draft(
        self, layout: KVLayout, limits: SchedulerLimits, dtype: str, kv_format: str
    ) -> DraftPlan | None:
        draft = speculation.plan_draft(self.config, self.draft, layout, limits, (dtype, kv_format))
        if draft is not None:
            self._notes.add("draft_model", draft.spec.architecture, draft.reason)
        return draft

    def _begin(self) -> None:
        """Check what needs no numbers, and note what the rest depends on."""
        check_options(self.config, self.spec, generates=self.generates)
        self._note_device()
        if config_platform := self.config.platform:
            label = find_platform(config_platform).label
            self._notes.add("platform", config_platform, f"its kernels compute: {label}")
        self._note_invariance()
        self._notes.extend(speculation.decisions(self.config))
        self._notes.extend(replicas.decisions(self.config))

    def _workspace_bytes(
        self,
        sizes: _StepSizes,
        adapters: AdapterPlan | None,
        images: ImagePlan | None,
        graphs: GraphPlan | None,
    ) -> int:
        """Return the temporary tensors of a step, and what recorded graphs take."""
        num_batched, max_num_seqs = sizes.max_num_batched_tokens, sizes.max_num_seqs
        num_bytes = memory.workspace_bytes(self.spec, num_batched, max_num_seqs)
        if self.gpu is not None:
            num_bytes += GPU_CONTEXT_BYTES + MAX_PARTIAL_BYTES
        if adapters is not None:
            num_bytes += memory.gate_bytes(self.spec)
        num_bytes += 0 if graphs is None else graphs.num_bytes
        return num_bytes + (0 if images is None else images.workspace_bytes)

    def _block_size(self) -> int:
        if self.spec.is_encoder:
            return self._notes.given(
                "block_size", None, self._longest(), "nothing is kept of a text"
            )
        reason = "a good compromise of waste and speed"
        return self._notes.given("block_size", self.config.block_size, DEFAULT_BLOCK_SIZE, reason)

    def _note_pooling(self) -> None:
        if self.pooling is not None:
            for name, reason in self.pooling.sources:
                value, _, source = reason.partition(": ")
                self._notes.add(name, value, source)

    @property
    def _has_chunks(self) -> bool:
        """Whether a prompt may be computed in pieces; an encoder needs all of it at once."""
        return self.config.enable_chunked_prefill and not self.spec.is_encoder

    def _limits(
        self, sizes: _StepSizes, layout: KVLayout, *, is_overlapped: bool
    ) -> SchedulerLimits:
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
            block_size=sizes.block_size,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=self._longest(),
            policy=_policy(config.scheduling_policy),
            enable_prefix_caching=config.enable_prefix_caching and not self.spec.is_encoder,
            enable_chunked_prefill=self._has_chunks,
            max_num_partial_prefills=self._notes.given(
                "max_num_partial_prefills", config.max_num_partial_prefills, num_partial, reason
            ),
            max_long_partial_prefills=config.max_long_partial_prefills,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            windows=layout.windows,
            max_steps_in_flight=1 + is_overlapped,
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
        self._notes.add("target_step_ms", f"{default:g}" if default else "off", reason)
        return default / 1000.0 if default else None

    def _adapters(self, dtype: str) -> AdapterPlan | None:
        adapters = plan_adapters(self.config, self.spec, dtype, self.pooling)
        if adapters is None:
            return None
        if self.gpu is not None:
            raise ConfigError(
                "enable_lora=True is for the CPU as yet: the GPU's kernels have no products for "
                "adapters; leave it out, or take device='cpu'"
            )
        self._notes.add("adapters", format_bytes(adapters.num_bytes), adapters.reason)
        return adapters

    def _note_quantization(self) -> None:
        if self.formats.has_integers:
            form = self.config.quantize_to or "as the checkpoint"
            self._notes.add("quantization", form, self.formats.summary)

    def _experts(self, dtype: str, num_threads: int) -> ExpertPlan | None:
        experts = plan_experts(self.config, self.spec, self.formats, dtype, num_threads)
        if experts is not None:
            self._notes.add("expert_memory", format_bytes(experts.num_bytes), experts.reason)
        return experts

    def _images(self, dtype: str) -> ImagePlan | None:
        if self.spec.vision is None:
            return None
        from quire.engine.plan.images import plan_images

        images = plan_images(self.config, self.spec, self.processing, dtype, self._longest())
        if self.gpu is not None:
            raise ConfigError(
                f"{self.spec.architecture} reads images, which is not available on a GPU yet; take "
                "device='cpu'"
            )
        self._notes.add("image_cache_memory", format_bytes(images.num_bytes), images.reason)
        return images

    def _check_images(self, images: ImagePlan | None, limits: SchedulerLimits) -> None:
        if images is not None and self.spec.vision is not None:
            from quire.engine.plan.images import check_undivided

            check_undivided(self.spec.vision, images.max_places, limits)

    def _note_device(self) -> None:
        if self.gpu is not None:
            self._notes.add(
                "device",
                "cuda",
                f"given; {self.gpu.name}, {format_bytes(self.gpu.free_memory)} free",
            )
        elif self.config.device == "auto":
            self._notes.add(
                "device",
                "cpu",
                (
                    "default: the GPU kernels have not been tried on a GPU yet; device=cuda asks "
                    "for one"
                ),
            )
        else:
            self._notes.add("device", "cpu", "given")

    def _is_overlapped(self) -> bool:
        given, is_on = self.config.overlap, self.gpu is not None
        reason = "the GPU computes while the next step is planned" if is_on else CPU_OVERLAP_REASON
        if given != "auto":
            is_on, reason = given == "on", "given"
        self._notes.add("overlap", "on" if is_on else "off", reason)
        return is_on

    def _note_invariance(self) -> None:
        if self.config.batch_invariant:
            self._notes.add(
                "batch_invariant",
                True,
                "own products and attention, whose bits do not depend on the batch",
            )
        elif self.gpu is None:
            self._notes.add(
                "batch_invariant",
                True,
                "the CPU kernels are at no cost, so switching it off changes nothing",
            )
        else:
            self._notes.add(
                "batch_invariant",
                False,
                "given; torch's products may serve many rows, as the tuning file says",
            )

    def _graphs(
        self, sizes: _StepSizes, groups: KVGroups, attention_module: str | None
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
            self._notes.add("graphs", "off", reason)
            return None
        most = max(sizes.max_num_seqs, MIN_GRAPH_TOKENS)
        num_tokens = largest_size(min(sizes.max_num_batched_tokens, most))
        graphs, reason = plan_graphs(self.spec, num_tokens, self._longest(), groups)
        self._notes.add("graphs", f"steps of up to {num_tokens} tokens", reason)
        return graphs

    def _dtype(self) -> str:
        config, spec = self.config, self.spec
        if config.dtype not in ("auto", HALF):
            self._notes.add("dtype", config.dtype, "given")
            return config.dtype
        if HALF in (config.dtype, spec.dtype):
            where = "given was" if config.dtype == HALF else "the checkpoint is"
            reason = (
                f"{where} {HALF}, which the kernels do not compute in; dtype=float32 would be exact"
            )
            self._notes.add("dtype", "bfloat16", reason)
            return "bfloat16"
        self._notes.add("dtype", spec.dtype, "as the checkpoint")
        return spec.dtype

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
        self._notes.add("attention_backend", name, reason)
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
        return self._notes.given("max_num_seqs", self.config.max_num_seqs, default, reason)

    def _num_batched_tokens(self, max_num_seqs: int) -> int:
        given = self.config.max_num_batched_tokens
        default = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs)
        if self._has_chunks or (given or default) >= self._longest():
            return self._notes.given("max_num_batched_tokens", given, default, "default")
        reason = "without chunked prefill the longest prompt must fit one step"
        self._notes.add("max_num_batched_tokens", self._longest(), reason)
        return self._longest()

    def _longest(self) -> int:
        """Return the longest sequence that the user, or else the model, has in mind."""
        return self.config.max_model_len or self._context_len

    @property
    def _context_len(self) -> int:
        """The model's, or what its folder says of the texts that vectors are made of."""
        said = None if self.pooling is None or self.generates else self.pooling.max_len
        return self.spec.context_len if said is None else min(said, self.spec.context_len)


def _policy(name: str) -> Policy:
    for policy in POLICIES:
        if name == policy:
            return policy
    raise ConfigError(f"scheduling_policy={name!r} is unknown; use one of {', '.join(POLICIES)}")
