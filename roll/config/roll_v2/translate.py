"""Translates a plain configuration with ROLL's keys to roll's schema. Pure: returns a new mapping, warnings and faults.

`pictures.py` refuses keys and pipelines for video and diffusion models before any other check.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.config.derived.devices import FORMS, parse_devices
from roll.config.derived.domains import SANDBOX, SANDBOX_TIMEOUT
from roll.config.derived.trackers import TRACKERS
from roll.config.roll_v2.agentic import DEFINITIONS, MANAGERS, NORM, translate_agentic
from roll.config.roll_v2.on_policy import translate_on_policy, without_rewards
from roll.config.roll_v2.paths import matches
from roll.config.roll_v2.pictures import BOXES, SEES_PIXELS, in_pixels, is_of_pictures, translate_pictures
from roll.config.roll_v2.rewards import judge_as_roll, translate_model_rewards, translate_reward_functions
from roll.config.schema.faults import printable, printable_at
from roll.config.schema.fields import dotted
from roll.config.schema.foreign_names import (
    CRITIC_START,
    DIFFERS,
    HOLDS,
    IGNORED,
    MEANINGS,
    OWN_WORKERS,
    READ_AS,
    REFUSED,
    REWARD_CLASSES,
    ROLE,
    UNREAD,
    VALUES,
    VARIABLES,
    WORKERS_BY_VARIANT,
)
from roll.config.schema.model_rewards import MODEL_REWARDS
from roll.config.schema.pipelines import PIPELINES
from roll.config.schema.strategies import strategy_names
from roll.config.shipped import known_rewards
from roll.errors import Fault, FaultCode

LENGTHS = ("prompt_length", "response_length")
PREFERENCES = ("chosen_key", "rejected_key", "beta", "preference_loss")
"""Root keys of files that train on pairs."""
INSTRUCTION = "instruction"
"""Column of the prompts of pairs in ROLL."""
TRAINED = ("actor_train", "critic", "sft_train", "student")
"""Roles whose weights ROLL trains."""
OWN_LOSS = "if it changes the loss, write that as policy_loss: package.module:Name; see docs/extending.md"
OWN_ROLE = (
    "roll generates responses and log-probs itself; put what it changes into a reward or an environment; see "
    "docs/extending.md"
)
ROLLS_REWARDS = "roll.pipeline."
"""Start of the module paths of ROLL's own reward classes. A class elsewhere is the user's own, whatever its name."""
INSTRUCTIONS, REPETITION = "ifeval", "repetition_penalty"
COLUMNS = ("messages", "prompt", "input", "response", "text", "chosen", "rejected", "margin", "label", "system")
"""Keys of `data_args` that name a column of the rows."""
KNOWN = (
    {place.split(".")[0] for place in (*IGNORED, *REFUSED, *READ_AS)}
    | {"global_template", "use_pg_clip_range", "logits_topk", DEFINITIONS, NORM, *MANAGERS}
    | {key for schema in PIPELINES.values() for key in schema.model_fields}
)
"""Root keys with a meaning. Any other root key that `${...}` refers to is a variable in the user's file."""


@dataclass
class Translation:
    """A translated configuration, with the warnings and faults of the translation."""

    values: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    roll_keys: list[str] = field(default_factory=list)
    """Patterns of the keys in the file that exist in ROLL but not in roll."""
    is_whole: bool = True
    """False if a value that others depend on was not translated, so that further checks would report false faults."""
    sees: bool = False
    """Whether the file is one of RLVR with pictures."""

    def warn(self, warning: str) -> None:
        """Add a warning."""
        self.warnings.append(warning)

    def fault(self, place: str, problem: str, remedy: str, code: FaultCode) -> None:
        """Add a fault."""
        self.faults.append(Fault(place, problem, remedy, code))


