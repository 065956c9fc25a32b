"""Finds the subject of an evaluation (a run, a checkpoint or a model), and builds and checks the configuration.

It is the configuration of an RLVR run; the trained role is never started.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from yaml import YAMLError

from roll.config.derived.batch import learner
from roll.config.derived.held_out import held_out_warnings
from roll.config.load.loader import read_config
from roll.config.load.on_disk import held_out_data
from roll.config.plan.plan import Plan, make_plan
from roll.config.schema.model import LORA_KEYS
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.secrets import HIDDEN
from roll.config.schema.strategies import serving_names
from roll.errors import ConfigError, DataError, Fault
from roll.evaluation.request import Request
from roll.export.source import CHECKPOINTS, CONFIG, CheckpointSource, find_source, read_run_config
from roll.runs.checkpoint.manifest import MANIFEST, LoopState
from roll.runs.dry_run import try_rows
from roll.runs.rlvr.held_out import inference_plan
from roll.stores.address import FETCH, is_address
from roll.stores.store import Store, StoreError

PLACE = "SUBJECT"
"""Name of the first command-line argument in error messages."""
KEPT = (
    "prompt_length", "response_length", "sequence_length", "seed", "time_sharing", "num_gpus_per_node",
    "gpu_memory_gib", "system_envs", "deadlines", "max_running_samples",
)  # fmt: skip
"""Root keys that an evaluation copies from the configuration of its run."""
OWN_OF_LEARNER = ("model_name_or_path", "lora_target", *LORA_KEYS)
OF_ALL_ROWS = ("weight", "tag_included", "query_filter_config")
"""Keys of a run's reward that mean nothing for a reward that scores all rows by itself."""
OF_VALUE = ("reward_args", "group", "failed_value", "passes_at")
"""Keys of a reward that decide what a response is worth, and whether it passes."""
LENGTH = "--max-new-tokens"
PLACES = (
    (re.compile(r"^pretrain$"), PLACE),
    (re.compile(r"^(validation\.sets\.[^.]+|actor_train)\.data_args\.file_name.*"), "--data"),
    (re.compile(r"^validation\.data_args$"), "--data"),
    (re.compile(r"^output_dir$"), "--output"),
    (re.compile(r"^data_args\.template$"), "--template"),
    (re.compile(r"^response_length$"), LENGTH),
    (re.compile(r"^actor_(train|infer)\.device_mapping$"), "--devices"),
    (re.compile(r"^validation\.sets\.[^.]+\.generating_args\.num_return_sequences$"), "--samples"),
)
"""Pairs of (pattern of a configuration key, command-line option that sets it), for error messages."""
COLUMN = re.compile(r"data_args\.(prompt|messages|ground_truth)(=?)")
"""Keys of columns in the texts of faults, which are options of the command line."""
NO_TAG = "no tag"
"""Name of a tag column that no data has, so that one reward scores all rows, whatever their tags."""
UNNAMED = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and the run that wrote it."""

    source: CheckpointSource
    run: Path
    config: Config
    step: int


@dataclass(frozen=True)
class Subject:
    """The model to evaluate."""

    name: str
    """Name for the results: of the run and the step, or of the model."""
    model: str
    """Folder or Hub id of the model. For a checkpoint, that of the model from which the training started."""
    trained: Trained | None
    """The checkpoint and its run. None for a model without a run."""


@dataclass(frozen=True)
class Evaluation:
    """A checked evaluation."""

    request: Request
    subject: Subject
    config: RlvrConfig
    plan: Plan
    warnings: tuple[str, ...]


def find_subject(text: str) -> Subject:
    """Return the subject for a run folder (its newest complete checkpoint), a checkpoint folder, a Hugging Face folder
    or a Hub id.

    Raises:
        ConfigError: the folder has no checkpoint, belongs to a reward model, or holds only an adapter; or its
            configuration is unreadable.
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    _refuse_stored_run(text)
    path = Path(text)
    of_run = (path / CONFIG).is_file() or (path / CHECKPOINTS).is_dir()
    if of_run or (path / MANIFEST).is_file() or (path.is_dir() and path.absolute().parent.name == CHECKPOINTS):
        source = find_source(path)
        if source.pipeline == "reward_model":
            remedy = "evaluate a policy: a run of another pipeline, or a language model"
            raise ConfigError(
                Fault(PLACE, f"'{text}' trained a reward model, which generates nothing", remedy, "unfit")
            )
        run = source.checkpoint.absolute().parent.parent
        step = LoopState.read(source.checkpoint).step
        return Subject(f"{run.name}-step_{step}", source.model, Trained(source, run, read_run_config(run), step))
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        remedy = "give the run folder, or merge the adapter first: python -m roll.export RUN OUT --format merged"
        raise ConfigError(Fault(PLACE, f"'{text}' holds an adapter without its model", remedy, "unfit"))
    # The parent's name distinguishes the exports of two runs, which are both called `export`.
    name = f"{path.absolute().parent.name}-{path.name}" if path.is_dir() else path.name
    return Subject(name or text, text, None)


