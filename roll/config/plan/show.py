"""Prints a plan on the terminal: its roles, its arithmetic, the keys that determine its training, and the memory of a
device in each phase of a step. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from roll.config.derived.batch import BatchPlan, age_limit, has_pairs, learner, row_learner, sequences_per_update
from roll.config.derived.domains import environment_of
from roll.config.derived.fixed_roles import reward_roles
from roll.config.derived.placement import RolePlan, judged_in_turn
from roll.config.plan.advice import advice_lines
from roll.config.plan.phases import Phase, misfits, phases
from roll.config.plan.plan import Plan
from roll.config.plan.speed import speed_lines
from roll.config.plan.sync import sync_lines
from roll.config.schema.curriculum import CurriculumConfig, GroupReplayConfig
from roll.config.schema.environments import EnvironmentConfig
from roll.config.schema.offline import DpoConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.secrets import redacted
from roll.system.ranges import ranges
from roll.system.sizes import GIB

MODEL = (
    "lora_target", "lora_rank", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights",
    "quantized_base", "dtype", "gradient_checkpointing", "attn_implementation",
)  # fmt: skip
ADAPTER = MODEL[1:8]
"""Keys that have no effect if all weights are trained."""
ZERO = ("stage", "offload_optimizer", "offload_optimizer.device", "offload_param", "offload_param.device")
TRAINING = (
    "optimizer", "learning_rate", "lora_learning_rate", "loraplus_lr_ratio", "lr_scheduler_type", "warmup_steps",
    "warmup_ratio", "weight_decay",
)  # fmt: skip
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "seeded")
RLVR: Mapping[str, Sequence[str]] = {
    "Advantages": (
        "adv_estimator", "gamma", "norm_mean_type", "norm_std_type", "whiten_advantages", "dynamic_sampling",
    ),
    "Loss": (
        "policy_loss", "pg_clip", "pg_clip_low", "pg_clip_high", "dual_clip_loss", "loss_agg_mode",
        "entropy_loss_coef", "ppo_epochs",
    ),
    "Correction": ("behaviour_log_probs", "mismatch_correction", "mismatch_cap"),
    "KL": (
        "use_kl_loss", "kl_loss_coef", "kl_loss_type", "add_token_level_kl", "init_kl_coef", "kl_penalty",
        "target_kl",
    ),
}  # fmt: skip
OTHERS: Mapping[str, Sequence[str]] = {
    "Loss": (
        "loss_on", "preference_loss", "beta", "label_smoothing", "simpo_gamma", "reference_log_probs",
        "divergence", "temperature",
    ),
}  # fmt: skip
"""Keys to show for offline pipelines."""
COMMON: Mapping[str, Sequence[str]] = {
    "Steps": ("save_steps", "eval_steps", "seed", "max_grad_norm", "resume_from_checkpoint"),
    "Trackers": ("track_with",),
}
ELSEWHERE = ("exp_name", "output_dir", "pipeline", "dry_run", "max_steps")
"""Keys in the plan's first line."""
SHOWN_AS_RANKS = ("device_mapping", "world_size", "strategy_args.strategy_name")
"""Keys of a role in the plan's first table."""
NONE = "none"
SAYS_WITHOUT = ("lora_target", "offload_optimizer", "offload_param")
"""Keys that are shown even if not set, because `none` is informative: all weights train, nothing is offloaded."""
ENGINE_KEYS = "strategy_args.strategy_config."
"""Part of a key path that is not shown, because the keys in these blocks are unique without it."""


def variant_lines(config: Config) -> list[str]:
    """Return a line for each subject with its keys and values, then a line for each block with the other keys that
    differ from defaults.

    If two configurations differ in a key, a line that names this key differs as well. Exceptions are keys with secrets,
    and the keys in ELSEWHERE and SHOWN_AS_RANKS, which other parts of the plan show.
    """
    values = flat_text(redacted(config.model_dump(mode="json")))
    given = flat_text(redacted(config.model_dump(mode="json", exclude_defaults=True)))
    lines, told = list[str](), set[str]()
    for subject, prefix, keys in _subjects(config):
        paths = {key: f"{prefix}{key}" for key in keys}
        present = {
            key: path
            for key, path in paths.items()
            if values.get(path, NONE) != NONE or (key in SAYS_WITHOUT and path in values)
        }
        told.update(present.values())
        if present:
            block = prefix.replace(ENGINE_KEYS, "").removesuffix(".")
            shown = ", ".join(f"{key} {values[path]}" for key, path in present.items())
            lines.append(f"{subject}: {block + ': ' if block else ''}{shown}")
    return lines + _rest({path: value for path, value in given.items() if path not in told})


