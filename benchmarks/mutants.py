"""Breaks the code in one place at a time, and checks that the named unit test fails: a broken line that no test sees
would be silent.

    python benchmarks/mutants.py [NAME ...]

Each mutant is a text replacement in a temporary copy of the tree, where its test runs alone. A mutant is caught if its
test fails. The status is 1 if a mutant survives, or if a test fails without a mutant.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("roll", "tests", "examples", "benchmarks", "docs", "pyproject.toml")
"""What a test needs of the tree."""


@dataclass(frozen=True)
class Mutant:
    """One broken line."""

    file: str
    old: str
    """Text that occurs once in the file."""
    new: str
    test: str
    """Node id of the test that must fail, below `tests/unit`."""

    def apply(self, root: Path) -> None:
        """Break the file below `root`."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.file} has {text.count(self.old)} times: {self.old}"
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


WIRED = "pipeline/test_wire_loss.py"
COMPLETE = "algorithms/test_complete.py"
OBJECTIVES = "roll/algorithms/objectives.py"
PLANTED_LOSS = """@OBJECTIVES.register("planted")
@dataclass(frozen=True)
class Planted(Objective):
    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        return PolicyGradient()(tokens)


"""
"""A policy loss without a case in any test and without a row in the documentation."""
PLANTED_PREFERENCE = """@PAIR_OBJECTIVES.register("planted")
@dataclass(frozen=True)
class Planted(PairObjective):
    def __call__(self, chosen: Responses, rejected: Responses) -> PairLosses:
        return Dpo()(chosen, rejected)


"""
PLANTED_ESTIMATOR = """@ADVANTAGES.register("planted")
def planted(scores: Scores, norm: Normalisation) -> Doubles:
    return dr_grpo(scores, norm)


"""
MUTANTS: Mapping[str, Mutant] = {
    "KL not weighted off policy": Mutant(
        "roll/runs/rlvr/wiring.py",
        "kl_importance=config.use_kl_loss and weighs_kl(config)",
        "kl_importance=False",
        f"{WIRED}::test_a_key_reaches_its_field",
    ),
    "off-policy mask not wired": Mutant(
        "roll/runs/rlvr/wiring.py",
        "mask_threshold=config.off_policy_mask_threshold",
        "mask_threshold=None",
        f"{WIRED}::test_a_key_reaches_its_field",
    ),
    "teacher's weight not wired": Mutant(
        "roll/runs/rlvr/wiring.py",
        "DistilledPolicy(loss, config.distill_loss_coef)",
        "DistilledPolicy(loss, 1.0)",
        f"{WIRED}::test_a_teachers_divergence_gets_its_weight",
    ),
    "warm-up share rounded down": Mutant(
        "roll/training/deepspeed/setup.py",
        "math.ceil(training.warmup_ratio * total_updates)",
        "math.floor(training.warmup_ratio * total_updates)",
        "strategies/test_optimizers.py::test_warmup_rises_linearly_then_the_rate_falls",
    ),
    "warm-up steps ignored": Mutant(
        "roll/training/deepspeed/setup.py",
        "training.warmup_steps or math.ceil(",
        "math.ceil(",
        "strategies/test_optimizers.py::test_warmup_rises_linearly_then_the_rate_falls",
    ),
    "schedule spans the critic's warm-up": Mutant(
        "roll/runs/rlvr/wiring.py",
        "steps = config.max_steps - config.critic_warmup",
        "steps = config.max_steps",
        "pipeline/test_wire_rlvr.py::test_the_policys_schedule_leaves_out_the_critics_warmup",
    ),
    "schedule ignores epochs": Mutant(
        "roll/runs/roles.py",
        "total_updates=steps * shape.updates * shape.epochs",
        "total_updates=steps * shape.updates",
        "pipeline/test_roles.py::test_a_schedule_spans_steps_times_updates_times_epochs",
    ),
    "age of a stored group lost": Mutant(
        "roll/rollout/scheduler.py",
        "        self._window.set_age(ordinal, stored.age)\n",
        "",
        "rollout/test_stored.py::test_stored_groups_keep_their_ages",
    ),
    "second save forgets what is gone": Mutant(
        "roll/rollout/scheduler.py",
        "gone + [ordinal - head for ordinal in sorted(self._known_gone)]",
        "gone",
        "rollout/test_window.py::test_a_second_save_remembers_what_is_gone",
    ),
    "unknown states are equal": Mutant(
        "roll/rollout/record.py",
        "[(row, turn) for turn in range(len(episode.sampled))]",
        "[(0, 0) for _ in range(len(episode.sampled))]",
        "rollout/test_turns.py::test_each_unknown_state_is_a_state_apart",
    ),
    "adaptive KL counts trajectories": Mutant(
        "roll/rollout/batch.py",
        "credit.target_kl, len(step.rewards), credit.kl_horizon",
        "credit.target_kl, len(step.sequences.lengths), credit.kl_horizon",
        "rollout/test_credit.py::test_the_kl_weight_adapts_by_episodes_not_trajectories",
    ),
    "running moments of unclipped rewards": Mutant(
        "roll/rollout/batch.py",
        "state.rewards.joined(_clipped(step.rewards, credit.normalisation))",
        "state.rewards.joined(step.rewards)",
        "rollout/test_credit.py::test_running_moments_are_of_clipped_rewards",
    ),
    "greedy baseline pays nothing for its length": Mutant(
        "roll/rollout/batch.py",
        "baselines=_shaped(baselines, shaping) if baselines else None",
        "baselines=_shaped(baselines, Shaping()) if baselines else None",
        "rollout/test_batch.py::test_a_long_greedy_response_pays_for_its_length",
    ),
    "metrics averaged over replicas": Mutant(
        "roll/training/actor_train.py",
        "metrics[name] = sum(result.sums.get(name, 0.0) for result in results) / tokens",
        "metrics[name] = sum(result.sums.get(name, 0.0) / max(1, result.tokens) for result in results) / len(results)",
        "workers/test_actor_train.py::test_replicas_are_merged_by_what_they_counted",
    ),
    "loss scale ignored": Mutant(
        "roll/training/actor_train.py",
        "shape.loss_agg_mode, shape.loss_scale, chosen",
        "shape.loss_agg_mode, 1.0, chosen",
        "workers/test_actor_train.py::test_weights_of_tokens_by_hand",
    ),
    "loss scale not wired": Mutant(
        "roll/runs/roles.py",
        "loss_scale=scale, temperature",
        "temperature",
        "pipeline/test_roles.py::test_a_schedule_spans_steps_times_updates_times_epochs",
    ),
    "labels not selected": Mutant(
        "roll/data/packing.py",
        "labels=None if batch.labels is None else batch.labels[list(indices)]",
        "labels=batch.labels",
        "data/test_packing.py::test_labels_move_with_their_sequences",
    ),
    "routers' loss not times the world size": Mutant(
        "roll/training/deepspeed/strategy.py",
        "self._coefficient * self._tokens * self._rank.world_size / self._total",
        "self._coefficient * self._tokens / self._total",
        "strategies/test_router_balance.py::test_weights_are_shares_of_tokens_times_ranks",
    ),
    "late failure kills the new process": Mutant(
        "roll/engines/pool.py",
        "        if process != self._health.restarts(engine):\n            return WorkerDied(self._group.role, engine, "
        "str(error))\n",
        "",
        "workers/test_engine_pool.py::test_an_earlier_processs_failure_spares_the_new_one",
    ),
    "late probe kills the new process": Mutant(
        "roll/engines/pool.py",
        "if cause is not None and self._health.restarts(engine) == process:",
        "if cause is not None:",
        "workers/test_engine_pool.py::test_an_earlier_processs_probe_spares_the_new_one",
    ),
    "session never comes home": Mutant(
        "roll/engines/actor_infer.py",
        "self._homes.get(request.session) if request.session else None",
        "None",
        "workers/test_actor_infer.py::test_a_session_comes_home_to_a_busier_engine",
    ),
    "versions kept during a sync": Mutant(
        "roll/weight_sync/sync.py",
        "        self.versions |= dict.fromkeys(self._members)\n",
        "",
        "weight_sync/test_sync.py::test_versions_are_unknown_from_pause_to_resume",
    ),
    "validation shares training's seeds": Mutant(
        "roll/runs/rlvr/validation.py",
        "VALIDATION = 1\n",
        "VALIDATION = 0\n",
        "pipeline/test_evaluate.py::test_validation_samples_from_seeds_of_its_own",
    ),
    "validation reports the newest version": Mutant(
        "roll/runs/rlvr/validation.py",
        "float(min(versions, default=nan))",
        "float(max(versions, default=nan))",
        "pipeline/test_evaluate.py::test_the_version_of_a_validation_is_the_oldest",
    ),
    "effective sample size unbounded": Mutant(
        "roll/evaluation/results.py",
        "min(most, max(float(prompts), variance / error**2))",
        "variance / error**2",
        "evaluation/test_statistics.py::test_an_effective_size_lies_between_prompts_and_responses",
    ),
    "effective sample size is the number of responses": Mutant(
        "roll/evaluation/results.py",
        "min(most, max(float(prompts), variance / error**2))",
        "most",
        "evaluation/test_statistics.py::test_an_effective_size_lies_between_prompts_and_responses",
    ),
    "shares lag one draw": Mutant(
        "roll/data/prompts.py",
        "shares[name] * (total + 1)",
        "shares[name] * total",
        "data/test_sampler.py::test_the_first_draws_by_hand",
    ),
    "room equal to the limit counts as full": Mutant(
        "roll/agents/episodes.py",
        "if room >= self._sampling.max_new_tokens",
        "if room > self._sampling.max_new_tokens",
        "rollout/test_episodes.py::test_every_end_has_its_reason",
    ),
    "observation may fill the context": Mutant(
        "roll/agents/episodes.py",
        "if len(bridged.token_ids) + len(context) >= self._limits.sequence:",
        "if len(bridged.token_ids) + len(context) > self._limits.sequence:",
        "rollout/test_episodes.py::test_observation_filling_the_context_is_dropped",
    ),
    "generation without room": Mutant(
        "roll/agents/episodes.py",
        "            if room < 1:\n",
        "            if room < 0:\n",
        "rollout/test_episodes.py::test_a_first_observation_may_fill_the_context",
    ),
    "shortest segment observed": Mutant(
        "roll/rollout/record.py",
        "first = max(",
        "first = min(",
        "rollout/test_layout.py::test_an_observed_prompt_is_the_longest_first_segment",
    ),
    "greedy baseline from a truncation": Mutant(
        "roll/rollout/group.py",
        "temperature=0.0, top_p=1.0, top_k=-1)",
        "temperature=0.0)",
        "rollout/test_scheduler.py::test_greedy_baseline_ignores_sampling_truncation",
    ),
    "rewards not clipped": Mutant(
        "roll/runs/rlvr/wiring.py",
        "reward_clip=config.reward_clip",
        "reward_clip=None",
        "pipeline/test_wiring.py::test_a_credit_key_reaches_its_field",
    ),
    "advantages not clipped": Mutant(
        "roll/runs/rlvr/wiring.py",
        "advantage_clip=config.advantage_clip",
        "advantage_clip=None",
        "pipeline/test_wiring.py::test_a_credit_key_reaches_its_field",
    ),
    "lambda not wired": Mutant(
        "roll/runs/rlvr/wiring.py",
        "lambd=config.lambd",
        "lambd=0.95",
        "pipeline/test_wiring.py::test_a_credit_key_reaches_its_field",
    ),
    "KL horizon not wired": Mutant(
        "roll/runs/rlvr/wiring.py",
        "kl_horizon=config.kl_horizon",
        "kl_horizon=10000",
        "pipeline/test_wiring.py::test_a_credit_key_reaches_its_field",
    ),
    "wrong and long responses learnt": Mutant(
        "roll/runs/rlvr/wiring.py",
        "config.error_max_len_threshold if config.error_max_len_clip else None",
        "None",
        "pipeline/test_wiring.py::test_a_shaping_key_reaches_its_field",
    ),
    "penalty of length not wired": Mutant(
        "roll/runs/rlvr/wiring.py",
        "buffer.len, buffer.penalty_factor)",
        "buffer.len)",
        "pipeline/test_wiring.py::test_a_shaping_key_reaches_its_field",
    ),
    "window not wired": Mutant(
        "roll/runs/rlvr/wiring.py",
        "window=config.rollout_window",
        "window=None",
        "pipeline/test_wiring.py::test_a_scheduler_key_reaches_its_argument",
    ),
    "seeds of samples ignored": Mutant(
        "roll/runs/rlvr/wiring.py",
        "config.seed if config.actor_infer.generating_args.seeded else None",
        "None",
        "pipeline/test_wiring.py::test_prompts_have_seeds_only_if_seeded",
    ),
    "top k of sampling ignored": Mutant(
        "roll/runs/role_models.py",
        "generating.top_k if generating.top_k > 0 else -1",
        "-1",
        "pipeline/test_wiring.py::test_a_sampling_key_reaches_its_field",
    ),
    "values not clipped": Mutant(
        "roll/runs/rlvr/wiring.py",
        "ValueLoss(config.value_clip)",
        "ValueLoss()",
        "pipeline/test_wiring.py::test_the_critics_keys_reach_its_updates",
    ),
    "temperature of distillation ignored": Mutant(
        "roll/runs/teacher.py",
        "config.jsd_beta, config.distill_temperature)",
        "config.jsd_beta)",
        "pipeline/test_wiring.py::test_a_teachers_keys_reach_both_ends",
    ),
    "cross-entropy of distillation ignored": Mutant(
        "roll/runs/offline/wiring.py",
        "Distillation(config.distill_loss_weight)",
        "Distillation()",
        "pipeline/test_wiring.py::test_the_weight_of_distillation_reaches_its_loss",
    ),
    "added preference losses ignored": Mutant(
        "roll/runs/offline/wiring.py",
        "Mixture(first, others) if others else first",
        "first",
        "pipeline/test_wiring.py::test_a_preference_key_reaches_its_field",
    ),
    "Lion's momentum without weight": Mutant(
        "roll/training/deepspeed/setup.py",
        "lerp(parameter.grad, 1 - first)",
        "lerp(parameter.grad, 1 + first)",
        "strategies/test_optimizers.py::test_lions_momentum_may_outvote_a_gradient",
    ),
    "reference asked ahead on shared devices": Mutant(
        "roll/runs/rlvr/wiring.py",
        'alone = plan.reference == "role" and "reference" not in neighbours(plan.roles)',
        'alone = plan.reference == "role"',
        "pipeline/test_wire_rlvr.py::test_reference_works_ahead_only_on_own_devices",
    ),
    "no validation after the last step": Mutant(
        "roll/runs/rlvr/validation.py",
        "(step % self.every and step != self.last_step)",
        "step % self.every",
        "pipeline/test_wire_rlvr.py::test_validation_comes_first_regularly_and_last",
    ),
    "second save counts from another head": Mutant(
        "roll/rollout/scheduler.py",
        "gone + [ordinal - head for ordinal in",
        "gone + [ordinal for ordinal in",
        "rollout/test_window.py::test_a_second_save_counts_from_its_own_head",
    ),
    "loss scaled by the largest of its micro-batch": Mutant(
        OBJECTIVES,
        "return Surrogate(losses, ratio.detach(), torch.zeros_like(",
        "losses = losses / losses.detach().abs().max()\n"
        "        return Surrogate(losses, ratio.detach(), torch.zeros_like(",
        "algorithms/test_split.py::test_no_split_changes_the_gradient",
    ),
    "policy loss without a case": Mutant(
        OBJECTIVES,
        '@OBJECTIVES.register("kl_cov")',
        f'{PLANTED_LOSS}@OBJECTIVES.register("kl_cov")',
        f"{COMPLETE}::test_every_policy_loss_has_a_case",
    ),
    "policy loss without a row": Mutant(
        OBJECTIVES,
        '@OBJECTIVES.register("kl_cov")',
        f'{PLANTED_LOSS}@OBJECTIVES.register("kl_cov")',
        f"{COMPLETE}::test_every_method_has_a_row",
    ),
    "preference loss without a case": Mutant(
        "roll/algorithms/preference.py",
        '@PAIR_OBJECTIVES.register("sft")',
        f'{PLANTED_PREFERENCE}@PAIR_OBJECTIVES.register("sft")',
        f"{COMPLETE}::test_every_preference_loss_has_a_case",
    ),
    "estimator without a row": Mutant(
        "roll/algorithms/advantages.py",
        '@ADVANTAGES.register("gae")',
        f'{PLANTED_ESTIMATOR}@ADVANTAGES.register("gae")',
        f"{COMPLETE}::test_every_method_has_a_row",
    ),
    "estimator without a case of other prompts": Mutant(
        "roll/algorithms/advantages.py",
        '@ADVANTAGES.register("gae")',
        f'{PLANTED_ESTIMATOR}@ADVANTAGES.register("gae")',
        "algorithms/test_invariances.py::test_every_estimator_is_of_one_kind",
    ),
    "ranks with different weights accepted": Mutant(
        "roll/training/actor_train.py",
        "if len({bucket.checksum for bucket in ranks}) > 1:",
        "if len({bucket.checksum for bucket in ranks}) > 2:",
        "workers/test_actor_train.py::test_ranks_that_gathered_different_weights_are_an_error",
    ),
}


def main() -> int:
    """Run the tests with and without the mutants, and print the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run (default: all)")
    names = parser.parse_args().names or list(MUTANTS)
    if unknown := sorted(set(names) - set(MUTANTS)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(MUTANTS)}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder)
        for part in PARTS:
            (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, root / part)
        if not passes(root, *sorted({MUTANTS[name].test for name in names})):
            print("a test fails without a mutant")
            return 1
        survivors = [name for name in names if survives(root, name)]
    print(f"{len(names) - len(survivors)} of {len(names)} caught")
    return 1 if survivors else 0


def survives(root: Path, name: str) -> bool:
    """Run one mutant below `root`, and restore its file."""
    mutant = MUTANTS[name]
    mutant.apply(root)
    survived = passes(root, mutant.test)
    shutil.copy(ROOT / mutant.file, root / mutant.file)
    print(f"{'SURVIVED' if survived else 'caught  '} {name}: {mutant.test}", flush=True)
    return survived


def passes(root: Path, *tests: str) -> bool:
    """Return whether the tests pass below `root`. Any other end than passed or failed tests is an error."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *(f"tests/unit/{test}" for test in tests),
    ]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode in (0, 1), f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
