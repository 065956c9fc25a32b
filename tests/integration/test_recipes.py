"""Recipes of examples/algorithms with the real engines: those with unusual rollouts, and those with state in their
checkpoints.
"""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import SMALL, World

pytestmark = [pytest.mark.engines, pytest.mark.full]


def recipe(name: str, folder: str, *overrides: str) -> tuple[str, ...]:
    return "--config-name", f"algorithms/{name}", f"output_dir={folder}", "pretrain=warm/export", *SMALL, *overrides


def test_dapo_draws_until_the_step_is_full(world: World) -> None:
    outcome = world.run(*recipe("dapo", "dapo", "max_steps=2"))
    assert outcome.status == 0, outcome.output
    for line in world.metrics("dapo")[1:]:
        assert line["sampling/drawn_groups"] == 16 + line["sampling/dropped_groups"]
        assert line["policy/grad_norm"] > 0


def test_a_policy_learns_the_distributions_of_its_teacher(world: World) -> None:
    """The student is the random model, and the teacher is the warmed-up model. A resumed run repeats the same steps."""
    teacher = (
        "pretrain=output/tiny/model",
        "teacher.model_args.model_name_or_path=warm/export",
        "max_steps=4",
        "save_steps=2",
    )
    outcome = world.run(*recipe("on_policy_distillation_full", "distilled"), *teacher)
    assert outcome.status == 0, outcome.output
    lines = world.metrics("distilled")[1:]
    apart = [line["distill/divergence"] for line in lines]
    assert all(line["time/teacher"] > 0 and line["policy/loss"] == 0 and line["reward/mean"] == 0 for line in lines)
    assert apart[0] > apart[-1] > 0
    world.go_back("distilled", "distilled_again", last=4)
    outcome = world.run(*recipe("on_policy_distillation_full", "distilled_again"), *teacher)
    assert outcome.status == 0, outcome.output
    assert [line["distill/divergence"] for line in world.metrics("distilled_again")[1:]] == pytest.approx(
        apart, abs=1e-4
    )
    for count, name in ((2, "coarse"), (64, "fine")):
        outcome = world.run(
            *recipe("on_policy_distillation_full", name), *teacher[:2], "max_steps=1", f"distill_top_k={count}"
        )
        assert outcome.status == 0, outcome.output
    coarse, fine = (world.metrics(name)[1]["distill/divergence"] for name in ("coarse", "fine"))
    assert 0 < coarse < fine < apart[0] + 1e-5


def test_each_domain_learns_from_its_own_teacher(world: World) -> None:
    """The teacher of arithmetic is the warmed-up model. That of the other domain is the initial policy, so its
    divergence starts at 0.
    """
    problems = (world.folder / "output/tiny/problems/train.jsonl").read_text().splitlines()
    for domains in (["arithmetic"], ["words"], ["arithmetic", "words"]):
        rows = [json.loads(line) | {"domain": domains[number % len(domains)]} for number, line in enumerate(problems)]
        (world.folder / f"{'_'.join(domains)}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = (
        "model_args: {model_name_or_path: %s, dtype: fp32}, strategy_args: {strategy_name: hf_infer}, "
        "max_tokens_per_microbatch: 4096"
    )
    teachers = {"arithmetic": keys % "warm/export", "words": keys % "output/tiny/model"}
    words = [
        "pretrain=output/tiny/model",
        "max_steps=1",
        "~teacher",
        "+distill_top_k=8",
        "+rewards.words.reward=no_reward",
    ]
    words += [f"+teachers.{name}={{domains: [{name}], {block}}}" for name, block in teachers.items()]
    apart = dict[str, float]()
    for rows in ("arithmetic", "words", "arithmetic_words"):
        outcome = world.run(
            *recipe("on_policy_distillation_full", rows), *words, f"actor_train.data_args.file_name={rows}.jsonl"
        )
        assert outcome.status == 0, outcome.output
        [line] = world.metrics(rows)[1:]
        apart[rows] = line["distill/divergence"]
        assert line["time/teacher"] > 0
    assert apart["words"] == pytest.approx(0, abs=1e-3)
    assert apart["words"] + 0.1 < apart["arithmetic_words"] < apart["arithmetic"] - 0.1


