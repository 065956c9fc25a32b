"""Gives a file of ROLL the defaults and the meanings that ROLL gives to keys, or says what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from roll.algorithms.methods import CLIP_NORMALISED, NORM_KEYS
from roll.config.derived.methods import WHOLE
from roll.config.roll_v2.backends import settle_backends, whole_updates
from roll.config.roll_v2.translate import LENGTHS, TRAINED, Translation
from roll.config.schema.faults import printable
from roll.config.schema.fields import section_at
from roll.config.schema.foreign_names import DEFAULTS, ROLE, ROLES
from roll.config.schema.pipelines import PIPELINES

ENOUGH = 3
"""Smallest number of ROLL's keys in a file of ROLL. A file for roll may have fewer, from a copied snippet."""
SWITCH = "roll_defaults"
NEEDED = {"eval_steps": "validation", "validation": "validation", "init_kl_coef": "add_token_level_kl"}
"""By first component of a key path: the root key without which keys on that path have no effect."""
CISPO_CLIP = 0.1

OWN_NUMBERS: Mapping[str, int] = {
    "max_steps": 500,
    "num_return_sequences_in_group": 1,
    "<role>.training_args.per_device_train_batch_size": 8,
    "<role>.training_args.gradient_accumulation_steps": 1,
}
"""ROLL's defaults of the steps, and of the responses and updates of a step. A file of ROLL keeps them, whatever
`roll_defaults` says.
"""

Place = tuple[str, ...]


def is_of_roll(done: Translation) -> bool:
    """Return whether the file is one of ROLL's: it asks for ROLL's defaults, or has several keys that only ROLL has."""
    return done.values.get(SWITCH) is True or len(done.roll_keys) >= ENOUGH


def settle_defaults(done: Translation) -> None:
    """Warn about defaults that differ if the file is ROLL's, or apply ROLL's if `roll_defaults` is true."""
    takes = done.values.get(SWITCH) is True
    if not is_of_roll(done):
        return
    is_rlvr = done.values.get("pipeline", "rlvr") == "rlvr"
    if is_rlvr:
        _keep_numbers(done)
    others = {key: value for key, value in DEFAULTS.items() if not (is_rlvr and key in OWN_NUMBERS)}
    missing = {place: value for place, value in _roll_defaults(done.values, others) if _left_out(done.values, place)}
    if takes:
        for place, value in missing.items():
            _put(done.values, place, value)
    elif missing:
        listed = ", ".join(
            f"{'.'.join(place)} {value} (here {_ours(done.values, place)})" for place, value in missing.items()
        )
        text = f"{SWITCH}: false, so missing keys have roll's defaults, not ROLL's: {listed}; set these keys"
        done.warn(f"{text}, or set {SWITCH}: true to use ROLL's defaults")
    _dual_clip(done)
    _cispo(done, takes)
    _unused_kl(done)


def _keep_numbers(done: Translation) -> None:
    """Set the `OWN_NUMBERS` that a file of ROLL leaves out, and say so. `updates_per_step` gives an update's size."""
    by_updates = "updates_per_step" in done.values
    missing = {
        place: value
        for place, value in _roll_defaults(done.values, OWN_NUMBERS)
        if _left_out(done.values, place) and not (by_updates and len(place) > 1)
    }
    for place, value in missing.items():
        _put(done.values, place, value)
    if missing:
        listed = ", ".join(f"{'.'.join(place)} {value}" for place, value in missing.items())
        done.warn(
            f"{listed}: the file does not set these keys, so they have ROLL's defaults; see the plan's updates a step"
        )


def _roll_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """Yield the key paths and values of ROLL's defaults, for blocks in use."""
    for pattern, value in defaults.items():
        first, *below = pattern.split(".")
        for step in [role for role in TRAINED if role in values] if first == ROLE else [first]:
            place = (step, *below)
            if _field(values, place) and (step not in NEEDED or values.get(NEEDED[step])):
                yield place, value


def _left_out(values: Any, place: Place) -> bool:
    """Return whether a key, or a block above it, is not set."""
    for step in place:
        if not isinstance(values, dict):
            return False  # The schema reports a value that is not a block.
        if step not in values:
            return True
        values = values[step]
    return False


def _put(values: dict[str, Any], place: Place, value: Any) -> None:
    *above, key = place
    for step in above:
        values = values.setdefault(step, {})
    values[key] = value