def translate(plain: dict[str, Any], references: str) -> Translation:
    """Translate ROLL's keys, values and device expressions to those of the schema.

    Args:
        plain: The composed and resolved configuration. It is not modified.
        references: Text of the unresolved configuration. A root key in `VARIABLES` or outside `KNOWN` is dropped if
            this text refers to it, as `${name}` or `${name.key}`.
    """
    done = Translation(copy.deepcopy(plain))
    is_on_policy = _on_policy(done)
    done.sees = is_of_pictures(done.values)
    _critic_start(done)
    for name in list(done.values):
        if (name in VARIABLES or name not in KNOWN) and (f"${{{name}}}" in references or f"${{{name}." in references):
            del done.values[name]
    if done.sees:
        _pictures(done)
    _agentic(done)
    _rewards(done)
    _model_rewards(done)
    done.warnings += translate_reward_functions(done.values.get("rewards"))
    if is_on_policy:
        done.warnings += without_rewards(done.values.get("rewards"))
    _tracker_kwargs(done)
    _global_template(done)
    _worker_classes(done)
    _clip_range(done)
    _top_k(done)
    _unread_by_variant(done)
    _sglang(done)
    _ignored(done)
    _sequence_length(done)
    _rollout_mock(done)
    _refused(done)
    _questions(done)
    _read_as(done)
    _values(done)
    _instructions(done)
    _held_out_columns(done)
    _ulysses(done)
    _backend_timeout(done)
    _strategies(done)
    _devices(done)
    return done


def _on_policy(done: Translation) -> bool:
    """Read the roles of on-policy distillation. Return whether the file has them."""
    said = translate_on_policy(done.values)
    done.warnings += said
    done.roll_keys += ["student_train", "student_infer", "is_pure_opd"] if said else []
    return bool(said)


def _pictures(done: Translation) -> None:
    read = translate_pictures(done.values)
    done.roll_keys += read.keys
    done.warnings += read.warnings


def _rollout_mock(done: Translation) -> None:
    """Drop `rollout_mock` if it is off or only writes the rollouts, which changes nothing in training."""
    block = done.values.get("rollout_mock")
    if isinstance(block, dict) and (block.get("enable") is not True or block.get("mode", "dump") == "dump"):
        del done.values["rollout_mock"]
        done.roll_keys.append("rollout_mock")
        done.warn(f"rollout_mock: {printable(block)} is ignored; responses go to `samples.jsonl` in output_dir")


def _agentic(done: Translation) -> None:
    read = translate_agentic(done.values)
    done.roll_keys += read.keys
    done.warnings += read.warnings
    done.faults += read.faults
    done.is_whole = done.is_whole and read.is_whole


def _ignored(done: Translation) -> None:
    for pattern, reason in IGNORED.items():
        for place, block in matches(done.values, pattern.split(".")):
            done.roll_keys.append(pattern)
            done.warn(f"{dotted(place)}: {printable_at(place, block.pop(place[-1]))} is ignored; {reason}")


def _sequence_length(done: Translation) -> None:
    """Read `sequence_length` as the lengths of prompt and response, unless they are set or there are environments."""
    if "sequence_length" not in done.values or done.values.get("environments"):
        return
    done.roll_keys.append("sequence_length")
    if isinstance(done.values["sequence_length"], int) and (cut := _cut_of_rows(done.values)):
        _limit_rows(done, cut)
        return
    value, missing = done.values.pop("sequence_length"), [key for key in LENGTHS if key not in done.values]
    if value is None:
        return
    prompt, response = (done.values.get(key) for key in LENGTHS)
    if not missing or not isinstance(value, int):
        difference = (
            f"; ROLL limits both together to {printable(value)}, roll to {prompt} + {response}" if not missing else ""
        )
        said = f"{printable(value)} is ignored without environments; use prompt_length and response_length{difference}"
        done.warn(f"sequence_length: {said}")
        return
    given = prompt if isinstance(prompt, int) else response if isinstance(response, int) else 0
    rest = value - given if value > given else value
    done.values |= dict.fromkeys(missing, rest)
    said = " and ".join(f"{key}={rest}" for key in missing)
    total = (
        f"; ROLL truncates the whole row to {value} tokens, so set two lengths with this sum"
        if not given
        else "; use that instead"
    )
    done.warn(f"sequence_length: {printable(value)} is read as {said}{total}")


def _cut_of_rows(values: Mapping[str, Any]) -> str | None:
    """Return what ROLL does with a row above `sequence_length`, as `truncation`; None unless it trains on rows."""
    pipeline = values.get("pipeline")
    if pipeline == "distill" or pipeline is None and "student" in values:
        return "end"
    on_rows = "sft_train" in values or any(key in values for key in PREFERENCES)
    return "drop" if pipeline in ("sft", "dpo") or pipeline is None and on_rows else None


