"""Checks of what is not supported with models that see pictures, and of the keys that only such models read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.derived.batch import learner
from roll.config.derived.fixed_roles import PREFIX, model_reward, reward_roles, teacher_roles
from roll.config.derived.methods import replays
from roll.config.derived.model_shape import PATCHED, TILED, ModelShape
from roll.config.derived.placement import model_roles, sends_adapter
from roll.config.derived.sight import WISH, blind_faults, unread_tower
from roll.config.load.on_disk import held_out_data
from roll.config.schema.model import DataConfig
from roll.config.schema.model_rewards import JUDGE
from roll.config.schema.offline import DistillConfig, DpoConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RoleConfig, ScorerConfig
from roll.errors import Fault

OTHERS = "use pipeline: sft, dpo, reward_model or rlvr"
"""Remedy in a pipeline that trains no models that see pictures."""


def picture_key_faults(config: Config) -> Iterator[Fault]:
    """Yield faults of the keys about pictures in other pipelines, or together with keys that exclude them."""
    own, learning = learner(config)
    given: dict[str, DataConfig] = {f"{place}.data_args": rows for place, rows in held_out_data(config).items()}
    if learning.data_args:
        given[f"{own}.data_args"] = learning.data_args
    for where, columns in given.items():
        if columns.images and isinstance(config, DistillConfig):
            problem = f"'{columns.images}', but pipeline {config.pipeline} reads no pictures yet"
            yield Fault(f"{where}.images", problem, f"remove it, or {OTHERS}", "not_supported")
        elif columns.images and columns.text:
            problem = f"'{columns.images}', but text is '{columns.text}', which is trained on as it is"
            yield Fault(f"{where}.images", problem, "set only one of the two", "exclusive")
    for name, role in model_roles(config).items():
        model = role.model_args
        if model.sees_pictures and not _may_be_asked(config, own, name, role):
            problem = "true, but models that must be asked see pictures only as "
            problem += "a reward model" if isinstance(config, RlvrConfig) else "the model in training"
            problem += f", and as {', '.join(SEEING)}; and not in distillation"
            yield Fault(f"{name}.model_args.{WISH}", problem, "remove it", "not_supported")
        if "freeze_vision" not in model.model_fields_set:
            continue
        where = f"{name}.model_args.freeze_vision"
        if isinstance(config, DistillConfig):
            problem = f"'{model.freeze_vision}', but pipeline {config.pipeline} trains no model that sees pictures yet"
            yield Fault(where, problem, f"remove it, or {OTHERS}", "not_supported")
        elif model.lora_target and model.freeze_vision != "all":
            problem = f"'{model.freeze_vision}', but lora_target is {model.lora_target}, which freezes all of the model"
            yield Fault(where, problem, "remove it, or remove lora_target", "contradiction")


def _may_be_asked(config: Config, learning: str, name: str, role: RoleConfig) -> bool:
    """Return whether `model_args.sees_pictures` of a role is read. `learning`: name of the role in training."""
    return not isinstance(config, DistillConfig) and (name in (learning, *SEEING) or isinstance(role, ScorerConfig))


def seeing_faults(config: Config, shapes: Mapping[str, ModelShape]) -> Iterator[Fault]:
    """Yield faults of roles whose model sees pictures, and of keys about pictures for a model that sees none.

    Args:
        shapes: the known shapes of models by role.
    """
    learning, _ = learner(config)
    for name, role in model_roles(config).items():
        if name not in shapes:
            if name == learning and unread_tower(role.model_args.model_name_or_path or config.pretrain):
                yield from blind_faults(config)
            continue
        is_asked = role.model_args.sees_pictures and _may_be_asked(config, learning, name, role)
        if shapes[name].vision is None and is_asked:
            problem = "true, but roll runs no vision tower of this model"
            yield Fault(f"{name}.model_args.{WISH}", problem, "remove it, or use another model", "no_effect")
        if shapes[name].vision is None:
            yield from blind_faults(config) if name == learning and not isinstance(config, DistillConfig) else ()
        elif isinstance(config, DistillConfig):
            problem = f"it sees pictures, and pipeline {config.pipeline} does not support such models yet"
            remedy = f"{OTHERS}, or a model of text alone"
            yield Fault(_model_key(name, role), problem, remedy, "not_supported")
        elif isinstance(config, RlvrConfig) and isinstance(role, ScorerConfig):
            yield from _seeing_scorer(name, role, learning in shapes and shapes[learning].vision is None)
        elif isinstance(config, RlvrConfig) and name not in (*SEEING, *seeing_judges(config)):
            problem = f"it sees pictures, which only {', '.join(SEEING)}, reward models, and judges with "
            problem += "judge_sees_pictures may"
            yield Fault(_model_key(name, role), problem, "use a model of text alone", "not_supported")
        else:
            yield from _unsupported(name, role)
    if isinstance(config, RlvrConfig | DpoConfig):
        yield from _not_together(config)
    if isinstance(config, RlvrConfig) and learning in shapes:
        yield from _not_in_rlvr(config, shapes) if shapes[learning].vision else _unseeing(config)
        yield from _blind_judges(config, shapes)


def _not_together(config: RlvrConfig | DpoConfig) -> Iterator[Fault]:
    """Yield faults of roles that would see no pictures beside a policy that is asked to see them, or the reverse."""
    wishes = {name: role.model_args.sees_pictures for name, role in model_roles(config).items() if name in SEEING}
    for name, wish in wishes.items():
        if wish != wishes["actor_train"]:
            problem = "true, but that of actor_train is not given" if wish else "not given, but actor_train's is true"
            remedy = f"set it to true in {', '.join(wishes)}, or in none of them"
            yield Fault(f"{name}.model_args.{WISH}", problem, remedy, "contradiction")


SEEING = ("actor_train", "actor_infer", "reference")
"""Roles whose model may see pictures beside that in training, and reward models."""


def _not_in_rlvr(config: RlvrConfig, shapes: Mapping[str, ModelShape]) -> Iterator[Fault]:
    """Yield faults of the parts of RLVR that do not work with a policy that sees pictures."""
    text = "use a model of text alone"
    agents = [f"environments.{domain}.agent" for domain, one in config.environments.items() if one.agent is not None]
    scorers = [name for name, role in reward_roles(config).items() if isinstance(role, ScorerConfig)]
    blind = [name for name in scorers if name in shapes and shapes[name].vision is None]
    found = {
        **dict.fromkeys(blind, "it is scored by a reward model that would not see the pictures"),
        **dict.fromkeys(teacher_roles(config), "it is a teacher, which would not see the pictures"),
        **({"critic": "it is a critic, which would not see the pictures"} if config.critic else {}),
        **({"self_distillation": "its teacher would not see the pictures"} if config.self_distillation else {}),
    }
    for where, why in found.items():
        yield Fault(where, f"{why} of the policy's prompts", f"remove it, or {text}", "not_supported")
    for where in agents:
        problem = "given, but requests of agents have no pictures yet, and the policy sees them"
        yield Fault(where, problem, f"remove it, so that roll itself plays the episodes, or {text}", "not_supported")
    yield from _after_episodes(config)
    if config.replay_from is not None:
        problem = f"'{config.replay_from}', but kept rollouts have no pictures, and the policy sees them"
        yield Fault("replay_from", problem, f"remove it, or {text}", "not_supported")
    if replays(config):
        problem = "given, but the buffer of groups holds no pictures, and the policy sees them"
        yield Fault("curriculum.replay", problem, f"remove it, or {text}", "not_supported")
    if sends_adapter(config):
        problem = "adapter, but it was not tried whether engines apply adapters right to a model that sees pictures"
        yield Fault("weight_sync.lora", problem, "set it to merged", "not_supported")
    if config.actor_infer.strategy_args.traits.servers is not None:
        problem = f"{config.actor_infer.strategy_args.strategy_name}, but pictures are not sent to other servers yet"
        yield Fault("actor_infer.strategy_args.strategy_name", problem, "use vllm or hf_infer", "not_supported")


def _after_episodes(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of rewards that would see only the pictures of the row of an episode, not those of its turns."""
    for name, role in reward_roles(config).items():
        domain = name.removeprefix(PREFIX)
        if domain not in config.environments:
            continue
        if isinstance(role, ScorerConfig):
            problem = "it is scored by a reward model, which would not see the pictures that the environment shows"
            yield Fault(name, problem, "remove it, or use another reward", "not_supported")
    for where in seeing_judges(config):
        if where.removeprefix(PREFIX) in config.environments:
            problem = "true, but the judge would not see the pictures that the environment shows"
            yield Fault(f"{where}.judge_sees_pictures", problem, "remove it", "not_supported")


