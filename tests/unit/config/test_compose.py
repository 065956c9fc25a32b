"""Every use of Hydra that works here, one test each: flags, overrides, groups, sweeps and resolvers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

from roll.config.load.compose import MOST_JOBS, compose
from roll.config.shipped import examples_folder
from roll.errors import ConfigError
from roll.pipeline import main
from tests.faults import coded

FILES = {
    "exp/main.yaml": """
defaults:
  - ../config/deepspeed_zero2@_here_
  - model: small
  - optional local: absent
  - train@actor_train.training_args: fast
  - _self_
seed: 1
name: ${oc.env:ROLL_TEST_NAME,unset}
zero: ${deepspeed_zero2}
pair: {a: 1, b: 2}
""",
    "exp/model/small.yaml": "size: 1\n",
    "exp/model/large.yaml": "size: 7\n",
    "exp/model/llama.yaml": "# @package weights.policy\nsize: 8\n",
    "exp/train/fast.yaml": "learning_rate: 0.1\n",
    "exp/train/slow.yaml": "learning_rate: 0.01\nwarmup_steps: 5\n",
    "exp/experiment/one.yaml": "# @package _global_\ndefaults:\n  - override /model: large\n  - _self_\nseed: 11\n",
    "exp/swept.yaml": "defaults: [main, _self_]\nhydra: {mode: MULTIRUN, sweeper: {params: {seed: '3,4'}}}\n",
    "exp/inherited.yaml": "defaults: [../tiny/tiny_sft@_here_, _self_]\nmax_steps: 3\n",
    "exp/grouped.yaml": "defaults: [{presets@actor_train.strategy_args.strategy_config: deepspeed_zero3}, _self_]\n",
    "exp/referring.yaml": """
defaults: [main, _self_]
actor_train: {strategy_args: {strategy_config: "${deepspeed_zero2}"}}
""",
    "exp/self_first.yaml": "defaults: [_self_, main]\nseed: 5\n",
    "more/model/huge.yaml": "size: 70\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with an experiment `main` and groups of its own in `exp`."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def composed(folder: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that composes a command line and returns the resolved values of each job."""

    def jobs(*words: str, name: str = "main") -> list[dict[str, Any]]:
        found: list[Any] = []
        argv = ["--config-path", "exp", "--config-name", name, *words]
        compose(argv, lambda config, passing: found.append(OmegaConf.to_container(config, resolve=True)))
        return found

    return jobs


