"""Translates ROLL's agentic files: environments by tag, groups of episodes, lengths, and the normalisation of rewards.

custom_envs.<tag>     ──▶ environments.<tag>
train_env_manager     ──▶ rollout_batch_size, num_return_sequences_in_group, environments.<tag>.rows
val_env_manager       ──▶ validation.sets.<tag>
reward_normalization  ──▶ adv_estimator, norm_mean_type, norm_std_type
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.schema.faults import printable
from roll.config.schema.foreign_names import OF_ENVIRONMENTS, OF_MANAGERS
from roll.errors import Fault, FaultCode

MANAGERS = ("train_env_manager", "val_env_manager")
DEFINITIONS, NORM = "custom_envs", "reward_normalization"
TYPES = ("frozen_lake", "sokoban")
"""Values of `env_type` that are names of environments here."""
IDLE = {"frozen_lake": 0.0, "sokoban": -0.1}
"""Reward of a step without an action, which ROLL adds to `format_penalty`."""
WHOLE_EPISODES, SINGLE_TURNS = "TrajEnvManager", "StepEnvManager"
"""ROLL's managers: the conversation of an episode is one sequence, or each turn is one, with a prompt of its own."""
MOST_POSITIONS = 32768
"""Longest whole episode that is assumed for `SINGLE_TURNS`: the positions of Qwen2.5, which ROLL's files train."""
OF_SINGLE_TURNS = ("{history}", "{current_observation}")
"""Placeholders in the template of `SINGLE_TURNS`."""
USUAL_GROUPS = 128
"""ROLL's default of `num_env_groups`."""
DEFINED = ("env_type", "env_manager_cls", "env_config", "max_steps", "max_tokens_per_step")
"""Keys of an environment's definition that are read."""
MANAGED = (
    "tags",
    "num_groups_partition",
    "group_size",
    "num_env_groups",
    "max_env_num_per_worker",
    "generating_args",
    "worker_cls",
)
"""Keys of a manager that are read."""
ALL_GROUPS = "roll.pipeline.agentic.agentic_pipeline.GroupFilter"
"""ROLL's filter of groups that keeps every group."""
OWN_MANAGER = "roll.pipeline.agentic.environment_worker.EnvironmentWorker"
TEMPLATES = ("agent_system_template", "agent_template")
METHODS = {"mean_std": ("mean", "std"), "asym_clip": ("mean", "std"), "mean": ("mean",), "identity": ()}
"""Values of `reward_normalization.method`, with their statistics. ROLL v0.2.1 computes `mean_std` for `asym_clip`."""
UNSCALED = ("global_scale_factor", "global_shift_value")
"""Keys of `reward_normalization` that ROLL v0.2.1 itself never reads."""
STEP_DISCOUNT, USUAL_DISCOUNT = "step_reward_gamma", 0.95
"""ROLL's key of the discount per turn, and its default."""
NORMS = ("grouping", "method", "norm_mean_type", "norm_std_type")
SCOPES = {"traj_group_id": "group", "tags": "domain", "batch": "batch"}
"""Values of `reward_normalization.grouping`, and roll's counterparts. A tag in ROLL is a domain in roll."""
COMPARES = {("mean", "std"): "grpo", ("mean",): "dr_grpo"}
"""Estimators that normalise by these statistics within a group."""