def _seeing_scorer(name: str, role: ScorerConfig, policy_is_blind: bool) -> Iterator[Fault]:
    """Yield faults of a reward model that sees pictures."""
    if policy_is_blind:
        problem = "it sees pictures, but the policy sees none"
        yield Fault(_model_key(name, role), problem, "use a model of text alone", "not_supported")
    elif role.strategy_args.traits.own_kernels:
        problem = f"{role.strategy_args.strategy_name}, but its classifiers were not tried with pictures"
        yield Fault(f"{name}.strategy_args.strategy_name", problem, "use hf_infer", "not_supported")
    else:
        yield from _unsupported(name, role)


def seeing_judges(config: RlvrConfig) -> list[str]:
    """Return the names of the rewards whose judge is to see the pictures of prompts."""
    return [f"{PREFIX}{domain}" for domain, reward in config.rewards.items() if reward.judge_sees_pictures]


def _unseeing(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of judges that are to see pictures, although the policy sees none."""
    for where in seeing_judges(config):
        problem = "true, but the policy sees no pictures, so that no prompt shows any"
        yield Fault(f"{where}.judge_sees_pictures", problem, "remove it", "no_effect")


def _blind_judges(config: RlvrConfig, shapes: Mapping[str, ModelShape]) -> Iterator[Fault]:
    """Yield faults of judges that are to see pictures with a model that the run serves and that sees none."""
    for where in seeing_judges(config):
        if where in shapes and shapes[where].vision is None:
            problem = "true, but the judge's model sees no pictures"
            remedy = f"remove it, or use a model that sees pictures ({', '.join((*PATCHED, *TILED))})"
            yield Fault(f"{where}.judge_sees_pictures", problem, remedy, "contradiction")


def picture_warnings(config: Config, shapes: Mapping[str, ModelShape]) -> Iterator[str]:
    """Yield a warning for each judge that reads only the text of prompts with pictures."""
    if not isinstance(config, RlvrConfig) or "actor_train" not in shapes or shapes["actor_train"].vision is None:
        return
    for domain, reward in config.rewards.items():
        if model_reward(domain, reward) == JUDGE and not reward.judge_sees_pictures:
            said = "the judge does not see the pictures of prompts, but only their names, such as [picture 1]"
            advice = (
                "" if domain in config.environments else "; set judge_sees_pictures=true if its model sees pictures"
            )
            yield f"{PREFIX}{domain}: {said}{advice}"


def _model_key(name: str, role: RoleConfig) -> str:
    return f"{name}.model_args.model_name_or_path" if role.model_args.model_name_or_path else "pretrain"


def _unsupported(name: str, role: RoleConfig) -> Iterator[Fault]:
    """Yield faults of keys that were not shown to work with pictures."""
    model, traits = role.model_args, role.strategy_args.traits
    strategy = f"{name}.strategy_args.strategy_config"
    split = "and pictures are not split over ranks yet"
    found = {
        f"{strategy}.sequence_parallel_size": (traits.sequence_parallel > 1, traits.sequence_parallel, split),
        f"{strategy}.tensor_parallel.autotp_size": (traits.tensor_parallel > 1, traits.tensor_parallel, split),
        f"{name}.model_args.liger": (model.liger, "true", "whose kernels replace layers of the vision tower too"),
        f"{name}.model_args.use_dora": (model.use_dora, "true", "which was not tried beside a vision tower"),
        f"{name}.model_args.init_lora_weights": (
            model.init_lora_weights is not True,
            f"'{model.init_lora_weights}'",
            "which was not tried beside a vision tower",
        ),
    }
    for where, (is_set, value, why) in found.items():
        if is_set:
            yield Fault(where, f"{value}, but the model sees pictures, {why}", "remove it", "not_supported")