def _field(values: Mapping[str, Any], place: Place) -> FieldInfo | None:
    """Return the field of the pipeline's schema at a key path, or None if there is no such field."""
    schema = PIPELINES.get(str(values.get("pipeline", "rlvr")), PIPELINES["rlvr"])
    section = section_at(schema, place[:-1], values)
    return section.model_fields.get(place[-1]) if section else None


def _ours(values: Mapping[str, Any], place: Place) -> Any:
    field = _field(values, place)
    return field.default if field else None


def _dual_clip(done: Translation) -> None:
    """Read `dual_clip_loss: true` as ROLL's number, 1 + 2 `pg_clip`, whatever the clip range is.

    The ratio of a whole response has no such bound here.
    """
    clip = done.values.get("pg_clip", 0.2)
    if done.values.get("policy_loss") == "gspo" and done.values.get("dual_clip_loss"):
        value = done.values.pop("dual_clip_loss")
        said = "ROLL also bounds the loss of a response with a negative advantage and a ratio above 1 + 2 x pg_clip"
        done.warn(f"dual_clip_loss: {printable(value)} is ignored; gspo has no dual clip here, but {said}")
    if done.values.get("dual_clip_loss") is True and isinstance(clip, int | float):
        theirs = done.values["dual_clip_loss"] = round(1 + 2 * clip, 6)
        done.warn(f"dual_clip_loss: true is read as 1 + 2 x pg_clip = {theirs:g}, as in ROLL; set that number")


def _cispo(done: Translation, takes: bool) -> None:
    """Apply or report the clip range of ROLL's CISPO, which does not depend on `pg_clip`."""
    if done.values.get("policy_loss") != "cispo" or "actor_train.pg_variant" not in done.roll_keys:
        return
    if takes:
        for key in ("pg_clip_low", "pg_clip_high"):
            done.values.setdefault(key, CISPO_CLIP)
    elif not {"pg_clip_low", "pg_clip_high"} <= done.values.keys():
        clip = done.values.get("pg_clip", 0.2)
        text = f"policy_loss: cispo clips at {CISPO_CLIP} on both sides in ROLL, but at pg_clip ({clip}) here"
        done.warn(f"{text}; set pg_clip_low and pg_clip_high")


def _unused_kl(done: Translation) -> None:
    """Drop `init_kl_coef` if no term uses it. ROLL's files set it for metrics only."""
    if done.values.get("init_kl_coef") and done.values.get("add_token_level_kl", False) is False:
        value = done.values.pop("init_kl_coef")
        done.warn(
            f"init_kl_coef: {value} is ignored; without add_token_level_kl the reward has no KL term, in ROLL as well"
        )
    if done.values.get("kl_horizon") is not None and done.values.get("target_kl") is None:
        value = done.values.pop("kl_horizon")
        done.warn(f"kl_horizon: {value} is ignored; without target_kl the KL weight is constant, in ROLL as well")


SHORTEST_PROMPT = 5
"""ROLL drops prompts of at most this many tokens."""
IS_RANGE = "use_pg_clip_range"


def settle_meanings(done: Translation) -> None:
    """Translate the keys of a file of ROLL whose meaning differs, in place, and warn about each of them once."""
    values, agentic = done.values, bool(done.values.get("environments"))
    settle_backends(done)
    if values.get("pipeline", "rlvr") == "rlvr":
        _only_rollouts(done)
        _adapter(done)
        _held_out(done)
        if agentic:
            whole_updates(done)
        else:
            _by_domain(done)
            _response_length(done)
        _late_clip(done)
        _clip_range(done)
        _stale_samples(done)
        done.warnings += _differences(values, agentic)
    done.warnings += _order_of_rows(values)
    _templates(done)


