"""Keys of the critic and of the estimator that it serves, against each other."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.schema import RlvrConfig
from roll.errors import Fault

OWN_KEYS = ("lambd", "critic_warmup")
"""Keys of `gae` alone. `value_clip` stands in ROLL's files whatever the estimator, and so is only warned of."""


def critic_faults(config: RlvrConfig) -> Iterator[Fault]:
    """A critic without the estimator that asks it, the estimator without a critic, and keys that neither reads."""
    if config.adv_estimator == "gae":
        if config.critic is None:
            problem = "missing, and adv_estimator gae takes advantages against its values"
            yield Fault("critic", problem, "add a critic block (strategy_name: deepspeed_train), or choose another adv_estimator")
        if config.critic_warmup >= config.max_steps:
            problem = f"{config.critic_warmup} of max_steps {config.max_steps}: the policy would never learn"
            yield Fault("critic_warmup", problem, f"give less than {config.max_steps}; a tenth of the steps is ample")
        return
    if config.critic is not None:
        problem = f"given, but adv_estimator {config.adv_estimator} uses no values"
        yield Fault("critic", problem, "remove the block (~critic), or set adv_estimator=gae")
    for key in OWN_KEYS:
        if key in config.model_fields_set:
            problem = f"{getattr(config, key):g}, but adv_estimator {config.adv_estimator} does not read it"
            yield Fault(key, problem, "remove it, or set adv_estimator=gae and add a critic block")


def critic_warnings(config: RlvrConfig) -> Iterator[str]:
    """Keys that do less than they seem to."""
    if config.value_clip is not None and config.adv_estimator != "gae":
        yield f"value_clip: has no effect with adv_estimator {config.adv_estimator}, which has no critic; remove the key"
    if config.adv_estimator == "gae" and not config.whiten_advantages:
        yield "whiten_advantages: false; PPO is usually run with true, which frees the step size from the scale of rewards and values"
    if config.critic and "num_train_epochs" in config.critic.training_args.model_fields_set:
        yield "critic.training_args.num_train_epochs: has no effect here; RLVR ends after max_steps"