@pytest.fixture
def printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the command with flags that print, and returns the output."""

    def run(*words: str, name: str = "main") -> str:
        assert main(["--config-path", "exp", "--config-name", name, *words]) == 0
        return capsys.readouterr().out

    return run


Composed = Callable[..., list[dict[str, Any]]]
Printed = Callable[..., str]


def values(jobs: list[dict[str, Any]], *path: str) -> list[Any]:
    """Return the value at a path in each job."""
    found: list[Any] = jobs
    for step in path:
        found = [block[step] for block in found]
    return found


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["seed=2"], ("seed",), 2),
        (["fresh=2"], ("fresh",), 2),
        (["+fresh=2"], ("fresh",), 2),
        (["++seed=2", "++fresh.below=3"], ("fresh", "below"), 3),
        (["~pair.a"], ("pair",), {"b": 2}),
        (["~pair.a=1"], ("pair",), {"b": 2}),
        (["pair={a: 5}"], ("pair",), {"a": 5, "b": 2}),
        (["pair.a=[1,2]"], ("pair", "a"), [1, 2]),
        (["deepspeed_zero2.zero_optimization.stage=1"], ("zero", "zero_optimization", "stage"), 1),
        (["seed=${pair.b}"], ("seed",), 2),
    ],
)
def test_override_sets_adds_or_deletes_keys(
    composed: Composed, words: list[str], path: tuple[str, ...], value: Any
) -> None:
    assert values(composed(*words), *path) == [value]


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ([], ("model", "size"), 1),
        (["model=large"], ("model", "size"), 7),
        (["model=llama"], ("weights", "policy", "size"), 8),
        (["train@actor_train.training_args=slow"], ("actor_train", "training_args", "warmup_steps"), 5),
        (["+train@critic.training_args=slow"], ("critic", "training_args", "learning_rate"), 0.01),
        (["+experiment=one"], ("model", "size"), 7),
        (["+experiment=one"], ("seed",), 11),
        (["~train@actor_train.training_args"], ("seed",), 1),
    ],
)
def test_group_chooses_a_file_and_package(
    composed: Composed, words: list[str], path: tuple[str, ...], value: Any
) -> None:
    assert values(composed(*words), *path) == [value]


def test_self_first_lets_defaults_override(composed: Composed) -> None:
    assert values(composed(name="self_first"), "seed") == [1]


def test_preset_is_included_here_from_outside(composed: Composed) -> None:
    assert values(composed(), "zero", "zero_optimization", "stage") == [2]


def test_shipped_experiment_is_inherited_from_outside(composed: Composed) -> None:
    (job,) = composed(name="inherited")
    assert job["max_steps"] == 3 and job["exp_name"] == "tiny_sft"


def test_config_name_may_have_a_suffix(composed: Composed) -> None:
    assert values(composed(name="main.yaml"), "seed") == [1]


@pytest.mark.parametrize("name", ["tiny_sft", "tiny/tiny_sft", "tiny_sft.yaml"])
def test_shipped_experiment_is_found_by_name(name: str) -> None:
    found: list[Any] = []
    compose(["-cn", name], lambda config, passing: found.append(config.exp_name))
    assert found == ["tiny_sft"]


@pytest.mark.parametrize("flag", ["--config-dir", "-cd"])
def test_config_dir_alone_holds_the_experiment(folder: Path, flag: str) -> None:
    found: list[Any] = []
    compose([flag, "exp", "-cn", "main"], lambda config, passing: found.append(config.seed))
    assert found == [1]


def test_config_dir_beside_config_path_adds_groups(composed: Composed) -> None:
    (job,) = composed("--config-dir", "more", "model=huge")
    assert job["model"] == {"size": 70} and job["zero"]["zero_optimization"]["stage"] == 2


def test_search_path_of_the_line_adds_groups(folder: Path, composed: Composed) -> None:
    (folder / "exp" / "bare.yaml").write_text("defaults: [{model: small}, _self_]\n")
    words = (f"hydra.searchpath=['file://{folder / 'more'}']", "model=huge")
    assert values(composed(*words, name="bare"), "model", "size") == [70]


@pytest.mark.parametrize(
    ("word", "seeds"),
    [
        ("seed=1,2", [1, 2]),
        ("seed=choice(3,1)", [3, 1]),
        ("seed=sort(3,1)", [1, 3]),
        ("seed=range(1,4)", [1, 2, 3]),
        ("seed=range(1,8,step=3)", [1, 4, 7]),
        ("seed=tag(first,choice(4,5))", [4, 5]),
        ("+fresh=1,2", [1, 1]),
    ],
)
@pytest.mark.parametrize("flag", ["--multirun", "-m", "hydra.mode=MULTIRUN"])
def test_sweep_has_one_job_per_value(composed: Composed, flag: str, word: str, seeds: list[int]) -> None:
    assert values(composed(flag, word), "seed") == seeds


def test_sweep_of_two_keys_is_their_product(composed: Composed) -> None:
    jobs = composed("-m", "seed=1,2", "pair.a=5,6", "name=x")
    assert [(job["seed"], job["pair"]["a"], job["name"]) for job in jobs] == [
        (1, 5, "x"),
        (1, 6, "x"),
        (2, 5, "x"),
        (2, 6, "x"),
    ]


def test_sweep_is_shuffled(composed: Composed) -> None:
    assert sorted(values(composed("-m", "seed=shuffle(range(1,5))"), "seed")) == [1, 2, 3, 4]


def test_sweep_by_glob_takes_options_of_a_group(composed: Composed) -> None:
    assert values(composed("-m", "model=glob([l*,s*],exclude=ll*)"), "model", "size") == [7, 1]


def test_sweep_over_groups_composes_each_choice(composed: Composed) -> None:
    assert values(composed("-m", "model=small,large"), "model", "size") == [1, 7]


def test_sweep_over_a_preset_reference(composed: Composed) -> None:
    jobs = composed("-m", "zero=${deepspeed_zero2},{zero_optimization: {stage: 0}}")
    assert values(jobs, "zero", "zero_optimization", "stage") == [2, 0]


def test_preset_is_an_option_of_a_group(composed: Composed) -> None:
    block = ("actor_train", "strategy_args", "strategy_config", "zero_optimization", "stage")
    assert values(composed(name="grouped"), *block) == [3]
    group = "presets@actor_train.strategy_args.strategy_config"
    assert values(composed("-m", f"{group}=deepspeed_zero1,deepspeed_zero2", name="grouped"), *block) == [1, 2]
    inner = ".".join(block)
    assert values(composed(f"{group}=deepspeed_zero1", f"{inner}=0", name="grouped"), *block) == [0]
    assert values(composed(f"+{group}=deepspeed_zero2"), *block) == [2]


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("+presets@actor_train.strategy_args.strategy_config=deepspeed_zero3", "exclusive"),
        ("presets=deepspeed_zero3", "malformed"),
        ("+presets=deepspeed_zero3", "malformed"),
        ("+presets@critic.strategy_args.strategy_config=deepspeed_zero9", "not_found"),
    ],
)
def test_wrong_choice_of_a_preset_is_refused(composed: Composed, word: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(word, name="referring")
    [fault] = caught.value.faults
    assert fault.code == code and ("strategy_args.strategy_config=" in fault.remedy or "zero3_nvme" in fault.remedy)


def test_overrides_of_a_job_are_a_name(composed: Composed) -> None:
    words = ("-m", "seed=1,2", "++pair.a=5", "output_dir=out/${hydra:job.override_dirname}", "dry_run=true")
    assert values(composed(*words), "output_dir") == ["out/++pair.a=5,seed=1", "out/++pair.a=5,seed=2"]
    chosen = ("hydra.job.config.override_dirname={kv_sep: '-', item_sep: '_', exclude_keys: [pair.a]}", "name=x")
    jobs = composed(*words, *chosen, "exp_name=${hydra:job.override_dirname}")
    assert values(jobs, "exp_name") == ["name-x_seed-1", "name-x_seed-2"]


def test_overrides_of_a_swept_file_are_a_name(composed: Composed) -> None:
    assert values(composed("name=${hydra:job.override_dirname}", name="swept"), "name") == ["seed=3", "seed=4"]


def test_sweep_over_blocks(composed: Composed) -> None:
    assert values(composed("-m", "pair={a: 3},{b: 4}"), "pair") == [{"a": 3, "b": 2}, {"a": 1, "b": 4}]


def test_sweep_of_a_file_needs_no_flag(composed: Composed) -> None:
    assert values(composed(name="swept"), "seed") == [3, 4]


def test_line_replaces_a_sweep_of_the_file(composed: Composed) -> None:
    assert sorted(set(values(composed("seed=6,7", name="swept"), "seed"))) == [6, 7]


def test_sweep_is_limited(composed: Composed) -> None:
    assert len(composed("-m", "seed=range(1,11)", "pair.a=1,2")) == 20
    with pytest.raises(ConfigError) as caught:
        composed("-m", f"seed=range(0,{MOST_JOBS + 1})")
    assert "jobs" in str(caught.value)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("name=${oc.env:ROLL_TEST_HOME}", "here"),
        ("name=${oc.select:nowhere,fallback}", "fallback"),
        ("name=${oc.decode:'[1,2]'}", [1, 2]),
        ("name=${now:%Y}", f"{datetime.now():%Y}"),
        ("name=${hydra:runtime.choices.model}", "small"),
        ("name=${hydra:job.config_name}", "main"),
        ("name=${hydra:job.name}", "roll.pipeline"),
    ],
)
def test_resolver_gives_its_value(composed: Composed, monkeypatch: pytest.MonkeyPatch, word: str, value: Any) -> None:
    monkeypatch.setenv("ROLL_TEST_HOME", "here")
    assert values(composed(word), "name") == [value]


def test_job_number_is_interpolated_in_sweeps(composed: Composed) -> None:
    jobs = composed("-m", "seed=8,9", "output_dir=runs/${hydra:job.num}")
    assert values(jobs, "output_dir") == ["runs/0", "runs/1"]


def test_output_folder_of_hydra_is_interpolated(composed: Composed) -> None:
    (job,) = composed("hydra.run.dir=mine", "output_dir=${hydra:runtime.output_dir}")
    assert job["output_dir"] == "mine"
    jobs = composed("-m", "seed=1,2", "hydra.sweep.dir=all", "output_dir=${hydra:runtime.output_dir}")
    assert values(jobs, "output_dir") == ["all/0", "all/1"]


@pytest.mark.parametrize(
    "word",
    [
        "hydra.run.dir=x",
        "hydra.job.chdir=true",
        "+hydra.job.env_set.A=b",
        "hydra.verbose=true",
        "hydra.sweep.subdir=x",
        "hydra.sweeper.max_batch_size=2",
        "hydra/job_logging=disabled",
    ],
)
def test_idle_key_of_hydra_is_a_warning(composed: Composed, word: str) -> None:
    with pytest.warns(UserWarning, match=rf"{word.lstrip('+').partition('=')[0].removesuffix('.A')}: has no effect"):
        composed(word)


def test_search_path_of_the_file_adds_groups(folder: Path, composed: Composed) -> None:
    """The shipped presets stay in the path."""
    (folder / "exp" / "searching.yaml").write_text(
        "defaults: [{model: huge}, ../config/deepspeed_zero3@_here_, _self_]\n"
        f"hydra: {{searchpath: ['file://{folder / 'more'}']}}\n"
    )
    [job] = composed(name="searching")
    assert job["model"] == {"size": 70} and job["deepspeed_zero3"]


def test_config_dir_extends_the_search_path(composed: Composed) -> None:
    presets = f"hydra.searchpath=['file://{examples_folder() / 'config'}']"
    assert values(composed("--config-dir", "more", presets, "model=huge"), "model", "size") == [70]


def test_sweep_without_jobs_is_refused(composed: Composed) -> None:
    with pytest.raises(ConfigError) as caught:
        composed("-m", "model=glob(nothing*)")
    assert coded(caught.value.faults) == [("out_of_range", "command line")]


def test_interval_is_refused(composed: Composed) -> None:
    with pytest.raises(ConfigError) as caught:
        composed("-m", "seed=interval(0,1)")
    assert coded(caught.value.faults) == [("not_supported", "++seed")]


def test_hydras_state_is_restored(composed: Composed) -> None:
    before = HydraConfig.instance().cfg
    composed("-m", "seed=1,2")
    assert HydraConfig.instance().cfg is before and not GlobalHydra.instance().is_initialized()


def test_missing_value_is_refused_unless_set(folder: Path, composed: Composed) -> None:
    (folder / "exp" / "open.yaml").write_text("seed: ???\n")
    assert values(composed("seed=4", name="open"), "seed") == [4]
    found: list[Any] = []
    compose(["-cp", "exp", "-cn", "open"], lambda config, passing: found.append(config))
    with pytest.raises(MissingMandatoryValue):
        OmegaConf.to_container(found[0], throw_on_missing=True)


@pytest.mark.parametrize("flag", ["--cfg", "-c"])
def test_cfg_job_prints_the_configuration(printed: Printed, flag: str) -> None:
    out = yaml.safe_load(printed(flag, "job", "seed=9"))
    assert out["seed"] == 9 and "hydra" not in out and out["zero"] == "${deepspeed_zero2}"


def test_cfg_resolve_prints_values(printed: Printed) -> None:
    assert yaml.safe_load(printed("--cfg", "job", "--resolve"))["zero"]["zero_optimization"]["stage"] == 2


def test_cfg_all_and_hydra_print_hydras_keys(printed: Printed) -> None:
    assert {"seed", "hydra"} <= yaml.safe_load(printed("--cfg", "all")).keys()
    assert yaml.safe_load(printed("--cfg", "hydra")).keys() == {"hydra"}


@pytest.mark.parametrize("flag", ["--package", "-p"])
def test_package_prints_one_block(printed: Printed, flag: str) -> None:
    assert printed("--cfg", "job", flag, "pair") == "# @package pair\na: 1\nb: 2\n"


def test_help_with_a_name_prints_groups_and_keys(printed: Printed) -> None:
    out = printed("--help")
    assert "model: large, llama, small" in out and "learning_rate: 0.1" in out


def test_help_of_hydra_prints_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hydra-help"]) == 0
    assert "--multirun" in capsys.readouterr().out


def test_nothing_is_written_by_composing(folder: Path, composed: Composed) -> None:
    before = sorted(folder.rglob("*"))
    composed("-m", "seed=1,2")
    assert sorted(folder.rglob("*")) == before
