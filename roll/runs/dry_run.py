"""What a dry run tries besides its plan: the headers of the weight files, the first rows of the data files,
environments, tools and agents.

It imports neither torch nor transformers, and reads only the beginning of each file. A run checks every row before it
starts, also by the tokenizer and by the user's own rewards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from roll.agents.environments.base import Observation
from roll.config.derived.batch import has_pairs, learner
from roll.config.derived.fixed_roles import model_reward
from roll.config.derived.placement import model_roles
from roll.config.load.on_disk import check_disk, held_out_data
from roll.config.schema.model import DataConfig
from roll.config.schema.offline import DistillConfig, DpoConfig, OfflineConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RewardConfig
from roll.data.json_text import parsed
from roll.data.picture_parts import LABEL, MARK
from roll.data.routes import DOMAIN, DomainRoutes, Label, tag_routes
from roll.data.rows import (
    GROUND_TRUTH,
    RowFault,
    column_number,
    column_text,
    example_conversation,
    labelled_conversation,
    only_given,
    other_reference,
    pair_conversations,
    prompt_conversation,
    read_row,
    template_arguments,
)
from roll.data.sources import Source, find_sources, rowless
from roll.errors import BadInput, ConfigError, DataError, Fault
from roll.models.weight_files import check_readable
from roll.rewards.base import load_reward, rewards_of, traits_of
from roll.rewards.verdicts import parts_of
from roll.runs.rlvr.environment_trial import agent_faults, environments_with_variables, try_environments

ROWS = 8
"""Number of rows that are read from the beginning of each file."""
FILES = 8
"""Largest number of files of one set whose rows are read."""
Row = Mapping[str, Any]
RowReader = Callable[[Row], str]
"""Reads a row as the run will read it, and says what it has. Raises RowFault if the row cannot be used."""
EXCERPT = 120
"""Largest number of characters of a text of the first row that are shown."""


def try_dry_run(config: Config) -> list[str]:
    """Try what a dry run can try of the data and of the user's environments. Return a line on what was tried.

    Raises:
        DataError: a row cannot be used, or a file not be read. The error lists the first fault of each kind and file.
        ConfigError: a weight file, `lora_target`, an environment, a tool or an agent cannot be used.
        BadInput: both.
    """
    unfit = _weight_faults(config)
    if isinstance(config, RlvrConfig) and config.replay_from is not None:
        if unfit:
            raise ConfigError(*unfit)
        return []  # a replay reads neither rows nor environments
    unfit += _built_in_faults(config) if isinstance(config, RlvrConfig) else []
    lines, bad_rows = try_rows(config, data_sets(config))
    if isinstance(config, RlvrConfig) and config.environments:
        unfit += _environment_faults(config)
    if bad_rows or unfit:
        kind = BadInput if bad_rows and unfit else DataError if bad_rows else ConfigError
        raise kind(*unfit, *bad_rows)
    if isinstance(config, RlvrConfig) and config.environments:
        lines.append(f"Environments: {', '.join(config.environments)} can be loaded, with their tools and agents")
    return lines


def _built_in_faults(config: RlvrConfig) -> list[Fault]:
    """Return the faults of domains that only built-in functions score. The user's own are imported by a run alone."""
    found = list[Fault]()
    for domain, section in config.rewards.items():
        parts = parts_of(domain, section) if model_reward(domain, section) is None else ()
        if parts and not any(":" in part.reward for part in parts):
            try:
                rewards_of(domain, parts, section.concurrency)
            except ConfigError as error:
                found += error.faults
    return found


def _weight_faults(config: Config) -> list[Fault]:
    """Return the faults of the weight files in the models' folders, and of a `lora_target` that they do not have.

    A folder without weights has none: a plan needs only its config.json.
    """
    models = [role.model_args for role in model_roles(config).values()]
    found = list[Fault]()
    for model, lora_target in dict.fromkeys(
        (one.model_name_or_path or config.pretrain, one.lora_target) for one in models
    ):
        if any(Path(model).glob("*.safetensors")):
            try:
                check_readable(model, lora_target)
            except BadInput as error:
                found += error.faults
    return [*dict.fromkeys(found)]