def _subjects(config: Config) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield each subject with the path of the block that contains its keys, and the keys."""
    name, role = learner(config)
    model = [key for key in MODEL if role.model_args.lora_target or key not in ADAPTER]
    yield "Learns", f"{name}.model_args.", model
    yield "ZeRO", f"{name}.{ENGINE_KEYS}zero_optimization.", ZERO
    epochs = () if isinstance(config, RlvrConfig) else ("num_train_epochs",)
    yield "Optimizer", f"{name}.training_args.", (*TRAINING, *epochs)
    for subject, keys in (RLVR if isinstance(config, RlvrConfig) else OTHERS).items():
        yield subject, "", keys
    if isinstance(config, RlvrConfig):
        yield "Sampling", "actor_infer.generating_args.", SAMPLING
    for subject, keys in COMMON.items():
        yield subject, "", keys


def _rest(given: Mapping[str, str]) -> list[str]:
    """Return a line for each block, with the given keys and their values."""
    blocks = dict[str, list[str]]()
    for path, value in given.items():
        block, _, key = path.partition(".")
        if path in ELSEWHERE or key in SHOWN_AS_RANKS:
            continue
        blocks.setdefault(block if key else "Further keys", []).append(
            f"{key.replace(ENGINE_KEYS, '') or path} {value}"
        )
    return [
        f"{block}: {', '.join(keys)}"
        for block, keys in sorted(blocks.items(), key=lambda one: one[0] != "Further keys")
    ]


def flat_text(tree: Any, path: str = "") -> dict[str, str]:
    """Return the values in nested plain blocks as text, by dotted path. Empty blocks are left out."""
    if isinstance(tree, Mapping):
        return {
            name: text
            for key, value in tree.items()
            for name, text in flat_text(value, f"{path}.{key}" if path else str(key)).items()
        }
    return {path: yaml_text(tree)}


def yaml_text(value: Any) -> str:
    """Return a value as YAML writes it, without quotes."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_text, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: NONE, True: "true", False: "false"}[value]
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


WIDTH = 160
"""Width of a line in characters if there is no terminal."""
REFERENCE = {
    "unused": "none; neither the loss nor the reward uses them, so no reference role is started",
    "role": "the role reference",
    "adapter_off": "actor_train with its adapter off",
}


def show_plan(config: Config, plan: Plan, console: Console) -> None:
    """Print the roles, the batch arithmetic and the memory estimates of a plan."""
    console.print(
        f"[bold]{config.exp_name}[/bold]: {steps_text(config)} of {config.pipeline}, into {config.output_dir}",
        highlight=False,
    )
    console.print(_roles(plan))
    for line in (*arithmetic_lines(config, plan), *variant_lines(config)):
        console.print(line, highlight=False, markup=False)
    if plan.memory:
        console.print(_memory(plan))
        for line in device_lines(plan):
            console.print(line, highlight=False, markup=False)
        if config.gpu_memory_gib:
            console.print(fit_line(plan, config.gpu_memory_gib), highlight=False, markup=False)
        for line in (*advice_lines(config, plan), *speed_lines(config, plan), *sync_lines(config, plan)):
            console.print(line, highlight=False, markup=False)
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def steps_text(config: Config) -> str:
    """Return the length of the run, in epochs if it follows the data, whose number of rows a plan does not know."""
    if isinstance(config, RlvrConfig):
        return f"{config.max_steps} steps"
    epochs = row_learner(config)[1].training_args.num_train_epochs
    passes = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    return passes if config.max_steps is None else f"{passes}, at most {config.max_steps} steps,"


def plan_text(config: Config, plan: Plan) -> str:
    """Return the output of `show_plan` as text."""
    text = StringIO()
    show_plan(config, plan, Console(file=text, width=WIDTH))
    return text.getvalue()


def _roles(plan: Plan) -> Table:
    table = _table("Roles")
    for column in ("role", "strategy", "ranks", "devices", "tokens of a micro-batch"):
        table.add_column(column, overflow="fold")
    for name, role in plan.roles.items():
        tokens = f"{role.tokens_per_microbatch:,}" if role.tokens_per_microbatch else "-"
        table.add_row(name, role.strategy, _ranks(role), _devices(role), tokens)
    return table


