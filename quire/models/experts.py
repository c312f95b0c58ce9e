"""What families with mixtures of experts have in common: reading how experts are chosen, and the
names of their weights."""

from __future__ import annotations

from typing import Literal, NamedTuple

from quire.common.frozen_record import FrozenRecord, replace
from quire.models.blocks import ExpertsSpec, MlpSpec
from quire.models.config_reader import ConfigReader
from quire.models.dimensions import read_windows
from quire.models.tensors import LinearSpec, StackedPlace, TensorSpec, linear
from quire.program.operations import Activation, Routing

Scoring = Literal["softmax", "sigmoid"]


class RoutingDefaults(NamedTuple):
    """What a family's config may leave out."""

    experts: tuple[int, int]
    """There are, and are chosen."""
    groups: tuple[int, int]
    factor: float


MAX_EXPERTS = 4096
"""In a layer; more is a mistake in a config, and would take minutes to declare."""


class ExpertNames(FrozenRecord):
    """What a checkpoint calls things within a mixture of experts."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def read_routing(
    config: ConfigReader, key: str, defaults: tuple[int, int], *, is_normalised: bool
) -> Routing:
    """Read how many experts there are (`key`), of which `num_experts_per_tok` are chosen."""
    num_experts = config.integer(key, defaults[0], maximum=MAX_EXPERTS)
    num_chosen = config.integer("num_experts_per_tok", defaults[1])
    if num_chosen > num_experts:
        raise config.refuse("num_experts_per_tok", f"at most the {num_experts} of {key}")
    return Routing(num_experts, num_chosen, is_normalised)


_GROUP_VALUES: dict[str, Literal["best", "best_two"]] = {
    "group_limited_greedy": "best",
    "noaux_tc": "best_two",
}


def read_grouped_routing(
    config: ConfigReader, scoring: Scoring, defaults: RoutingDefaults
) -> Routing:
    """Read DeepSeek's routing: "greedy" chooses among all experts, "group_limited_greedy" (V2) and
    "noaux_tc" (V3) among those of the best groups."""
    config.choice("scoring_func", {scoring: scoring}, scoring)
    methods = ("greedy", "group_limited_greedy") if scoring == "softmax" else ("noaux_tc",)
    method = config.choice("topk_method", {name: name for name in methods}, methods[0])
    plain = read_routing(
        config, "n_routed_experts", defaults.experts, is_normalised=scoring == "sigmoid"
    )
    if scoring == "sigmoid":
        plain = replace(plain, is_normalised=config.flag("norm_topk_prob", True))
    else:
        config.require("norm_topk_prob", False)  # published files do without; rules for it differ
    plain = replace(
        plain, scoring=scoring, factor=config.number("routed_scaling_factor", defaults.factor)
    )
    if method == "greedy":
        config.ignore("n_group", "topk_group")
        return plain
    routing = replace(
        plain,
        num_groups=config.integer("n_group", defaults.groups[0], maximum=plain.num_experts),
        num_groups_chosen=config.integer("topk_group", defaults.groups[1]),
        group_value=_GROUP_VALUES[method],
    )
    return _checked_groups(config, routing)


def _checked_groups(config: ConfigReader, routing: Routing) -> Routing:
    """Refuse groups that cannot be, or that are too few for the experts to be chosen."""
    num_groups, num_experts = routing.num_groups, routing.num_experts
    if num_groups == 1 and routing.num_groups_chosen == 1:
        return replace(routing, group_value="best")
    smallest = 1 if routing.group_value == "best" else 2
    if num_experts % num_groups or routing.group_size < smallest:
        raise config.refuse(
            "n_group",
            f"divisors of the {num_experts} experts that leave {smallest} or more to a group",
        )
    if routing.num_groups_chosen > num_groups:
        raise config.refuse("topk_group", f"at most the {num_groups} of n_group")
    if not routing.is_possible:
        most = routing.num_groups_chosen * routing.group_size
        raise config.refuse("num_experts_per_tok", f"at most the {most} experts of topk_group")
    return routing


def require_full_attention(config: ConfigReader, num_layers: int) -> None:
    """Refuse windows: no sparse Qwen model that is published has any, and transformers' rule for
    them differs from one family to the next."""
    config.require("use_sliding_window", False)
    config.ignore("sliding_window", "max_window_layers")  # of no effect without it
    read_windows(config, ("full_attention",) * num_layers, None)


def read_sparse_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Read which layers have experts: every `decoder_sparse_step`th, without
    `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.integers("mlp_only_layers", num_layers - 1)
    return tuple((index + 1) % step == 0 and index not in dense for index in range(num_layers))


def experts(
    at: str,
    hidden: int,
    inner: int,
    routing: Routing,
    activation: Activation,
    names: ExpertNames | None = None,
    stacked_at: str | None = None,
) -> ExpertsSpec:
    """Declare a router `at.gate`, and experts `at.experts.0`, ...

    Newer files may keep all experts in two tensors under `stacked_at`.experts (by default `at`):
    `gate_up_proj` [E, 2 * F, H] and `down_proj` [E, H, F].
    """
    names = names or ExpertNames()
    count, stacked_at = routing.num_experts, stacked_at or at
    share = routing.num_chosen / count

    # Models have tens of thousands of these, which `replace` would take seconds to make.
    def part(name: str, inputs: int, outputs: int, place: StackedPlace) -> LinearSpec:
        weight = TensorSpec(f"{name}.weight", (outputs, inputs), other_place=place)
        return LinearSpec(weight, share=share)

    def expert(index: int) -> MlpSpec:
        name = f"{at}.experts.{index}"
        gate = StackedPlace(
            f"{stacked_at}.experts.gate_up_proj", (count, 2 * inner, hidden), index * 2 * inner
        )
        up = StackedPlace(gate.name, gate.shape, gate.first_row + inner)
        down = StackedPlace(
            f"{stacked_at}.experts.down_proj", (count, hidden, inner), index * hidden
        )
        return MlpSpec(
            part(f"{name}.{names.gate}", hidden, inner, gate),
            part(f"{name}.{names.up}", hidden, inner, up),
            part(f"{name}.{names.down}", inner, hidden, down),
            activation,
        )

    router = replace(linear(f"{at}.gate", hidden, count), keeps_floats=True)
    if stacked_at != at:
        place = StackedPlace(f"{stacked_at}.gate.weight", router.weight.shape, 0)
        router = replace(router, weight=replace(router.weight, other_place=place))
    return ExpertsSpec(router, tuple(map(expert, range(count))), routing)