def test_remax_compares_with_a_greedy_answer(world: World) -> None:
    outcome = world.run(*recipe("remax", "remax", "max_steps=2", "rollout_batch_size=64", "updates_per_step=1"))
    assert outcome.status == 0, outcome.output
    assert all(line["policy/grad_norm"] > 0 and "reward/kl_mean" in line for line in world.metrics("remax")[1:])
    sample = json.loads((world.folder / "remax" / "samples.jsonl").read_text().splitlines()[0])
    assert len(sample["responses"]) == 1


def test_step_reinforce_pays_the_turns_of_a_response(world: World) -> None:
    outcome = world.run(*recipe("step_reinforce", "step_reinforce", "max_steps=2"))
    assert outcome.status == 0, outcome.output
    samples = [
        json.loads(line) for line in (world.folder / "step_reinforce" / "samples.jsonl").read_text().splitlines()
    ]
    responses = [response for sample in samples for response in sample["responses"]]
    for response in responses:
        assert sum(value for _, value in response["turns"]) == pytest.approx(
            response["reward"] if response["turns"] else 0
        )
        assert [end for end, _ in response["turns"]] == list(range(1, len(response["turns"]) + 1))
    assert len({len(response["turns"]) for response in responses}) > 1
    for line in world.metrics("step_reinforce")[1:]:
        assert line["response/turns_mean"] > 1
        assert line["policy/grad_norm"] > 0


def test_adaptive_kl_and_running_moments_survive_resume(world: World) -> None:
    settings = ("norm_mean_type=running", "norm_std_type=running", "kl_horizon=1000", "save_steps=2", "max_steps=4")
    outcome = world.run(*recipe("adaptive_kl", "whole_kl", *settings))
    assert outcome.status == 0, outcome.output
    world.go_back("whole_kl", "split_kl", last=4)
    outcome = world.run(*recipe("adaptive_kl", "split_kl", *settings))
    assert outcome.status == 0, outcome.output
    whole, split = world.metrics("whole_kl"), world.metrics("split_kl")
    coefficients = [line["reward/kl_coef"] for line in whole[1:]]
    assert len(set(coefficients)) == 4
    assert [line["reward/kl_coef"] for line in split[1:]] == pytest.approx(coefficients, rel=1e-6)
    assert [line["policy/loss"] for line in split[1:]] == pytest.approx(
        [line["policy/loss"] for line in whole[1:]], abs=1e-5
    )


def test_critic_warms_up_and_survives_resume(world: World) -> None:
    constant = ("actor_train.training_args.lr_scheduler_type=constant", "actor_train.training_args.warmup_steps=0")
    size = ("rollout_batch_size=64", "updates_per_step=1", "critic.training_args.per_device_train_batch_size=16")
    small = (*size, "critic_warmup=1", "save_steps=2", *constant)
    outcome = world.run(*recipe("ppo_critic", "whole_critic", "max_steps=3", *small))
    assert outcome.status == 0, outcome.output
    world.go_back("whole_critic", "split_critic", last=3)
    outcome = world.run(*recipe("ppo_critic", "split_critic", "max_steps=3", *small))
    assert outcome.status == 0, outcome.output
    whole, split = world.metrics("whole_critic"), world.metrics("split_critic")
    assert [any(name.startswith("policy/") for name in line) for line in whole[1:]] == [False, True, True]
    # The head starts at 0, so all values are 0 before the first update.
    assert [whole[1][f"critic/{name}"] for name in ("value_mean", "explained_variance")] == [0, 0]
    assert all(
        line["critic/grad_norm"] > 0 and line["time/values"] > 0 and line["staleness/max"] == 0 for line in whole[1:]
    )
    assert whole[3]["critic/value_mean"] != 0
    for name in ("critic/loss", "critic/value_mean", "reward/mean"):
        assert [line[name] for line in split[1:]] == pytest.approx([line[name] for line in whole[1:]], abs=1e-5)
    assert split[3]["policy/loss"] == pytest.approx(whole[3]["policy/loss"], abs=1e-5)
    folder = world.folder / "split_critic"
    assert (folder / "checkpoints" / "step_3" / "critic").is_dir()
    assert not list((folder / "export").rglob("*critic*"))