def _refuse_stored_run(text: str) -> None:
    """Raise ConfigError for the address of a run, or of a store that cannot be used; a model's may be evaluated."""
    if not is_address(text):
        return
    try:
        is_run = Store(text).read(CONFIG) is not None
    except StoreError as error:
        raise ConfigError(error.fault(PLACE)) from error
    if is_run:
        raise ConfigError(Fault(PLACE, f"'{text}' is a run in a store", FETCH.format(address=text), "unfit"))


def plan_evaluation(request: Request, subject: Subject) -> Evaluation:
    """Check the request, and plan the evaluation. Raises ConfigError with every fault of its configuration."""
    settings = _overridden(_settings(request, subject), request.overrides)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loaded = read_config(settings)
            if loaded.config is None:
                raise ConfigError(*loaded.faults)
            plan = make_plan(loaded.config, loaded.faults)
        except ConfigError as error:
            raise ConfigError(
                *list(dict.fromkeys(with_option_names(fault, request) for fault in error.faults))
            ) from None
    assert isinstance(loaded.config, RlvrConfig), "the pipeline of an evaluation is rlvr"
    config = loaded.config
    untrue = set(held_out_warnings(config))  # the learner has the rows of a set, and never trains
    texts = [*(str(one.message) for one in caught), *(text for text in plan.warnings if text not in untrue)]
    return Evaluation(request, subject, config, inference_plan(config, plan), tuple(dict.fromkeys(texts)))


def try_held_out(evaluation: Evaluation) -> list[str]:
    """Try the first rows of the held-out sets, as a dry run does. Return a line on each set.

    Raises:
        DataError: a row cannot be used, or a file not be read.
    """
    lines, faults = try_rows(evaluation.config, held_out_data(evaluation.config))
    if faults:
        raise DataError(*[with_option_names(fault, evaluation.request) for fault in faults])
    return lines


def with_option_names(fault: Fault, request: Request) -> Fault:
    """Return the fault with the command-line option in place of the configuration key, if an option set the value."""
    place = fault.place
    for pattern, said in PLACES:
        place = pattern.sub(said, place)
    if request.reward and place == f"rewards.{_domain(request.reward)}.reward":
        place = "--reward"
    remedy = (
        f"{fault.remedy}; {LENGTH} N sets response_length, and prompt_length=N sets prompt_length"
        if place == LENGTH
        else fault.remedy
    )
    problem, remedy = (COLUMN.sub(_column_option, text) for text in (fault.problem, remedy))
    return replace(fault, place=place, problem=problem, remedy=remedy)


def _column_option(found: re.Match[str]) -> str:
    return f"--{found[1].replace('_', '-')}{' ' if found[2] else ''}"


def _overridden(settings: Mapping[str, Any], words: Sequence[str]) -> DictConfig:
    for word in words:
        if "=" not in word:
            raise ConfigError(
                Fault("command line", f"'{word}' is neither an option nor key=value", "see --help", "malformed")
            )
    try:
        merged = OmegaConf.merge(OmegaConf.create(dict(settings)), OmegaConf.from_dotlist(list(words)))
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        problem = f"{' '.join(words)} cannot be read: {error}"
        raise ConfigError(Fault("command line", problem, "write key=value, with a YAML value", "malformed")) from None
    assert isinstance(merged, DictConfig)
    return merged