def try_rows(config: Config, sets: Mapping[str, DataConfig]) -> tuple[list[str], list[Fault]]:
    """Try the first rows of data sets. Return lines on what was tried, with what the first row has, and the faults.

    Args:
        sets: the sets by the key path of the block above `data_args`.
    """
    lines, bad_rows, sees = list[str](), list[Fault](), may_see(config)
    for place, data_args in sets.items():
        tried, first, faults = _try_set(data_args, row_reader(config, data_args, sees), sees)
        bad_rows += faults
        elsewhere = [name for name in _names(data_args) if not Path(name).exists()]
        if tried and not faults:
            lines.append(f"Rows of {place}: the first ones of {', '.join(tried)} can be used; {first}")
        lines += [f"Rows of {place}: not tried; not on this machine: {', '.join(elsewhere)}"] if elsewhere else []
    return lines, bad_rows


def data_sets(config: Config) -> dict[str, DataConfig]:
    """Return the data sets whose rows the run reads from files, by the key path of the block above `data_args`."""
    name, role = learner(config)
    training = {name: role.data_args} if role.data_args else {}
    return training | (held_out_data(config) if config.eval_steps else {})


def may_see(config: Config) -> bool:
    """Return whether rows may show pictures: the model sees them, or its config.json is not known here."""
    shapes = check_disk(config).shapes.values()
    return not isinstance(config, DistillConfig) and (not shapes or any(shape.vision for shape in shapes))


def row_reader(config: Config, data_args: DataConfig, sees: bool) -> RowReader:
    """Return the function that reads a row of this data set, without rendering and tokenising it."""
    if isinstance(config, RlvrConfig):
        routes = DomainRoutes(tuple(config.domains), tag_routes(config.domains))
        return partial(_read_prompt, data_args=data_args, routes=routes, rewards=config.rewards, sees=sees)
    return partial(_read_example, data_args=data_args, config=config, sees=sees)


def _read_prompt(
    row: Row, data_args: DataConfig, routes: DomainRoutes, rewards: Mapping[str, RewardConfig], sees: bool
) -> str:
    template_arguments(row)
    read = read_row(row, data_args, sees)
    conversation = prompt_conversation(only_given(read, row), data_args, sees)
    domain, tag = (None if row.get(column) in (None, "") else str(row[column]) for column in (DOMAIN, data_args.tag))
    label = Label(domain, tag)
    if (fault := routes.fault(label, data_args.tag, row)) is not None:
        raise fault
    domain = routes.domains[routes.domain_index(label)]
    if domain in rewards:
        _check_reference(domain, rewards[domain], read, row, data_args)
    column = data_args.ground_truth or GROUND_TRUTH
    if read.get(GROUND_TRUTH) in (None, "") and read.get("answer") is not None:
        column, read = "answer", {**read, GROUND_TRUTH: read["answer"]}  # as `roll.rewards.answers.ground_truth` does
    said = f"the first asks {_shown(conversation[-1]['content'])}; its {column} is {_shown(read.get(GROUND_TRUTH))}"
    if other := other_reference(read):
        path, value = other
        said += f", but its {path} is {_shown(value)}: data_args.{GROUND_TRUTH}={path} would use that"
    return said


def _shown(value: object) -> str:
    """Return a value on one line, with its beginning and end if it is long."""
    text = " ".join((value.replace(MARK, LABEL) if isinstance(value, str) else repr(value)).split())
    cut = text if len(text) <= EXCERPT else f"{text[: EXCERPT // 2]} ... {text[-EXCERPT // 2 :]}"
    return f"'{cut}'" if isinstance(value, str) else cut