def _limit_rows(done: Translation, cut: str) -> None:
    """Read `sequence_length` as `max_length`: where ROLL trains on rows, it has no lengths of prompt and response."""
    value = done.values.pop("sequence_length")
    ignored = [f"{key} {printable(done.values.pop(key))}" for key in LENGTHS if key in done.values]
    said = f"; {' and '.join(ignored)}, which ROLL does not read here, is ignored" if ignored else ""
    done.values |= {"max_length": value, "truncation": cut}
    done.warn(f"sequence_length: {value} is read as max_length={value}, truncation={cut}{said}")


def _refused(done: Translation) -> None:
    for pattern, instead in REFUSED.items():
        for place, block in matches(done.values, pattern.split(".")):
            done.roll_keys.append(pattern)
            value = block.pop(place[-1])
            if value is None or value == HOLDS.get(pattern):
                done.warn(f"{dotted(place)}: {printable(value)} is what roll always does; remove the key")
            else:
                problem = f"{printable_at(place, value)} has no counterpart here"
                done.fault(dotted(place), problem, f"remove it; {instead}", "not_supported")


def _questions(done: Translation) -> None:
    """Read the columns of the student's rows. ROLL puts the question on a new line, after the prompt if any."""
    if not isinstance(done.values.get("student"), dict) or "question_key" not in done.values:
        return
    question, prompt = done.values.pop("question_key"), done.values.pop("prompt_key", None)
    done.roll_keys += ["question_key", "prompt_key"]
    if prompt is None:
        differs = "ROLL puts a line break before the question, roll does not"
        _say(done, ("question_key",), question, "student.data_args.prompt", question, differs)
    else:
        _say(done, ("prompt_key",), prompt, "student.data_args.prompt", prompt)
        _say(done, ("question_key",), question, "student.data_args.input", question)


def _read_as(done: Translation) -> None:
    for pattern, new in READ_AS.items():
        for place, block in matches(done.values, pattern.split(".")):
            done.roll_keys.append(pattern)
            value, target = block.pop(place[-1]), new.replace(ROLE, place[0])
            meanings = MEANINGS.get(pattern)
            if meanings is None:
                _say(done, place, value, target, value)
            elif not isinstance(value, str | bool) or value not in meanings:
                done.fault(
                    dotted(place),
                    f"{printable(value)} has no counterpart here",
                    f"remove it and set {target}",
                    "not_supported",
                )
            elif meanings[value] is None:
                done.warn(
                    f"{dotted(place)}: {printable(value)} is what roll always does; "
                    f"remove the key (it is {target} here)"
                )
            else:
                _say(done, place, value, target, meanings[value], DIFFERS.get(pattern, {}).get(value, ""))


def _say(done: Translation, place: tuple[str, ...], value: Any, target: str, meaning: Any, differs: str = "") -> None:
    """Move the value of one of ROLL's keys to roll's key. It is a fault if that key already has another value.

    Args:
        place: Path of ROLL's key.
        value: Value of ROLL's key.
        target: Path of roll's key.
        meaning: Value of roll's key.
        differs: Difference between the behaviour of ROLL and of roll, for the warning.
    """
    *above, key = target.split(".")
    block: Any = done.values
    for step in above:
        block = block.setdefault(step, {}) if isinstance(block, dict) else None
    if not isinstance(block, dict):
        return  # The schema reports a value that is not a block.
    if block.setdefault(key, meaning) != meaning:
        problem = f"{printable(value)}, but {target} is {printable(block[key])}"
        done.fault(dotted(place), problem, f"remove it; {target} replaces it here", "contradiction")
    else:
        difference = f"; {differs}" if differs else ""
        done.warn(f"{dotted(place)}: {printable(value)} is read as {target}={meaning}; use that instead{difference}")


def _values(done: Translation) -> None:
    for pattern, translations in VALUES.items():
        for place, block in matches(done.values, pattern.split(".")):
            old = block[place[-1]]
            if isinstance(old, str | bool | None) and old in translations:
                block[place[-1]] = translations[old]
                done.warn(
                    f"{dotted(place)}: {printable(old)} is read as {translations[old] or 'null'}; use that instead"
                )


def _instructions(done: Translation) -> None:
    """Name the column of the prompts of pairs: ROLL has no key for it, and always reads `instruction`."""
    role = done.values.get("actor_train")
    rows = role.get("data_args") if isinstance(role, dict) else None
    of_roll = not {"chosen_key", "rejected_key"}.isdisjoint(done.roll_keys)
    if of_roll and isinstance(rows, dict) and not any(key in rows for key in ("prompt", "messages")):
        rows["prompt"] = INSTRUCTION
        text = f"missing, so it is {INSTRUCTION}, the column that ROLL always reads; set it explicitly"
        done.warn(f"actor_train.data_args.prompt: {text}")


