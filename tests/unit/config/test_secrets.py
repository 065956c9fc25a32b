"""Which values of a configuration are secret, and the files and messages that must not contain them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml

from roll.config.load.compose import compose
from roll.config.load.env_file import secrets_of
from roll.config.load.loader import checked_config
from roll.config.schema.pipelines import Config
from roll.config.schema.secrets import HIDDEN, Secrets, is_secret, redacted
from roll.ray.cluster import keep_ray_logs
from roll.runs import changed_keys as resume_fingerprint
from roll.runs.assemble import open_trackers, write_config
from roll.tracking import trackers as opened
from roll.tracking.base import RunFacts
from roll.tracking.logs import RunLog
from tests.quiet import quiet_life

WORDS = [
    "track_with=mlflow",
    "++tracker_kwargs={mlflow: {tracking_uri: 'https://me:pass-word@host/x', access_token: tracker-key}}",
    "++system_envs={HF_TOKEN: hf-token-1, MY_SECRET: secret-two, DB_PASSWORD: password-3, "
    "TOKENIZERS_PARALLELISM: 'false', COLOUR: "
    "blue}",
    "++sft_train.system_envs={AWS_SECRET_ACCESS_KEY: of-the-role}",
]
HIDE = ("pass-word", "tracker-key", "hf-token-1", "secret-two", "password-3", "of-the-role")


@pytest.fixture(scope="module")
def config() -> Config:
    loaded: list[Config] = []
    words = ["--config-name", "tiny/tiny_warm_up", "dry_run=true", *WORDS]
    compose(words, lambda composed, presets: loaded.append(checked_config(composed, presets)))
    return loaded[0]


@pytest.mark.parametrize(
    "key", ["HF_TOKEN", "api_key", "WANDB_API_KEY", "my_secret", "PGPASSWORD", "aws_secret_access_key", "AWS_ACCESS"]
)
def test_keys_of_secrets(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize(
    "key", ["TOKENIZERS_PARALLELISM", "max_tokens_per_microbatch", "judge_api_key_env", "add_token_level_kl", "seed", 3]
)
def test_keys_that_are_none(key: object) -> None:
    assert not is_secret(key)


def test_a_tree_without_its_secrets() -> None:
    tree = {
        "a": {"api_key": "x", "n_keys": 3},
        "b": ["https://me:pass@host", "https://host:80/a@b"],
        "login_kwargs": {"user": "me"},
    }
    assert redacted(tree) == {
        "a": {"api_key": HIDDEN, "n_keys": 3},
        "b": [f"https://me:{HIDDEN}@host", "https://host:80/a@b"],
        "login_kwargs": HIDDEN,
    }


def test_secrets_of_every_shape_are_hidden() -> None:
    tree = {
        "API_KEYS": ["in-a-list", {"a": "in-a-block"}],
        "headers": {"Authorization": "Bearer of-a-header", "apiKey": "in-camel-case"},
        "url": "https://host/v1?x=1&api_key=of-a-query&y=2",
        "git": "https://of-the-user@host/x",
        "curl": "-H 'Authorization: Bearer of-an-option' --auth-token=of-a-flag",
        "slack_webhook": "https://host/of-a-path",
        "sent": [{"name": "Authorization", "value": "of-a-pair"}],
        "note": "the key sk-proj-0123456789-of-a-form",
    }
    secrets = ("list", "block", "header", "camel", "query", "user", "option", "flag", "path", "pair", "form")
    assert not [word for word in secrets if f"-{word}" in str(redacted(tree))]
    assert not [word for word in secrets if f"-{word}" in Secrets.of(tree).hide(str(tree))]
    assert "x=1" in str(redacted(tree)) and "y=2" in str(redacted(tree))
    assert Secrets.of(tree).hide("in-a-list in-a-block of-the-user") == " ".join([HIDDEN] * 3)


@pytest.mark.parametrize(
    "issuer", ["sk-0123456789abcdefXYZ", "hf_" + "aB3" * 10, "ghp_" + "aB3" * 12, "AKIA0123456789ABCDEF"]
)
def test_issued_keys_are_hidden_in_any_text(issuer: str) -> None:
    assert Secrets().hide(f"it said {issuer}, twice") == f"it said {HIDDEN}, twice"


def test_texts_that_only_look_like_secrets_are_kept() -> None:
    tree = [{"name": "model", "value": "kept"}, "hf_hub_download_of_all_files", "a disk-0123456789abcdefgh", "sk-learn"]
    assert redacted(tree) == tree


@pytest.mark.parametrize("key", ["monkey", "keyboard", "TOKENISED", "author", "turkey", "max_new_tokens"])
def test_words_that_only_contain_others(key: str) -> None:
    assert redacted({key: "text"}) == {key: "text"}


def test_a_text_of_somebody_else_without_them() -> None:
    secrets = Secrets.of({"api_key": "abcdef", "token": "abcdefgh", "key": "no"})
    assert secrets.hide("no abcdefgh, abcdef; postgres://u:p@h") == f"no {HIDDEN}, {HIDDEN}; postgres://u:{HIDDEN}@h"


def test_no_secret_is_written_by_a_run(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RunFacts] = []
    given: list[object] = []
    monkeypatch.setattr(
        opened, "OPENERS", {"mlflow": lambda facts, settings: (told.append(facts), given.append(settings))}
    )
    moved = config.model_copy(update={"output_dir": str(tmp_path)})
    secrets = secrets_of(moved, {"MLFLOW_TRACKING_PASSWORD": "of-the-file"})
    write_config(moved, tmp_path)
    open_trackers(moved, None, 1, quiet_life())
    with RunLog(tmp_path, secrets.hide):
        logging.getLogger("library").info("connects with %s", " ".join([*HIDE, "of-the-file"]))
        try:
            raise OSError("hf-token-1")
        except OSError:
            logging.getLogger("library").exception("cannot connect")
    ray = tmp_path / "scratch" / "r" / "session_1" / "logs"
    ray.mkdir(parents=True)
    (ray / "runtime_env_agent.log").write_text("env_vars: {HF_TOKEN: hf-token-1}\n")
    keep_ray_logs(tmp_path / "scratch", tmp_path / "logs", secrets.hide)

    written = "".join(
        path.read_text() for path in tmp_path.rglob("*") if path.is_file() and path.is_relative_to(tmp_path / "logs")
    )
    written += (tmp_path / "config.yaml").read_text() + str(told[0].config)
    assert "connects with" in written and "env_vars: {HF_TOKEN: ***}" in written
    assert not [secret for secret in (*HIDE, "of-the-file") if secret in written]
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert kept["system_envs"] == {
        "HF_TOKEN": HIDDEN, "MY_SECRET": HIDDEN, "DB_PASSWORD": HIDDEN, "TOKENIZERS_PARALLELISM": "false",
        "COLOUR": "blue"
    }  # fmt: skip
    assert kept["max_steps"] == moved.max_steps and kept["pretrain"] == moved.pretrain
    assert given == [{"tracking_uri": "https://me:pass-word@host/x", "access_token": "tracker-key"}], (
        "the tracker itself needs the secrets"
    )


def test_a_run_that_resumes_is_compared_without_them(config: Config) -> None:
    """A run may resume with a new secret."""
    other = config.model_copy(update={"system_envs": {"HF_TOKEN": "another"}})
    assert resume_fingerprint.of_keys(other) == resume_fingerprint.of_keys(config)