def _order_of_rows(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield how ROLL draws the rows of a file differently."""
    role = {"sft": "sft_train", "dpo": "actor_train", "distill": "student"}.get(str(values.get("pipeline")))
    if role == "sft_train":
        yield f"{role}.data_args: ROLL takes the rows in the order of the file, roll shuffles them in each epoch"
    if role:
        text = "ROLL leaves out the rows of an epoch's incomplete last step, roll completes it from the next epoch"
        yield f"{role}.training_args.num_train_epochs: {text}"


def _by_domain(done: Translation) -> None:
    """Read the scope `batch` as `domain` if there are several: ROLL normalises and whitens each one separately."""
    values = done.values
    if not isinstance(rewards := values.get("rewards"), dict) or len(rewards) < 2:
        return
    for key in NORM_KEYS:
        if values.get(key) == "batch":
            values[key] = "domain"
            done.warn(
                f"{key}: 'batch' is read as domain, because ROLL normalises each domain separately; use that instead"
            )
    if values.get("whiten_advantages") is True:
        values["whiten_advantages"] = "domain"
        done.warn("whiten_advantages: true is read as domain, as ROLL whitens by reward domain; use that instead")


def _response_length(done: Translation) -> None:
    """Set the limits of responses to `response_length`, which overwrites `max_new_tokens` in ROLL."""
    values = done.values
    longest = values.get("response_length")
    for name in ("actor_infer", "validation"):
        block = values.get(name)
        generating = block.get("generating_args") if isinstance(block, dict) else None
        if not isinstance(generating, dict) or not isinstance(longest, int):
            continue
        if (given := generating.get("max_new_tokens")) is not None and given != longest:
            generating["max_new_tokens"] = longest
            place = f"{name}.generating_args.max_new_tokens"
            said = (
                f"{printable(given)} is read as {longest}, because response_length replaces it in ROLL; remove the key"
            )
            done.warn(f"{place}: {said}")
    _model_length(done)


def _model_length(done: Translation) -> None:
    """Let the engine take whole prompts and responses. In ROLL a response ends where the engine's limit is reached."""
    infer, lengths = done.values.get("actor_infer"), [done.values.get(key) for key in LENGTHS]
    strategy = infer.get("strategy_args") if isinstance(infer, dict) else None
    block = strategy.get("strategy_config") if isinstance(strategy, dict) else None
    numbers = [length for length in lengths if isinstance(length, int)]
    most = block.get("max_model_len") if isinstance(block, dict) else None
    if isinstance(block, dict) and isinstance(most, int) and len(numbers) == len(LENGTHS) and most < sum(numbers):
        block["max_model_len"] = sum(numbers)
        said = f"{most} is read as {sum(numbers)}, prompt_length + response_length; in ROLL longer responses end there"
        done.warn(
            f"actor_infer.strategy_args.strategy_config.max_model_len: {said}; lower response_length for the same"
        )


def _only_rollouts(done: Translation) -> None:
    """Add a fault to a file of ROLL's pipelines that generate and train nothing."""
    if "actor_train" not in done.values and "actor_infer" in done.values:
        remedy = "evaluate a model with python -m roll.evaluate, or add actor_train"
        done.fault("actor_train", "missing, so the file generates and trains nothing", remedy, "missing")


def _adapter(done: Translation) -> None:
    """Let the trained role alone decide about the adapter: in ROLL the engine takes whatever adapter it is sent."""
    train, infer = (
        block.get("model_args") if isinstance(block := done.values.get(name), dict) else None
        for name in ("actor_train", "actor_infer")
    )
    if not isinstance(train, dict) or not isinstance(infer, dict) or not train.get("lora_target"):
        return
    if (given := infer.get("lora_target")) not in (None, train["lora_target"]):
        infer["lora_target"] = train["lora_target"]
        said = (
            f"{printable(given)} is read as {train['lora_target']}, because the trained role decides in ROLL; remove it"
        )
        done.warn(f"actor_infer.model_args.lora_target: {said}")
    strategy = done.values["actor_infer"].get("strategy_args")
    block = strategy.get("strategy_config") if isinstance(strategy, dict) else None
    if isinstance(block, dict) and block.get("load_format") == "dummy":
        block["load_format"] = "auto"
        place = "actor_infer.strategy_args.strategy_config.load_format"
        done.warn(f"{place}: 'dummy' is read as auto, as in ROLL with lora_target; use that instead")


def _held_out(done: Translation) -> None:
    """Drop `eval_steps` without held-out prompts: ROLL then validates nothing."""
    if done.values.get("eval_steps") and not done.values.get("validation"):
        value = done.values.pop("eval_steps")
        done.warn(f"eval_steps: {value} is ignored; there is no validation block, and nothing to validate in ROLL")


def _stale_samples(done: Translation) -> None:
    """Sample from the whole distribution if generation runs ahead: only then is the probability of a token known."""
    infer = done.values.get("actor_infer")
    generating = infer.get("generating_args") if isinstance(infer, dict) else None
    if not done.values.get("async_generation_ratio") or not isinstance(generating, dict):
        return
    for key, whole in WHOLE.items():
        if generating.get(key) not in (None, whole, 0):
            value, generating[key] = generating[key], whole
            why = "with async_generation_ratio a loss needs the log-probs of the policy that sampled"
            theirs = "ROLL takes those of the current weights, over all tokens, and does not correct the difference"
            done.warn(f"actor_infer.generating_args.{key}: {printable(value)} is read as {whole}; {why}; {theirs}")


def _late_clip(done: Translation) -> None:
    """Let `reward_clip` clip rewards after they are normalised, as in ROLL, or say that this estimator cannot."""
    values = done.values
    if (clip := values.get("reward_clip")) is None or "reward_clip_on" in values:
        return
    estimator = values.get("adv_estimator", "grpo")
    scopes = [key for key in NORM_KEYS if values.get(key)]
    if estimator in CLIP_NORMALISED:
        if scopes or estimator == "grpo" or values.get("add_token_level_kl"):
            values["reward_clip_on"] = "normalised"
            said = (
                "clips rewards after their normalisation and the KL penalty in ROLL, so reward_clip_on is normalised; "
                "set it explicitly"
            )
            done.warn(f"reward_clip: {clip} {said}")
    else:
        text = f"reward_clip: {clip} clips raw rewards here, but normalised ones of {estimator} in ROLL"
        done.warn(f"{text}; adapt the value")


def _clip_range(done: Translation) -> None:
    """Drop `pg_clip_low` and `pg_clip_high` if ROLL does not read them."""
    if IS_RANGE in done.roll_keys or done.values.get("policy_loss") == "cispo":
        return
    for key in ("pg_clip_low", "pg_clip_high"):
        if key in done.values:
            value = done.values.pop(key)
            said = f"{printable(value)} is ignored, as ROLL reads it only with {IS_RANGE}: true; remove the key"
            done.warn(f"{key}: {said}")


def _templates(done: Translation) -> None:
    """Read the template `qwen2_5` as `native`: in ROLL both names mean the tokenizer's own template."""
    for place, block in _with_template(done.values):
        if block.get("template") == "qwen2_5":
            block["template"] = "native"
            said = "'qwen2_5' is read as native, the tokenizer's own template, as in ROLL; use that instead"
            done.warn(f"{place}.template: {said}")


def _with_template(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key path and the block of every set of rows and of every domain."""
    for name in (*ROLES, "validation"):
        if isinstance(block := values.get(name), dict) and isinstance(rows := block.get("data_args"), dict):
            yield f"{name}.data_args", rows
        sets = block.get("sets") if isinstance(block, dict) else None
        for title, one in sets.items() if isinstance(sets, dict) else ():
            if isinstance(one, dict) and isinstance(rows := one.get("data_args"), dict):
                yield f"{name}.sets.{title}.data_args", rows
    rewards = values.get("rewards")
    for domain, block in rewards.items() if isinstance(rewards, dict) else ():
        if isinstance(block, dict):
            yield f"rewards.{domain}", block


def _differences(values: dict[str, Any], agentic: bool) -> Iterator[str]:
    """Yield what ROLL does differently where roll has no key for it."""
    infer = values.get("actor_infer")
    generating = infer.get("generating_args") if isinstance(infer, dict) else None
    temperature = generating.get("temperature", 1) if isinstance(generating, dict) else 1
    if temperature != 1:
        text = f"{printable(temperature)} also divides the logits of the trained log-probs here, but not in ROLL"
        yield f"actor_infer.generating_args.temperature: {text}; set it to 1 for the same ratios"
    if values.get("adv_estimator") == "gae":
        text = "gae takes 0 as the value after a response; ROLL takes the critic's values of the padding there"
        yield f"adv_estimator: {text}, and they change the advantages of all tokens"
    if values.get("norm_std_type") == "group" and values.get("norm_mean_type") != "group":
        rolls = (
            "in ROLL, rewards of a group that are all equal become 0"
            if agentic
            else "ROLL itself cannot compute this pair of scopes"
        )
        yield f"norm_std_type: group without norm_mean_type: group leaves equal rewards undivided here; {rolls}"
    if not agentic:
        yield f"prompt_length: ROLL drops prompts of at most {SHORTEST_PROMPT} tokens, roll does not; remove them"
    if values.get("max_len_mask"):
        text = "true leaves out truncated responses here, but in ROLL also those that end exactly at response_length"
        yield f"max_len_mask: {text}; raise response_length by 1 if that matters"
    if values.get("error_max_len_clip"):
        text = (
            "true leaves out long responses with a score of at most 0; ROLL also leaves out every score other than 0 "
            "and 1"
        )
        yield f"error_max_len_clip: {text}; use rewards that score 0 or 1"
    if values.get("difficulty_loss_weight"):
        text = (
            "true measures the difficulty from the group's scores here; ROLL reads the column `difficulty` of the rows"
        )
        yield f"difficulty_loss_weight: {text}; remove the key if the column matters"