def _settings(request: Request, subject: Subject) -> dict[str, Any]:
    run = subject.trained.config if subject.trained else None
    given = _plain(run) if run else {}
    kept = {key: value for key, value in given.items() if key in KEPT}
    if whole := given.get("max_length"):
        response = min(request.max_new_tokens or whole // 2, whole - 1)
        kept |= {"prompt_length": whole - response, "response_length": response}
    engine = _engine(request, run)
    devices = engine.get("device_mapping")
    sets = _sets(request, run)
    rows = next((one["data_args"] for one in sets.values() if "data_args" in one), _columns(run))
    rewards = _rewards(request, given.get("rewards", {}))
    environments = {} if request.reward else given.get("environments", {})
    scored = any(word.startswith(("rewards.", "environments.")) for word in request.overrides)
    if not rewards and not environments and not scored:
        remedy = "name the reward that scores the answers: math_rule, exact_match, ..., or package.module:function"
        why = f"'{subject.model}' is no run whose rewards could be used"
        if not Path(subject.model).exists():
            why = f"there is no folder '{subject.model}' of a run whose rewards could be used"
        raise ConfigError(Fault("--reward", f"missing, and {why}", remedy, "missing"))
    settings = kept | {
        "pipeline": "rlvr",
        "exp_name": UNNAMED.sub("_", subject.name)[:100] or "model",
        "output_dir": str(output_folder(request, subject)),
        "pretrain": subject.model,
        "dry_run": request.dry_run,
        "track_with": "none",
        "max_steps": 1,
        "eval_steps": 1,
        "rollout_batch_size": len(devices) if devices else 1,
        "adv_estimator": "reinforce",
        "actor_train": {
            "model_args": {
                key: value for key, value in engine["model_args"].items() if key in ("dtype", "trust_remote_code")
            },
            "strategy_args": {
                "strategy_name": "deepspeed_train",
                "strategy_config": {"zero_optimization": {"stage": 0}},
            },
        }
        | ({"device_mapping": devices} if devices else {})
        | ({"data_args": rows} if rows else {}),
        "actor_infer": engine,
        "rewards": rewards,
        "environments": environments,
        "validation": {"sets": sets},
    }
    if request.seed is not None:
        settings["seed"] = request.seed
    if request.max_new_tokens is not None:
        settings["response_length"] = max(request.max_new_tokens, kept.get("response_length", request.max_new_tokens))
    return settings


def _rewards(request: Request, of_run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the blocks of the rewards: the run's, or that of the requested one, as the run uses it if it does.

    Raises:
        ConfigError: the run uses the requested reward in several ways, for example with other arguments.
    """
    if request.reward is None:
        return dict(of_run)
    name = _domain(request.reward)
    used = {
        place: {key: value for key, value in block.items() if key not in OF_ALL_ROWS}
        for place, block in _reward_blocks(of_run)
        if (block.get("reward") or place.rpartition(".")[2]) == request.reward and not block.get("parts")
    }
    first = next(iter(used.values()), {})
    differing = [key for key in OF_VALUE if any(block.get(key) != first.get(key) for block in used.values())]
    given = [key for key in differing if any(word.startswith(f"rewards.{name}.{key}") for word in request.overrides)]
    if given != differing:
        problem = f"'{request.reward}', but {' and '.join(used)} of the run use it with different settings"
        own = ", ".join(f"rewards.{name}.{key}" for key in differing)
        remedy = f"leave it out, to score each row as the run does, or set {own}"
        raise ConfigError(Fault("--reward", problem, remedy, "contradiction"))
    return {name: {key: value for key, value in first.items() if key not in differing} | {"reward": request.reward}}


def _reward_blocks(rewards: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the blocks of rewards and of their parts, each with its place in the configuration."""
    for name, block in rewards.items():
        yield f"rewards.{name}", block
        yield from ((f"rewards.{name}.parts.{part}", inner) for part, inner in block.get("parts", {}).items())


def _domain(reward: str) -> str:
    """Return the name of the single domain for a reward that scores all rows."""
    return UNNAMED.sub("_", reward.rpartition(":")[2]).replace(".", "_") or "reward"


def output_folder(request: Request, subject: Subject) -> Path:
    """Return the results' folder: the requested one, else one in the run folder or `output/evaluations`."""
    if request.output is not None:
        return request.output
    if subject.trained:
        return subject.trained.run / "evaluations" / f"step_{subject.trained.step}"
    return Path("output/evaluations") / (UNNAMED.sub("_", subject.name) or "model")


def _engine(request: Request, run: Config | None) -> dict[str, Any]:
    """Return the block `actor_infer`."""
    own = _plain(run).get("actor_infer", {}) if isinstance(run, RlvrConfig) else {}
    role = {
        key: value
        for key, value in own.items()
        if key in ("strategy_args", "device_mapping", "world_size", "system_envs")
    }
    trained = own.get("model_args", {}) if own else _model_args(run)
    model = {key: value for key, value in trained.items() if key not in OWN_OF_LEARNER}
    devices = _devices(request, own, run)
    if devices != own.get("device_mapping"):
        role = {key: value for key, value in role.items() if key not in ("device_mapping", "world_size")}
        role |= {"device_mapping": devices} if devices else {}
    if role.get("strategy_args", {}).get("strategy_name") not in serving_names():
        role = {key: value for key, value in role.items() if key not in ("strategy_args", "world_size")}
    if (
        request.strategy
        and role.get("strategy_args", {}).get("strategy_name") != request.strategy
        or "strategy_args" not in role
    ):
        name = request.strategy or ("vllm" if find_spec("vllm") else "hf_infer")
        # On a CPU, vLLM compiles for longer than most evaluations take.
        eager = {"strategy_config": {"enforce_eager": True}} if name == "vllm" and not devices else {}
        role["strategy_args"] = {"strategy_name": name} | eager
    if request.dtype or "dtype" not in model:
        model["dtype"] = request.dtype or ("bf16" if devices else "fp32")
    return role | {"model_args": model}


def _devices(request: Request, own: Mapping[str, Any], run: Config | None) -> list[int] | None:
    """Return the engine's GPUs, None for the CPU: the requested ones, else the run's, else this machine's first."""
    if request.devices is not None:
        return list(request.devices) or None
    if own:
        return own.get("device_mapping")
    if run is not None and learner(run)[1].device_mapping is None:
        return None
    import torch  # Imported here, so that `--help` and the report of a wrong path do not need it.

    return [0] if torch.cuda.device_count() else None


def _model_args(run: Config | None) -> dict[str, Any]:
    """Return `dtype` and `trust_remote_code` of the model that a run trained."""
    if run is None:
        return {}
    given = _plain(learner(run)[1].model_args)
    return {key: value for key, value in given.items() if key in ("dtype", "trust_remote_code")}


def _sets(request: Request, run: Config | None) -> dict[str, Any]:
    """Return the blocks of `validation.sets`."""
    validation = run.validation if isinstance(run, RlvrConfig) else None
    asked = {
        "num_return_sequences": request.samples,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_new_tokens": request.max_new_tokens,
    }
    sampling = {key: value for key, value in asked.items() if value is not None}
    usual = (
        _plain(validation.generating_args)
        if validation
        else {"temperature": 0.0 if (request.samples or 1) == 1 else 1.0}
    )
    if request.data:
        columns = _columns(run)
        return {
            name: {"data_args": _rows(request, file, columns), "generating_args": usual | sampling}
            for name, file in _names(request.data).items()
        }
    found: dict[str, Any] = {}
    for name, one in (validation.named_sets() if validation else {}).items():
        block: dict[str, Any] = {"generating_args": _plain(one.generating_args) | sampling}
        if one.data_args:
            files = one.data_args.file_name
            further = one.data_args.rendered_as(learner(run)[1].data_args).chat_template_kwargs if run else None
            named = {"file_name": files if isinstance(files, str) else list(files), "chat_template_kwargs": further}
            block["data_args"] = _plain(one.data_args) | named | ({"tag": NO_TAG} if request.reward else {})
        found[name] = block | ({"rows": dict(one.rows)} if one.rows else {})
    if not found:
        problem = "missing, and the run has no validation sets" if run else "missing"
        raise ConfigError(
            Fault(
                "--data", problem, "give a file with held-out prompts, and a reward function with --reward", "missing"
            )
        )
    return found


def _names(files: Sequence[str]) -> dict[str, str]:
    """Return the files, each under the name of its set: the stem of the path, numbered if it is not unique."""
    found: dict[str, str] = {}
    for file in files:
        stem = UNNAMED.sub("_", Path(file).stem) or "data"
        name, count = stem, 1
        while name in found:
            count += 1
            name = f"{stem}_{count}"
        found[name] = file
    return found


def _rows(request: Request, file: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block `data_args` of one file: the run's columns and template, overridden by the request's."""
    keys = (
        "template",
        "chat_template_kwargs",
        "prompt",
        "input",
        "messages",
        "system",
        "ground_truth",
        "tag",
        "id",
        "split",
    )
    block = {key: value for key, value in columns.items() if key in keys} | {"file_name": file}
    asked = {key: getattr(request, key) for key in ("template", "split", "prompt", "messages", "ground_truth")}
    if request.reward:
        block["tag"] = NO_TAG
    if request.prompt or request.messages:
        block = {key: value for key, value in block.items() if key not in ("prompt", "input", "messages")}
    block |= {key: value for key, value in asked.items() if value is not None}
    if block.get("template", "native") != columns.get("template", "native"):
        block.pop("chat_template_kwargs", None)  # they are of the run's template
    return block if "prompt" in block or "messages" in block else block | {"prompt": "prompt"}


def _columns(run: Config | None) -> dict[str, Any]:
    """Return the block `data_args` of the rows that a run was trained on, or an empty one."""
    rows = learner(run)[1].data_args if run else None
    return _plain(rows) if rows else {}


def _plain(block: BaseModel) -> dict[str, Any]:
    """Return a block's keys that differ from the defaults, as JSON values, without the secrets that runs hide."""
    return _printable(block.model_dump(mode="json", exclude_defaults=True))


def _printable(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _printable(value) for key, value in tree.items() if value is not None and value != HIDDEN}
    return [_printable(value) for value in tree] if isinstance(tree, list) else tree