def _held_out_columns(done: Translation) -> None:
    """Copy the columns and the template of the training rows to held-out rows that name no columns."""
    learnt = [(name, block["data_args"]) for (name, _), block in matches(done.values, (ROLE, "data_args"))]
    if not learnt or not isinstance(learnt[0][1], dict):
        return
    name, source = learnt[0]
    further = ("ground_truth", "template", *(("images", "tag") if done.sees else ()))
    for place, held_out in _held_out_rows(done.values):
        taken = {key: source[key] for key in (*COLUMNS, *further) if key in source and key not in held_out}
        if any(key in COLUMNS for key in taken) and not any(key in held_out for key in COLUMNS):
            held_out.update(taken)
            said = ", ".join(f"{key}: {value}" for key, value in taken.items())
            done.warn(f"{place}: names no columns, so those of {name}.data_args are used ({said}); set them explicitly")


def _held_out_rows(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key path and the `data_args` of every held-out set."""
    for pattern in (("validation", "data_args"), ("validation", "sets", "*", "data_args")):
        for place, block in matches(values, pattern):
            if isinstance(block[place[-1]], dict):
                yield dotted(place), block[place[-1]]


def _global_template(done: Translation) -> None:
    """Read `global_template` as the template of all training and held-out rows."""
    if "global_template" not in done.values:
        return
    done.roll_keys.append("global_template")
    template = done.values.pop("global_template")
    if template is None:
        done.warn("global_template: null is what roll always does; remove the key")
        return
    learnt = [(dotted(place), block["data_args"]) for place, block in matches(done.values, (ROLE, "data_args"))]
    read = [(place, rows) for place, rows in learnt if isinstance(rows, dict) and "file_name" in rows]
    places = [*read, *_held_out_rows(done.values)]
    for place, rows in places:
        if rows.setdefault("template", template) != template:
            problem = f"{printable(template)}, but {place}.template is {printable(rows['template'])}"
            done.fault("global_template", problem, "remove one of the two", "contradiction")
    targets = " and ".join(f"{place}.template" for place, _ in places)
    said = f"read as {targets}; use that instead" if places else "ignored; no data_args names a file; remove the key"
    done.warn(f"global_template: {printable(template)} is {said}")


def _unread_by_variant(done: Translation) -> None:
    """Drop root keys that ROLL's files set for every variant of the policy loss, if the chosen one reads none."""
    for place, block in matches(done.values, ("actor_train", "pg_variant")):
        variant = block[place[-1]]
        for key in UNREAD.get(variant, ()) if isinstance(variant, str) else ():
            if key in done.values:
                value = done.values.pop(key)
                done.warn(
                    f"{key}: {printable(value)} is ignored; pg_variant {variant} does not read it; remove the key"
                )


def _worker_classes(done: Translation) -> None:
    """Drop classes of roles that roll has counterparts for. Others are faults: roll would train another loss."""
    for place, block in matches(done.values, (ROLE, "worker_cls")):
        role, given = place[0], str(block.pop("worker_cls"))
        done.roll_keys.append("<role>.worker_cls")
        if given not in OWN_WORKERS:
            remedy = f"remove it; {OWN_LOSS if role in TRAINED else OWN_ROLE}"
            done.fault(dotted(place), f"{printable(given)} cannot run here", remedy, "not_supported")
        else:
            said = "a role's class follows from its strategy; use strategy_args.strategy_name"
            done.warn(f"{dotted(place)}: {printable(given)} is ignored; {said}")
        is_ppo = given in OWN_WORKERS and given not in WORKERS_BY_VARIANT
        if role == "actor_train" and is_ppo and block.get("pg_variant") not in (None, "ppo"):
            variant = block.pop("pg_variant")
            done.warn(
                f"actor_train.pg_variant: {printable(variant)} is ignored; ROLL reads it only with an ActorPGWorker, "
                f"so the loss is PPO's; set policy_loss"
            )
        if role == "actor_train" and given in WORKERS_BY_VARIANT:
            block.setdefault("pg_variant", "vanilla")


def _critic_start(done: Translation) -> None:
    """Start a critic without a model of its own from `reward_pretrain`, as ROLL does."""
    critic, start = done.values.get("critic"), done.values.get(CRITIC_START)
    models = critic.setdefault("model_args", {}) if isinstance(critic, dict) else None
    if isinstance(models, dict) and start and models.get("model_name_or_path") is None:
        models["model_name_or_path"] = start
        done.roll_keys.append(CRITIC_START)
        del done.values[CRITIC_START]
        target = f"critic.model_args.model_name_or_path={start}"
        done.warn(
            f"{CRITIC_START}: {printable(start)} is read as {target}, where ROLL's critic starts; use that instead"
        )


def _clip_range(done: Translation) -> None:
    """Drop `pg_clip_low` and `pg_clip_high` if `use_pg_clip_range` is false: ROLL then reads `pg_clip`."""
    if "use_pg_clip_range" not in done.values:
        return
    done.roll_keys.append("use_pg_clip_range")
    if done.values.pop("use_pg_clip_range"):
        done.warn(
            "use_pg_clip_range: true is what roll always does if pg_clip_low and pg_clip_high are set; remove the key"
        )
        return
    dropped = [key for key in ("pg_clip_low", "pg_clip_high") if done.values.pop(key, None) is not None]
    said = f"so {' and '.join(dropped)} are ignored; remove them and this key" if dropped else "remove the key"
    done.warn(f"use_pg_clip_range: false, {said}")


def _top_k(done: Translation) -> None:
    """Read `logits_topk` as `distill_top_k`; 0 is the whole vocabulary."""
    if "logits_topk" not in done.values:
        return
    done.roll_keys.append("logits_topk")
    value = done.values.pop("logits_topk")
    if isinstance(value, int) and value > 0:
        differs = "roll merges all other tokens into one, ROLL leaves them out"
        _say(done, ("logits_topk",), value, "distill_top_k", value, differs)
    else:
        done.warn(f"logits_topk: {printable(value)} is ignored; the whole vocabulary is compared; remove the key")


def _ulysses(done: Translation) -> None:
    """Read `model_args.ulysses_size` as DeepSpeed's `sequence_parallel_size`. Drop it where nothing is trained."""
    for place, block in matches(done.values, (ROLE, "model_args", "ulysses_size")):
        value, strategy = block.pop(place[-1]), done.values[place[0]].get("strategy_args")
        if isinstance(strategy, dict) and strategy.get("strategy_name") in ("deepspeed_train", "fsdp2_train"):
            _say(done, place, value, f"{place[0]}.strategy_args.strategy_config.sequence_parallel_size", value)
        else:
            done.warn(f"{dotted(place)}: {printable(value)} is ignored; only deepspeed_train has sequence parallelism")


def _sglang(done: Translation) -> None:
    """Read `num_gpus_per_worker` as the `tensor_parallel_size` of SGLang, which decides its default in ROLL."""
    for place, block in matches(done.values, (ROLE, "num_gpus_per_worker")):
        strategy = block.get("strategy_args")
        if isinstance(strategy, dict) and strategy.get("strategy_name") == "sglang":
            value, config = block.pop("num_gpus_per_worker"), strategy.get("strategy_config")
            if isinstance(config, dict) and "tensor_parallel_size" in config:
                done.warn(f"{dotted(place)}: {printable(value)} is ignored; tensor_parallel_size replaces it")
            else:
                _say(done, place, value, f"{place[0]}.strategy_args.strategy_config.tensor_parallel_size", value)


def _backend_timeout(done: Translation) -> None:
    """Read the longest `backend_timeout`, in minutes, as `deadlines.collective`, in seconds, unless that is set."""
    found = [(place, block.pop(place[-1])) for place, block in matches(done.values, (ROLE, "backend_timeout"))]
    minutes = [
        value for _, value in found if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    ]
    deadlines = done.values.setdefault("deadlines", {}) if minutes else None
    seconds = deadlines.setdefault("collective", 60 * max(minutes)) if isinstance(deadlines, dict) else None
    for place, value in found:
        if value in minutes:
            said = f"deadlines.collective={printable(seconds)} (in seconds, for all roles); set it there"
            done.warn(f"{dotted(place)}: {printable(value)} min is replaced by {said}")
        else:
            done.fault(
                dotted(place),
                f"{printable(value)} is not a number of minutes",
                "use deadlines.collective, in seconds",
                "wrong_type",
            )


def _rewards(done: Translation) -> None:
    """Read `worker_cls` as `reward`, unless `reward` is set. A class without a counterpart is a fault."""
    for place, block in matches(done.values, ("rewards", "*", "worker_cls")):
        done.roll_keys.append("rewards.*.worker_cls")
        class_path = str(block.pop("worker_cls"))
        module, _, class_name = class_path.rpartition(".")
        name = REWARD_CLASSES.get(class_name) if module.startswith(ROLLS_REWARDS) else None
        if "reward" in block:
            done.warn(f"{dotted(place)}: {printable(class_path)} is ignored; `reward` chooses this domain's reward")
        elif name:
            if name == INSTRUCTIONS and "parts" not in block and "reward_args" not in block:
                block["parts"] = {INSTRUCTIONS: {}, REPETITION: {}}
                said = (
                    f"read as the parts {INSTRUCTIONS} and {REPETITION}, which ROLL adds to each verdict; use parts "
                    f"instead"
                )
                done.warn(f"{dotted(place)}: {said}")
                continue
            if name != place[1]:
                block["reward"] = name
            done.warn(f"{dotted(place)}: read as reward={name}; use that instead")
            done.warnings += [f"{dotted(place[:-1])}.{said}" for said in judge_as_roll(name, block)]
            if name == BOXES and SEES_PIXELS.search(str(done.values.get("pretrain"))):
                done.warnings += [f"{dotted(place[:-1])}.{said}" for said in in_pixels(block)]
            if name == SANDBOX and "timeout" not in block:
                block["timeout"] = SANDBOX_TIMEOUT
                done.warn(f"{dotted(place[:-1])}.timeout: not set, so it is {SANDBOX_TIMEOUT:g} s; set it explicitly")
        else:
            domain = dotted(place[:-1])
            known = ", ".join([*known_rewards(), *MODEL_REWARDS])
            remedy = f"set {domain}.reward to {known} or package.module:function, or remove it: ~{domain}"
            done.fault(dotted(place), f"{printable(class_path)} has no counterpart here", remedy, "not_supported")
            done.is_whole = False


def _model_rewards(done: Translation) -> None:
    """Translate the blocks of reward models in the same way as those of a role."""

    def part(values: dict[str, Any]) -> tuple[dict[str, Any], list[str], list[Fault]]:
        read = translate(values, "")
        return read.values, read.warnings, read.faults

    warnings, faults = translate_model_rewards(done.values.get("rewards"), part)
    done.warnings += warnings
    done.faults += faults


def _tracker_kwargs(done: Translation) -> None:
    """Move the tracker's arguments into a block with the tracker's name. ROLL has them in `tracker_kwargs` directly."""
    tracker, arguments = done.values.get("track_with", "tensorboard"), done.values.get("tracker_kwargs")
    if (
        not isinstance(tracker, str)
        or not isinstance(arguments, dict)
        or not arguments
        or any(name in TRACKERS for name in arguments)
    ):
        return
    done.values["tracker_kwargs"] = {} if tracker == "none" else {tracker: arguments}
    read = f"read as tracker_kwargs.{tracker}; put the arguments under the tracker's name"
    said = "ignored, because track_with is none; remove the key" if tracker == "none" else read
    done.warn(f"tracker_kwargs: {said}")


def _strategies(done: Translation) -> None:
    """Read `strategy_config: ~` of an engine as the defaults, its `dtype` as the role's `model_args.dtype`."""
    engines = strategy_names("generate_settings")
    for _, block in matches(done.values, (ROLE, "strategy_args", "strategy_config")):
        if block["strategy_config"] is None and block.get("strategy_name") in engines:
            del block["strategy_config"]
    for place, block in matches(done.values, (ROLE, "strategy_args", "strategy_config", "dtype")):
        value = block.pop("dtype")
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(str(value), value)
        _say(done, place, value, f"{place[0]}.model_args.dtype", short)


def _devices(done: Translation) -> None:
    for place, block in matches(done.values, (ROLE, "device_mapping")):
        text = block["device_mapping"]
        if not isinstance(text, str):
            continue
        try:
            block["device_mapping"] = parse_devices(text)
        except ValueError as error:
            done.fault(
                dotted(place), f"{printable(text)} is not a list of devices: {error}", f"write {FORMS}", "malformed"
            )
            block["device_mapping"] = None
            done.is_whole = False


def referenced_text(raw: Any) -> str:
    """Return the unresolved configuration as text, for the search for `${...}`."""
    return json.dumps(raw, default=str)