def _check_reference(domain: str, section: RewardConfig, read: Row, row: Row, data_args: DataConfig) -> None:
    """Raise RowFault if a built-in reward of the domain cannot use the row that was read. The user's own are left to
    the run.
    """
    for part in parts_of(domain, section) if model_reward(domain, section) is None else ():
        check = None if ":" in part.reward else traits_of(load_reward(part.reward)).check_row
        try:
            if check is not None:
                check(read)
        except ValueError as error:
            problem = f"'{part.reward}' cannot use the row: {error}; the row has: {', '.join(map(str, row))}"
            where = f", as {other[0]}" if (other := other_reference(row)) else ""
            named = f"name the column of the reference answer in data_args.{GROUND_TRUTH}{where}, or "
            remedy = f"{named if data_args.ground_truth is None else ''}fix or remove the row"
            raise RowFault(f"no reference for '{part.reward}'", problem, remedy, "unfit") from error


def _read_example(row: Row, data_args: DataConfig, config: OfflineConfig, sees: bool) -> str:
    if data_args.text is not None:
        return f"the first is {_shown(column_text(row, data_args.text))}"
    template_arguments(row)
    if isinstance(config, DpoConfig) and not has_pairs(config):
        conversation, is_desirable = labelled_conversation(row, data_args, sees)
        return f"the first answers {_shown(conversation[-1]['content'])}, labelled {is_desirable}"
    if has_pairs(config):
        chosen, rejected = pair_conversations(row, data_args, sees)
        if data_args.margin:
            column_number(row, data_args.margin)
        return f"the first prefers {_shown(chosen[-1]['content'])} to {_shown(rejected[-1]['content'])}"
    return f"the first answers {_shown(example_conversation(row, data_args, sees)[-1]['content'])}"


def _names(data_args: DataConfig) -> tuple[str, ...]:
    return (data_args.file_name,) if isinstance(data_args.file_name, str) else data_args.file_name


def _try_set(data_args: DataConfig, read: RowReader, sees: bool) -> tuple[list[str], str, list[Fault]]:
    """Return the names of the sources whose first rows were read, what the first row has, and the faults. Names of the
    Hub are left out.
    """
    present = [name for name in _names(data_args) if Path(name).exists()]
    try:
        sources = find_sources(present, data_args.split) if present else []
    except DataError as error:
        return [], "", list(error.faults)
    said, faults = list[str](), list[Fault]()
    for source in sources[:FILES]:
        said_of, faults_of = _try_source(replace(source, encodes_bytes=sees), read)
        said, faults = said + said_of, faults + faults_of
    if sources and not said and not faults and len(sources) <= FILES and len(present) == len(_names(data_args)):
        faults = rowless(sources)
    return [source.name for source in sources[:FILES]], said[0] if said else "they have no rows", faults


def _try_source(source: Source, read: RowReader) -> tuple[list[str], list[Fault]]:
    """Return what the first rows of a source have, and the first fault of each kind in them."""
    said, found = list[str](), dict[str, Fault]()
    try:
        rows = source.first(ROWS)
    except DataError as error:
        return [], list(error.faults)
    for row in rows:
        try:
            if row.problem:
                raise RowFault("malformed", row.problem, "make the row one object of JSON", "malformed")
            said.append(read(parsed(row.text)))
        except RowFault as fault:
            place = f"{source.name}:{row.number}"
            found.setdefault(fault.reason, Fault(place, fault.problem, fault.remedy, fault.code))
    return said, list(found.values())


def _environment_faults(config: RlvrConfig) -> list[Fault]:
    """Return the faults of environments that cannot be loaded, of their tools, and of agents that cannot be started."""
    seconds = config.deadlines.start
    # Without images, which a run would unpack or pull
    sections = {
        domain: section.model_copy(update={"image": None})
        for domain, section in environments_with_variables(config).items()
    }
    loaded = asyncio.run(try_environments(sections, {}, seconds, _no_problem, may_see(config)))
    return [*loaded, *agent_faults(sections, seconds)]


def _no_problem(_: Observation) -> str:
    return ""
