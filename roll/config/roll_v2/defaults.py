"""Reports or applies ROLL's defaults and its meanings of keys, if they differ from roll's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from roll.config.roll_v2.translate import TRAINED, Translation
from roll.config.schema.fields import section_at
from roll.config.schema.foreign_names import ROLE
from roll.config.schema.pipelines import PIPELINES

ENOUGH = 3
"""Smallest number of ROLL's keys in a file of ROLL. A file for roll may have fewer, from a copied snippet."""
SWITCH = "roll_defaults"
DEFAULTS: Mapping[str, Any] = {
    "adv_estimator": "gae",
    "rollout_batch_size": 128,
    "save_steps": 50,
    "eval_steps": 10,
    "resume_from_checkpoint": "never",
    "init_kl_coef": 0.2,
    "actor_infer.generating_args.temperature": 0.95,
    "actor_infer.generating_args.top_p": 0.7,
    "actor_infer.generating_args.top_k": 50,
    "validation.generating_args.temperature": 0.95,
    "validation.generating_args.top_p": 0.7,
    "validation.generating_args.top_k": 50,
    "<role>.training_args.learning_rate": 5e-5,
    "<role>.training_args.per_device_train_batch_size": 8,
}
"""Defaults of ROLL v0.2.1 that differ from roll's, by key path. `<role>` stands for each of `TRAINED`."""
NEEDED = {"eval_steps": "validation", "validation": "validation", "init_kl_coef": "add_token_level_kl"}
"""By first component of a key path: the root key without which keys on that path have no effect."""
CISPO_CLIP = 0.1

OWN_NUMBERS: Mapping[str, int] = {
    "num_return_sequences_in_group": 1,
    "<role>.training_args.per_device_train_batch_size": 8,
    "<role>.training_args.gradient_accumulation_steps": 1,
}
"""Defaults of ROLL that say how many responses and updates a step has. A file of ROLL keeps them, whatever
`roll_defaults` says.
"""

Place = tuple[str, ...]


def is_of_roll(done: Translation) -> bool:
    """Return whether the file is one of ROLL's: it asks for ROLL's defaults, or has several keys that only ROLL has."""
    return done.values.get(SWITCH) is True or len(done.roll_keys) >= ENOUGH


def settle_defaults(done: Translation) -> None:
    """Warn about defaults that differ if the file is one of ROLL's, or apply ROLL's defaults if `roll_defaults` is
    true.
    """
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
        text = (
            f"{SWITCH}: false, so keys that are not set have roll's defaults, but ROLL's defaults differ: {listed}; "
            f"set these keys"
        )
        done.warnings.append(f"{text}, or set {SWITCH}: true to use ROLL's defaults")
    _dual_clip(done)
    _cispo(done, takes)
    _unused_kl(done)


def _keep_numbers(done: Translation) -> None:
    """Set the numbers of `OWN_NUMBERS` that a file of ROLL leaves out, and say so. With `updates_per_step`, an update's
    size is given.
    """
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
        done.warnings.append(
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
    """Read `dual_clip_loss: true` as ROLL's number, 1 + 2 `pg_clip`, whatever the clip range is."""
    clip = done.values.get("pg_clip", 0.2)
    if done.values.get("dual_clip_loss") is True and isinstance(clip, int | float):
        theirs = done.values["dual_clip_loss"] = round(1 + 2 * clip, 6)
        done.warnings.append(
            f"dual_clip_loss: true is read as 1 + 2 x pg_clip = {theirs:g}, as in ROLL; set that number"
        )


def _cispo(done: Translation, takes: bool) -> None:
    """Apply or report the clip range of ROLL's CISPO, which does not depend on `pg_clip`."""
    if done.values.get("policy_loss") != "cispo" or "actor_train.pg_variant" not in done.roll_keys:
        return
    if takes:
        for key in ("pg_clip_low", "pg_clip_high"):
            done.values.setdefault(key, CISPO_CLIP)
    elif not {"pg_clip_low", "pg_clip_high"} <= done.values.keys():
        clip = done.values.get("pg_clip", 0.2)
        text = (
            f"policy_loss: cispo clips at {CISPO_CLIP} on both sides in ROLL, whatever pg_clip is, but at pg_clip "
            f"({clip}) here"
        )
        done.warnings.append(f"{text}; set pg_clip_low and pg_clip_high")


def _unused_kl(done: Translation) -> None:
    """Drop `init_kl_coef` if no term uses it. ROLL's files set it for metrics only."""
    if done.values.get("init_kl_coef") and done.values.get("add_token_level_kl", False) is False:
        value = done.values.pop("init_kl_coef")
        done.warnings.append(
            f"init_kl_coef: {value} is ignored; without add_token_level_kl the reward has no KL term, in ROLL as well"
        )