def _table(title: str) -> Table:
    """Return an empty table whose narrow padding suits small terminals."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _ranks(role: RolePlan) -> str:
    return f"{role.ranks} = {role.replicas} x {role.replica_size}" if role.replica_size > 1 else str(role.ranks)


def _devices(role: RolePlan) -> str:
    if role.is_outside:
        return "servers outside the run"
    if role.on_cpu:
        return "CPU"
    width = f", {role.tensor_parallel} for each engine" if role.tensor_parallel > 1 else ""
    return ranges(sorted(role.all_devices)) + width


def arithmetic_lines(config: Config, plan: Plan) -> list[str]:
    """Return the lines on the nodes, on the data that a step generates and trains on, and on the longest sequence."""
    batch = plan.batch
    lines = [f"Nodes: {plan.nodes} of {config.num_gpus_per_node} devices"] if plan.nodes else []
    if isinstance(config, RlvrConfig):
        samples = config.num_return_sequences_in_group
        lines.append(
            f"A step: {batch.prompts_per_step} prompts x {samples} samples = {batch.sequences_per_step} sequences"
        )
        lines += [f"Prompts: {_prompts(config.curriculum)}"] if config.curriculum else []
        lines += (
            [f"Replay: {_replay(config.curriculum.replay)}"] if config.curriculum and config.curriculum.replay else []
        )
        lines.append(f"Generation: {_generation(config)}")
        lines.append(f"Reference log-probs: {REFERENCE[plan.reference]}")
    if isinstance(config, RlvrConfig) and config.replay_from is None:
        lines += _judging(config)
    if isinstance(config, DpoConfig):
        lines.append(f"Reference log-probs: {REFERENCE[plan.reference]}, {config.reference_log_probs}")
    units = "pairs" if has_pairs(config) else "sequences"
    lines.append(f"Training: {_updates(batch.updates)} a step, of {batch.sequences_per_update} {units}")
    if isinstance(config, RlvrConfig) and config.critic:
        learnt = sequences_per_update(config, config.critic)
        updates = batch.sequences_per_step // learnt * config.ppo_epochs
        alone = f"; the first {config.critic_warmup} steps train only the critic" if config.critic_warmup else ""
        lines.append(f"Critic: {_updates(updates)} a step, of {learnt} sequences{alone}")
    if isinstance(config, RlvrConfig) and config.environments and config.replay_from is None:
        lines += _episodes(config)
    lines.append(f"Longest sequence: {_lengths(config, batch)}")
    return lines


def _lengths(config: Config, batch: BatchPlan) -> str:
    if not isinstance(config, RlvrConfig) and config.max_length:
        return f"{config.max_length} tokens, prompt and response together"
    single = config.prompt_length + config.response_length
    if batch.longest_sequence == single:
        return f"{config.prompt_length} + {config.response_length} = {single} tokens"
    return f"{batch.longest_sequence} tokens, of which at most {config.response_length} per turn"


def _episodes(config: RlvrConfig) -> list[str]:
    """Return a line for each environment, with its number of concurrent episodes."""
    return [
        f"Environment {domain}: "
        f"{environment_of(domain, section)}{', an agent through the gateway' if section.agent else ''}, "
        f"at most {section.max_turns} turns"
        f"{f', {section.rows} tasks of its own' if section.rows else ''}; "
        f"{section.world_size * section.sessions_per_process} at a time"
        f"{f'; partners: {_partners(section)}' if section.partners else ''}"
        for domain, section in config.environments.items()
    ]


def _partners(section: EnvironmentConfig) -> str:
    """Return the partners of an environment, each with what samples its turns."""
    sampled_by = {"inference": "a fixed model", "live": "the policy itself, without credit"}
    return ", ".join(
        f"{name} ({sampled_by.get(partner.type) or f'{partner.model_name} at {partner.api_url}'})"
        for name, partner in section.partners.items()
    )


def _judging(config: RlvrConfig) -> list[str]:
    """Return the lines on when reward models score the responses."""
    roles, in_turn = reward_roles(config), judged_in_turn(config)
    when = {
        "as responses finish": sorted(set(roles) - in_turn),
        "once all responses of a step are generated": sorted(in_turn),
    }
    return [f"Judging: {', '.join(names)}, {said}" for said, names in when.items() if names]


def _prompts(curriculum: CurriculumConfig) -> str:
    """Return how a curriculum draws prompts, with the values of keys that are not given, too."""
    shares = ", ".join(f"{pool} {share:g}" for pool, share in curriculum.shares.model_dump().items())
    low, high = curriculum.hard_at_most, curriculum.solved_at_least
    return f"by solve rate, hard at most {low:g}, solved at least {high:g}; shares of the pools: {shares}"


def _replay(replay: GroupReplayConfig) -> str:
    """Return which groups are replayed, with the values of keys that are not given, too."""
    rare = f"groups with at most {replay.solve_rate_at_most:g} of their responses right, at least one"
    until = f"until {replay.staleness_at_most} updates old, at most {replay.buffer_size} in the buffer"
    return f"{rare}; {until} and {replay.share:g} of a step"


def _generation(config: RlvrConfig) -> str:
    if config.replay_from is not None:
        return f"none; the rollouts that {config.replay_from} kept are replayed, so no engine or reward is started"
    if not config.async_generation_ratio:
        return "synchronous"
    ratio = config.async_generation_ratio
    ahead = f"up to {ratio:g} {'step' if ratio == 1 else 'steps'} ahead of training"
    if config.generate_while_training:
        ahead += ", also while other roles work on the engines' devices"
    batches = (config.rollout_window or config.rollout_batch_size) // config.rollout_batch_size
    if batches == 1:
        return ahead
    limit = age_limit(ratio, batches)
    return (
        f"{ahead}; a step trains on the first groups to finish in a window of {batches} batches; none is older than "
        f"{limit} steps"
    )


def _updates(count: int) -> str:
    return "1 update" if count == 1 else f"{count} updates"


def _memory(plan: Plan) -> Table:
    kinds = list(dict.fromkeys(kind for memory in plan.memory.values() for kind in memory.device))
    table = _table("Memory of each device of a role, in GiB, estimated")
    table.add_column("")
    for name in plan.memory:
        table.add_column(name, justify="right", overflow="fold")
    held = plan.memory.values()
    for kind in kinds:
        table.add_row(
            kind.replace("_", " "), *(_gib(memory.device[kind]) if kind in memory.device else "-" for memory in held)
        )
    table.add_row("sum", *(_gib(memory.device_total) for memory in held))
    if any(memory.reserves for memory in held):
        shown = (_reserved(memory.reserved_fraction, memory.reserved_bytes) for memory in held)
        table.add_row("reserved", *(text or "-" for text in shown))
    table.add_row("host, each rank", *(_gib(memory.host) if memory.host else "-" for memory in held))
    return table


def device_lines(plan: Plan) -> list[str]:
    """Return a line for each group of devices with equal memory, with that of each phase if roles take turns."""
    groups: dict[tuple[Phase, ...], list[int]] = {}
    for device in plan.devices:
        groups.setdefault(tuple(phases(plan, device)), []).append(device)
    if not groups:
        total = sum(memory.device_total * plan.roles[name].ranks for name, memory in plan.memory.items())
        return [f"The CPU needs at most, with all roles at once: {_gib(total)} GiB"]
    return [f"Device {ranges(devices)} needs at most: {_phases(found)}" for found, devices in groups.items()]


def fit_line(plan: Plan, gpu_memory_gib: float) -> str:
    """Return the line that says whether the plan fits into GPUs of this size, by the estimate."""
    wrong = misfits(plan, gpu_memory_gib * GIB)
    size = f"GPUs of {gpu_memory_gib:g} GiB, by the estimate"
    if not wrong:
        return f"It fits into {size}"
    remedy = (
        "use more GPUs, ZeRO-3, offload, a larger tensor_parallel_size, a smaller max_tokens_per_microbatch, or "
        "another share of the GPU for the engine"
    )
    return f"warning: too much for {size}: {', '.join(wrong)}; {remedy}"


def _phases(found: Sequence[Phase]) -> str:
    return ", ".join(f"{phase.name} {_held(phase)}" for phase in found)


def _held(phase: Phase) -> str:
    reserved = _reserved(phase.reserved_fraction, phase.reserved_bytes, " of the device")
    return f"{_gib(phase.held)} GiB{f' (engines take {reserved} with the KV cache)' if reserved else ''}"


def _reserved(fraction: float, size: int, of_what: str = "") -> str:
    parts = [f"{fraction:.0%}{of_what}"] * bool(fraction) + [f"{_gib(size)} GiB"] * bool(size)
    return " + ".join(parts)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