class Agentic:
    """Translates the values of one file in place to the keys of the schema."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self.keys: list[str] = []
        """Key paths of ROLL's keys in the file."""
        self.warnings: list[str] = []
        self.faults: list[Fault] = []
        self.is_whole = True
        """False if an environment was not translated, so that checks between keys would report false faults."""

    def warn(self, warning: str) -> None:
        """Add a warning, once."""
        if warning not in self.warnings:
            self.warnings.append(warning)

    def fault(self, place: str, problem: str, remedy: str, code: FaultCode) -> None:
        """Add a fault."""
        self.faults.append(Fault(place, problem, remedy, code))

    def translate(self) -> None:
        """Translate the file, if it is an agentic one."""
        train, val = (self._block(name) for name in MANAGERS)
        for name, manager in zip(MANAGERS, (train, val), strict=True):
            self._unmanaged(name, manager or {})
        definitions = self._block(DEFINITIONS)
        tags = list(dict.fromkeys([*_tags(train), *_tags(val)]))
        unnamed = [str(tag) for tag in definitions or {} if tag not in tags]
        self.warnings += [
            f"{DEFINITIONS}.{tag}: ignored; no manager names this tag; add it to {MANAGERS[0]}.tags" for tag in unnamed
        ]
        if train is None and val is None:
            return
        environments = {tag: self._environment(tag, (definitions or {}).get(tag)) for tag in tags}
        self._values.setdefault("environments", {}).update(
            {tag: one for tag, one in environments.items() if one is not None}
        )
        self._lengths(definitions or {}, tags)
        self._training(train or {})
        self._validation(val or {})
        self._sampling(train or {}, val or {})
        self._discount()
        self._normalisation()
        self._rows_of_files()

    def _block(self, name: str) -> dict[str, Any] | None:
        block = self._values.pop(name, None)
        if block is None:
            return None
        self.keys.append(name)
        if isinstance(block, dict):
            return block
        self.fault(
            name, f"{printable(block)} is not a block of keys", "make it a block of keys, or remove it", "wrong_type"
        )
        return None

    def _unmanaged(self, name: str, manager: Mapping[str, Any]) -> None:
        """Report managers' keys that are not read. A user's class or proxy is a fault: it decides what is trained."""
        proxy, given = (
            manager.get("llm_proxy") or {},
            {key: value for key, value in manager.items() if value is not None},
        )
        of_policy = isinstance(proxy, dict) and proxy.get("proxy_type", "policy") == "policy"
        own = {
            "group_filter_cls": (
                given.get("group_filter_cls") == ALL_GROUPS,
                "use dynamic_sampling, which drops groups of equal rewards",
            ),
            "worker_cls": (
                given.get("worker_cls") == OWN_MANAGER,
                "write an environment or an agent; see docs/extending.md",
            ),
            "llm_proxy": (of_policy, "episodes are always sampled from the policy"),
        }
        for key, value in given.items():
            place = f"{name}.{key}"
            if key in own:
                is_rolls, instead = own[key]
                if is_rolls:
                    self.warn(f"{place}: {printable(value)} is what roll always does; remove the key")
                else:
                    self.fault(
                        place, f"{printable(value)} has no counterpart here", f"remove it; {instead}", "not_supported"
                    )
            elif key in OF_MANAGERS:
                self.warn(f"{place}: {printable(value)} is ignored; {OF_MANAGERS[key]}")
            elif key not in MANAGED:
                self.fault(
                    place,
                    f"{printable(value)} has no counterpart here",
                    f"remove it where {name} is defined",
                    "not_supported",
                )

    def _environment(self, tag: str, definition: Any) -> dict[str, Any] | None:
        where = f"{DEFINITIONS}.{tag}"
        if (own := self._values.get("environments", {}).get(tag)) is not None:
            return self._users(where, tag, own, definition)
        if not isinstance(definition, dict):
            self.fault(
                where,
                "missing, but a manager names this tag",
                f"define it, or add environments.{tag}.environment",
                "missing",
            )
            return None
        kind, manager = definition.get("env_type"), str(definition.get("env_manager_cls") or WHOLE_EPISODES)
        if kind not in TYPES:
            remedy = f"use {' or '.join(TYPES)}, or set environments.{tag}.environment=package.module:Class"
            self.fault(f"{where}.env_type", f"there is no environment {printable(kind)} here", remedy, "unknown_name")
            self.is_whole = False
            return None
        if manager.rpartition(".")[2] not in (WHOLE_EPISODES, SINGLE_TURNS):
            problem = f"{printable(manager)} has no counterpart here"
            remedy = f"remove it; an episode is always one conversation, as with {WHOLE_EPISODES}"
            self.fault(f"{where}.env_manager_cls", problem, remedy, "not_supported")
        own = definition.get("env_config") or {}
        templates = {key: definition[key] for key in TEMPLATES if definition.get(key) is not None}
        if manager.rpartition(".")[2] == SINGLE_TURNS:
            self._single_turns(where, templates)
        said = definition.get("max_tokens_per_step")
        response = {"max_response_length": said} if said is not None else {}
        turns = definition.get("max_steps") or own.get("max_steps")
        read = {
            "environment": kind,
            "environment_args": {**self._penalised(where, kind, own), **templates, **response},
            **({"max_turns": turns} if turns is not None else {}),
        }
        unknown = set(definition) - {*DEFINED, *TEMPLATES, *OF_ENVIRONMENTS}
        self.warnings += [
            f"{where}.{key}: {printable(definition[key])} is ignored; {why}"
            for key, why in OF_ENVIRONMENTS.items()
            if definition.get(key) is not None
        ]
        self.faults += [
            Fault(
                f"{where}.{key}",
                f"{printable(definition[key])} has no counterpart here",
                f"remove it where {where} is defined",
                "not_supported",
            )
            for key in sorted(unknown)
        ]
        self.warn(f"{where}: read as environments.{tag} with environment={kind}; use that instead")
        return read

    def _single_turns(self, where: str, templates: dict[str, Any]) -> None:
        """Say that turns with prompts of their own become one conversation, and drop a template of such prompts."""
        said = "is read as one conversation for each episode, in which a turn sees all earlier ones"
        text = f"{SINGLE_TURNS} {said}; in ROLL each turn is a sequence, and batch sizes count turns"
        self.warn(f"{where}.env_manager_cls: {text}; here they count episodes")
        if any(name in str(templates.get(TEMPLATES[1])) for name in OF_SINGLE_TURNS):
            del templates[TEMPLATES[1]]
            said = "ignored; it is a prompt for one turn, so the environment's own template is used"
            self.warn(f"{where}.{TEMPLATES[1]}: {said}; write one with {{observation}}")

    def _users(self, where: str, tag: str, own: Any, definition: Any) -> Any:
        """Return the user's own environment of a tag, with the number of turns of the definition that it replaces."""
        if isinstance(own, dict) and isinstance(definition, dict):
            if (turns := definition.get("max_steps")) is not None:
                own.setdefault("max_turns", turns)
            self.warn(f"{where}: ignored except for max_steps, because environments.{tag} replaces it; remove it")
        return own

    def _penalised(self, where: str, kind: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return `env_config` with the reward of an unreadable action: ROLL's penalty (or 0) plus an idle step's."""
        penalty = own.get("format_penalty", 0.0)
        if not isinstance(penalty, int | float):
            return dict(own)
        paid = round(penalty + IDLE[kind], 9)
        if paid != own.get("format_penalty"):
            said = f"{printable(own.get('format_penalty'))} is read as environment_args.format_penalty={paid:g}"
            self.warn(f"{where}.env_config.format_penalty: {said}; use that instead")
        return {**own, "format_penalty": paid}

    def _lengths(self, definitions: Mapping[str, Any], tags: list[str]) -> None:
        """Set `response_length` to the limit of a turn, and `prompt_length` to the rest of `sequence_length`, unless
        they are given.

        `prompt_length` limits the first observation.
        """
        values, found = (
            self._values,
            [definitions[tag].get("max_tokens_per_step") for tag in tags if isinstance(definitions.get(tag), dict)],
        )
        steps = [value for value in found if isinstance(value, int)]
        if steps and "response_length" not in values:
            values["response_length"] = max(steps)
            self.warn(
                f"max_tokens_per_step: read as response_length={max(steps)}, the limit of each turn; use that instead"
            )
        longest, turn = values.get("sequence_length"), values.get("response_length")
        if isinstance(longest, int) and isinstance(turn, int) and longest > turn and "prompt_length" not in values:
            values["prompt_length"] = longest - turn
            self.warn(f"prompt_length: missing, so it is {longest - turn}, the rest of sequence_length; set it")
        self._whole_episodes([definitions[tag] for tag in tags if isinstance(definitions.get(tag), dict)])

    def _whole_episodes(self, definitions: Sequence[Mapping[str, Any]]) -> None:
        """Let `sequence_length`, which limits a turn with `SINGLE_TURNS`, limit as many turns as an episode has."""
        longest = self._values.get("sequence_length")
        turns = [one.get("max_steps") for one in definitions if SINGLE_TURNS in str(one.get("env_manager_cls"))]
        most = max((value for value in turns if isinstance(value, int)), default=1)
        if isinstance(longest, int) and most > 1:
            whole = max(longest, min(longest * most, MOST_POSITIONS))
            self._values["sequence_length"] = whole
            said = f"{longest} limits one turn in ROLL with {SINGLE_TURNS}, so it is read as {whole}"
            self.warn(f"sequence_length: {said} for {most} turns; set the length of a whole episode")

    def _training(self, train: Mapping[str, Any]) -> None:
        size = train.get("group_size", 1)
        if not isinstance(size, int) or size < 1:
            self.fault(
                "train_env_manager.group_size",
                f"{printable(size)} is not a number of episodes",
                "set it to 1 or more",
                "out_of_range",
            )
            return
        episodes = self._values.get("rollout_batch_size")
        if isinstance(episodes, int):
            if episodes % size:
                problem = f"{episodes} episodes are not divisible by train_env_manager.group_size, {size}"
                self.fault("rollout_batch_size", problem, f"set it to a multiple of {size}", "not_divisible")
            self._values["rollout_batch_size"] = episodes // size
            said = f"{episodes} episodes in groups of {size} are read as rollout_batch_size={episodes // size}"
            self.warn(f"rollout_batch_size: {said} and num_return_sequences_in_group={size}; use that instead")
        self._values.setdefault("num_return_sequences_in_group", size)
        steps = self._values.get("max_steps")
        for tag, groups in self._partition("train_env_manager", train):
            section = self._values["environments"].get(tag)
            if section is not None:
                section["rows"] = groups * (steps if isinstance(steps, int) else 1)
                section |= _sessions(train)
        if train:
            targets = "environments, rollout_batch_size, num_return_sequences_in_group and actor_infer.generating_args"
            self.warn(f"train_env_manager: read as {targets}; use those instead")
        if train.get("num_env_groups") is not None:
            self.warn(
                f"train_env_manager.num_env_groups: {printable(train['num_env_groups'])} does not limit the running "
                f"groups; "
                "a group starts as soon as there is room, and max_running_samples limits the number of running episodes"
            )

    def _validation(self, val: Mapping[str, Any]) -> None:
        sets = {}
        for tag, groups in self._partition("val_env_manager", val):
            section = self._values["environments"].get(tag)
            if section is not None:
                sets[tag] = {"rows": {tag: groups}}
                section.update({key: value for key, value in _sessions(val).items() if key not in section})
        if not sets:
            if val:
                self.warn(
                    f"val_env_manager: {printable(dict(val))} is ignored; no tag has a group of tasks; add tags, or "
                    f"remove the block"
                )
            return
        block = self._values.setdefault("validation", {})
        block.setdefault("sets", {}).update(sets)
        samples = val.get("group_size", 1)
        block.setdefault("generating_args", {}).setdefault("num_return_sequences", samples)
        named = ", ".join(f"{tag} {one['rows'][tag]}" for tag, one in sets.items())
        self.warn(f"val_env_manager: read as validation.sets with {named}, each {samples} times; use that instead")

    def _partition(self, name: str, manager: Mapping[str, Any]) -> list[tuple[str, int]]:
        """Return each tag that has groups, with their number. A single tag needs no partition: it has all groups."""
        tags, counts = _tags(manager), manager.get("num_groups_partition")
        if counts is None and len(tags) <= 1:
            if tags and manager.get("num_env_groups") is None:
                self.warn(f"{name}.num_env_groups: missing, so it is {USUAL_GROUPS}, ROLL's default; set it explicitly")
            counts = [manager.get("num_env_groups") or USUAL_GROUPS] * len(tags)
        if not isinstance(counts, list | tuple) or len(counts) != len(tags):
            problem = f"{printable(counts)}, but there are {len(tags)} tags: {', '.join(tags)}"
            self.fault(
                f"{name}.num_groups_partition", problem, "list one number of groups for each tag", "contradiction"
            )
            return []
        return [(tag, count) for tag, count in zip(tags, counts, strict=True) if isinstance(count, int) and count > 0]

    def _sampling(self, train: Mapping[str, Any], val: Mapping[str, Any]) -> None:
        """Set the sampling of training and validation: by `actor_infer` for both if it has any, else by manager."""
        infer = self._values.setdefault("actor_infer", {})
        if not isinstance(infer, dict):
            return
        common = infer.get("generating_args")
        for name, manager in zip(MANAGERS, (train, val), strict=True):
            if common and manager.get("generating_args") not in (None, common):
                self.warn(
                    f"{name}.generating_args: ignored, because actor_infer.generating_args replaces it in ROLL; remove "
                    f"it"
                )
        if learnt := self._sampled("actor_infer" if common else MANAGERS[0], common or train.get("generating_args")):
            infer["generating_args"] = learnt
        block, held_out = (
            self._values.get("validation"),
            self._sampled(MANAGERS[1], common or val.get("generating_args")),
        )
        if isinstance(block, dict) and held_out:
            block["generating_args"] = {**held_out, **(block.get("generating_args") or {})}
            if common:
                self.warn(
                    "actor_infer.generating_args: used for validation too, as in ROLL; set validation.generating_args"
                )

    def _sampled(self, name: str, given: Any) -> dict[str, Any] | None:
        """Return ROLL's sampling of episodes: no `num_return_sequences`, turns of at most `response_length` tokens."""
        if not isinstance(given, dict):
            return None
        read, turn = dict(given), self._values.get("response_length")
        if (samples := read.pop("num_return_sequences", None)) is not None:
            self.warn(f"{name}.generating_args.num_return_sequences: {printable(samples)} is ignored; use group_size")
        most = read.get("max_new_tokens")
        if isinstance(most, int) and isinstance(turn, int) and most > turn:
            read["max_new_tokens"] = turn
            said = f"{most} is read as {turn}, because max_tokens_per_step is smaller"
            self.warn(f"{name}.generating_args.max_new_tokens: {said}; use that instead")
        return read

    def _discount(self) -> None:
        """Read `step_reward_gamma` as the discount per turn of `step_reinforce`. Drop it if ROLL does not read it."""
        values, estimator = self._values, self._values.get("adv_estimator")
        if estimator == "step_reinforce":
            given = values.pop(STEP_DISCOUNT, None)
            discount = USUAL_DISCOUNT if given is None else given
            said = f"{printable(given)} is" if given is not None else f"missing, so {discount}, ROLL's default, is"
            if values.get("gamma", discount) != discount:
                said = f"{said} used instead of gamma {printable(values['gamma'])}, and"
            values["gamma"] = discount
            self.warn(f"{STEP_DISCOUNT}: {said} read as gamma={discount}, the discount per turn; use that instead")
        elif estimator != "gigpo" and STEP_DISCOUNT in values:
            value = values.pop(STEP_DISCOUNT)
            self.warn(
                f"{STEP_DISCOUNT}: {printable(value)} is ignored; {printable(estimator)} does not read it in ROLL"
            )

    def _normalisation(self) -> None:
        """Set the keys of the normalisation, unless the estimator itself has this normalisation."""
        values = self._values
        if values.get("adv_estimator") == "agentic_reinforce":
            values["adv_estimator"] = "step_reinforce"
            self.warn(
                "adv_estimator: agentic_reinforce is read as step_reinforce, which discounts per turn; use that instead"
            )
        given = values.pop(NORM, None) or {}
        if not isinstance(given, dict):
            return
        self.keys += [NORM] * bool(given)
        self.warnings += [
            f"{NORM}.{key}: {printable(given[key])} is ignored; ROLL itself never reads it"
            for key in UNSCALED
            if key in given
        ]
        self.faults += [
            Fault(
                f"{NORM}.{key}",
                f"{printable(given[key])} has no counterpart here",
                f"remove it; known keys are {', '.join(NORMS)}",
                "not_supported",
            )
            for key in given
            if key not in (*NORMS, *UNSCALED)
        ]
        given = {key: value for key, value in given.items() if key in NORMS}
        told = self._scopes(given)
        if told is None:
            return
        estimator = values.get("adv_estimator")
        own = tuple(what for what in ("mean", "std") if told.get(f"norm_{what}_type") == "group")
        if estimator == "gigpo":
            self._gigpo(told, own)
        if estimator == "grpo":
            values["adv_estimator"] = COMPARES.get(own, "reinforce") if len(own) == len(told) else "reinforce"
        if values.get("adv_estimator") in ("reinforce", "step_reinforce"):
            values.update({key: value for key, value in told.items() if key not in values})
        said = ", ".join(
            f"{key}={value}" for key, value in {"adv_estimator": values.get("adv_estimator"), **told}.items()
        )
        if given:
            self.warn(f"{NORM}: {printable(dict(given))} is read as {said}; use that instead")
        elif estimator == "grpo":
            text = "missing, so rewards are not normalised in ROLL, and adv_estimator=grpo is read as reinforce"
            self.warn(f"{NORM}: {text}; for GRPO set grouping: traj_group_id and method: mean_std")

    def _scopes(self, given: Mapping[str, Any]) -> dict[str, str] | None:
        """Return the scopes of the mean and the standard deviation by roll's keys, without those that are off; None
        after a fault.

        ROLL's keys `norm_mean_type` and `norm_std_type` replace `method`, if they are set.
        """
        scope, method = given.get("grouping", "batch"), given.get("method", "identity")
        if scope not in SCOPES or method not in METHODS:
            key, value = ("grouping", scope) if scope not in SCOPES else ("method", method)
            known = ", ".join(SCOPES if key == "grouping" else METHODS)
            self.fault(
                f"{NORM}.{key}", f"{printable(value)} has no counterpart here", f"use one of: {known}", "not_supported"
            )
            return None
        found: dict[str, str] = {}
        for what in ("mean", "std"):
            key = f"norm_{what}_type"
            if (kind := given.get(key)) is None and what in METHODS[method]:
                found[key] = SCOPES[scope]
            elif kind in ("batch", "group"):
                found[key] = "batch" if kind == "batch" else SCOPES[scope]
            elif kind is not None:
                self.fault(
                    f"{NORM}.{key}",
                    f"{printable(kind)} has no counterpart here",
                    "use batch or group, or remove it",
                    "not_supported",
                )
        return found

    def _gigpo(self, told: Mapping[str, str], own: tuple[str, ...]) -> None:
        """Set whether gigpo divides by standard deviations. Its means are always those of groups."""
        if own not in COMPARES or len(own) != len(told):
            problem = "adv_estimator gigpo always compares episodes within their group here"
            self.fault(NORM, problem, "set grouping: traj_group_id, and method: mean_std or mean", "not_supported")
        else:
            self._values.setdefault("gigpo_std", "std" in own)

    def _rows_of_files(self) -> None:
        learner = self._values.get("actor_train")
        rows = learner.get("data_args") if isinstance(learner, dict) else None
        if isinstance(learner, dict) and isinstance(rows, dict) and "file_name" not in rows:
            del learner["data_args"]
            self.warn(
                f"actor_train.data_args: {printable(rows)} is ignored; it names no file, and the tokenizer's own "
                f"template is used; remove it"
            )


def translate_agentic(values: dict[str, Any]) -> Agentic:
    """Translate ROLL's keys for environments in place to the keys of the schema."""
    done = Agentic(values)
    done.translate()
    return done


def _tags(manager: Mapping[str, Any] | None) -> list[str]:
    tags = (manager or {}).get("tags")
    return [str(tag) for tag in tags] if isinstance(tags, list | tuple) else []


def _sessions(manager: Mapping[str, Any]) -> dict[str, int]:
    most = manager.get("max_env_num_per_worker")
    return {"sessions_per_process": most} if isinstance(most, int) and most > 0 else {}
