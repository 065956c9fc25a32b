"""Names of TRL, accelerate, verl and OpenRLHF are refused with the key to use, and that key works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter

from roll.config.schema import foreign_names
from roll.config.schema.faults import LEARNER, LEARNERS, counterpart_of, counterparts_of_block
from roll.config.schema.fields import ANY_NAME, walk
from roll.config.schema.foreign_names import OTHER_NAMES, OTHER_NAMES_IN_RLVR
from roll.config.schema.offline import DpoConfig, SftConfig
from roll.config.schema.pipelines import PIPELINES
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import ExperimentConfig
from roll.pipeline import main

LEAST = 80
RLVR = ("--config-name", "rlvr_zero3", "dry_run=true")
SFT = ("--config-name", "tiny/tiny_sft", "dry_run=true")
ACTOR = "actor_train.model_args"
ROLLS = ("logging_steps", "num_nodes", "local_rank")
ASKED = [
    ("bf16=true", "use actor_train.model_args.dtype; true is bf16", f"{ACTOR}.dtype=bf16"),
    ("mixed_precision=bf16", "use actor_train.model_args.dtype", f"{ACTOR}.dtype=bf16"),
    (f"{ACTOR}.gradient_checkpointing=true", "true is all, false is none", f"{ACTOR}.gradient_checkpointing=all"),
    ("report_to=swanlab", "use track_with; one name", "track_with=tensorboard"),
    ("actor_train.training_args.logging_steps=1", "remove it: every step is logged", None),
    ("max_seq_length=4096", "use prompt_length; and response_length", "response_length=4000"),
    (
        "packing=true",
        "actor_train.max_tokens_per_microbatch is the budget",
        "actor_train.max_tokens_per_microbatch=8192",
    ),
    (
        "deepspeed=ds.json",
        "${deepspeed_zero3}, with `- ../config/deepspeed_zero3@_here_`",
        "deepspeed_zero3.zero_optimization.stage=3",
    ),
    (f"{ACTOR}.lora_dim=8", "use actor_train.model_args.lora_rank", None),
    (f"{ACTOR}.r=16", "use actor_train.model_args.lora_rank", None),
    (f"{ACTOR}.alpha=32", "use actor_train.model_args.lora_alpha", None),
    (f"{ACTOR}.bias=none", "remove it: an adapter has no biases", None),
    (f"{ACTOR}.task_type=CAUSAL_LM", "remove it: the pipeline and the model decide it", None),
    (f"{ACTOR}.rank_pattern={{q_proj: 8}}", "remove it: all modules of lora_target have the same lora_rank", None),
    (f"{ACTOR}.modules_to_save=[lm_head]", "with an adapter, no module is trained as a whole", None),
    (f"{ACTOR}.layers_to_transform=[0]", "as layers.0.self_attn.q_proj", "lora_target=layers.0.self_attn.q_proj"),
    (f"{ACTOR}.lora_module_name=q_proj", "use actor_train.model_args.lora_target", "lora_target=q_proj"),
    (
        "num_machines=2",
        "use actor_train.device_mapping; it counts over all nodes",
        "actor_train.device_mapping='list(range(0,16))'",
    ),
    ("num_processes=8", "use actor_train.device_mapping; the GPUs of the role", None),
    ("num_generations=8", "use num_return_sequences_in_group", "num_return_sequences_in_group=8"),
    (
        "actor_train.training_args.lr=1e-6",
        "use actor_train.training_args.learning_rate",
        "actor_train.training_args.learning_rate=1e-6",
    ),
    ("beta=0.1", "use kl_loss_coef; it is the weight of the KL, with use_kl_loss: true", "kl_loss_coef=0.1"),
    ("num_train_epochs=3", "use max_steps; one pass over the rows", "max_steps=3"),
    ("clip_ratio_high=0.28", "use pg_clip_high", "pg_clip_high=0.28"),
    ("save_total_limit=3", "use keep_checkpoints", "keep_checkpoints=3"),
    ("actor_train.per_device_eval_batch_size=4", "use actor_train.max_tokens_per_microbatch", None),
]
"""An override, the text of its message, and the override that follows the remedy, or None if no override tests the
remedy.
"""


def keys(root: type[BaseModel]) -> set[str]:
    """Return the path of every key and block of a schema."""
    return {".".join(step for step in key.path if step != ANY_NAME) for key in walk(root)}


def test_tables_have_the_types_of_their_names() -> None:
    types = {name: kind for name, kind in get_type_hints(foreign_names).items() if name.isupper()}
    assert {"OTHER_NAMES", "DEEPSPEED_REFUSED", "IGNORED", "VALUES"} <= types.keys()
    for name, kind in types.items():
        if name != "DEEPSPEED_BLOCKS":  # its kinds are objects, looked up by name
            TypeAdapter(kind, config={"strict": True}).validate_python(getattr(foreign_names, name))


def test_every_key_of_a_file_table_is_read() -> None:
    """A misspelt field of a group would be lost without a word."""
    file = Path(foreign_names.__file__).with_suffix(".yaml")
    tables = yaml.safe_load(file.read_text(encoding="utf-8"))
    for group in [*tables["other_programs"], *tables["other_programs_in_rlvr"]]:
        assert group.keys() <= {"names", "key", "how"}, group
    names = [name for group in tables["other_programs"] for name in group["names"]]
    assert len(names) == len(set(names))
    for group in [
        *tables["deepspeed_refused"],
        *(one for b in tables["deepspeed_blocks"].values() for one in b["refused"]),
    ]:
        assert group.keys() == {"keys", "why", "use"}, group


def test_every_counterpart_is_a_key_of_a_pipeline() -> None:
    known = set().union(*map(keys, PIPELINES.values()))
    assert len(OTHER_NAMES) >= LEAST
    wrong = [
        (name, found.key)
        for name, found in (*OTHER_NAMES.items(), *OTHER_NAMES_IN_RLVR.items())
        if found.key is not None and not known & {found.key.replace(LEARNER, role) for role in LEARNERS}
    ]
    assert wrong == []
    assert [name for name, found in OTHER_NAMES.items() if found.key is None and not found.how] == []


def test_foreign_learning_rate_maps_to_pipeline_role() -> None:
    assert counterpart_of("lr", RlvrConfig) == "use actor_train.training_args.learning_rate"
    assert counterpart_of("lr", SftConfig) == "use sft_train.training_args.learning_rate"
    assert "ROLE is actor_train, sft_train" in str(counterpart_of("lr", ExperimentConfig))
    assert str(counterpart_of("num_generations", DpoConfig)).startswith("use num_return_sequences_in_group, ")
    assert counterpart_of("teapot", RlvrConfig) is None


def test_foreign_epochs_map_to_steps_in_rlvr() -> None:
    for name in ("num_train_epochs", "num_epochs"):
        assert str(counterpart_of(name, RlvrConfig)).startswith("use max_steps; ")
        assert str(counterpart_of(name, SftConfig)).startswith("use sft_train.training_args.num_train_epochs; ")


def test_beta_maps_to_kl_weight_only_in_rlvr() -> None:
    assert "kl_loss_coef" in str(counterpart_of("beta", RlvrConfig))
    assert counterpart_of("beta", SftConfig) is None


def test_foreign_block_is_mapped_key_by_key() -> None:
    block = {"actor": {"optim": {"lr": 1e-6}, "clip_ratio": 0.2}, "rollout": {"teapot": 1}}
    said = str(counterparts_of_block("actor_rollout_ref", block, RlvrConfig))
    assert " verl; " in said
    assert said.endswith("actor.optim.lr: use actor_train.training_args.learning_rate; actor.clip_ratio: use pg_clip")
    assert counterparts_of_block("mine", {"teapot": 1}, RlvrConfig) is None


def test_foreign_names_are_refused_with_working_counterparts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*RLVR, *(word for word, _, _ in ASKED)]) == 2
    said = capsys.readouterr().err
    faults = {lines.partition(": ")[0]: lines for lines in said.split("\n  ") if not lines.startswith("  ")}
    assert set(faults) >= {word.partition("=")[0] for word, _, _ in ASKED}
    assert [text for _, text, _ in ASKED if text not in said] == []
    assert main([*RLVR, *(word for _, _, word in ASKED if word)]) == 0


def test_a_pipeline_of_rows_names_its_own_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SFT, "bf16=true", "sft_train.model_args.lora_r=4"]) == 2
    said = capsys.readouterr().err
    assert "use sft_train.model_args.dtype" in said and "use sft_train.model_args.lora_rank" in said


def test_every_foreign_name_is_refused_at_root(capsys: pytest.CaptureFixture[str]) -> None:
    """Except for names that ROLL's files have at the root, which are read or ignored with a warning."""
    names = [name for name in {**OTHER_NAMES, **OTHER_NAMES_IN_RLVR} if name not in ROLLS]
    assert main([*RLVR, *(f"{name}=1" for name in names)]) == 2
    said = capsys.readouterr().err
    remedies = dict(re.findall(r"^  (\w+): unknown key, .*\b1\n    (.*)$", said, re.MULTILINE))
    assert [name for name in names if remedies.get(name) != counterpart_of(name, RlvrConfig)] == []
