"""Keys of the configuration reach the settings of rollouts, rewards, credit, critic, teacher and preferences: one key
at a time.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from roll.algorithms.divergence import Divergence
from roll.algorithms.losses import ValueLoss
from roll.algorithms.methods import ESTIMATORS, PREFERENCE_LOSSES, EstimatorTraits, Method, PreferenceTraits, readers
from roll.algorithms.preference import ChosenLikelihood, Dpo, DpoNorm, Ipo, Kto, Mixture, OrPo, PreferenceLoss, SimPo
from roll.algorithms.shaping import Overlong
from roll.config.plan.plan import make_plan
from roll.config.schema.model import GeneratingConfig
from roll.config.schema.rlvr import OverlongBufferConfig
from roll.config.schema.self_distillation import SelfDistillationConfig
from roll.models.student import TeacherTop
from roll.rollout.filters import everything
from roll.runs import teacher as wire_teacher
from roll.runs.offline import wiring as wire_distill
from roll.runs.offline.wiring import preference_loss
from roll.runs.rlvr import wiring as wire_critic
from roll.runs.rlvr import wiring as wire_rlvr
from roll.runs.role_models import sampling_of
from roll.types import Sampling

Configured = Callable[..., Any]
RLVR = "tiny/tiny_rlvr_lora_zero3"
Case = tuple[Mapping[str, Any], Callable[[Any], Any], Any]
"""Keys, what is read from the settings, and the value expected."""


def keys_in(function: Callable[..., object]) -> set[str]:
    """Return the keys that a function reads from its argument `config`."""
    nodes = [node for node in ast.walk(ast.parse(inspect.getsource(function))) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "config"}


def keys_of(cases: list[Case]) -> set[str]:
    return {key for keys, _, _ in cases for key in keys}


SAMPLING: list[tuple[Mapping[str, Any], Sampling]] = [
    ({}, Sampling(30, samples=5)),
    ({"max_new_tokens": 7}, Sampling(7, samples=5)),
    ({"num_return_sequences": 2}, Sampling(30, samples=2)),
    ({"temperature": 0.7}, Sampling(30, samples=5, temperature=0.7)),
    ({"top_p": 0.9}, Sampling(30, samples=5, top_p=0.9)),
    ({"top_k": 20}, Sampling(30, samples=5, top_k=20)),
    ({"top_k": 0}, Sampling(30, samples=5, top_k=-1)),
    ({"repetition_penalty": 1.1}, Sampling(30, samples=5, repetition_penalty=1.1)),
    ({"stop_strings": ("END", "\n")}, Sampling(30, samples=5, stop=("END", "\n"))),
    ({"ignore_eos": True}, Sampling(30, samples=5, ignore_eos=True)),
]


@pytest.mark.parametrize(("keys", "expected"), SAMPLING, ids=str)
def test_a_sampling_key_reaches_its_field(keys: Mapping[str, Any], expected: Sampling) -> None:
    found = sampling_of(GeneratingConfig.model_validate(keys), 30, samples=5, log_probs=True)
    assert found == expected
    assert not sampling_of(GeneratingConfig.model_validate(keys), 30, samples=5, log_probs=False).log_probs


USERS = Method("roll.algorithms.advantages:grpo", EstimatorTraits())
GIGPO = {"episode_reward_weight": 0.5, "step_reward_weight": 0.25, "step_reward_gamma": 0.75, "gigpo_std": False}
SELF_TAUGHT = SelfDistillationConfig.model_validate({"sees": ["success"], "weight": 0.25})
CREDIT: list[Case] = [
    *(
        ({"norm_mean_type": scope}, lambda credit: credit.normalisation.mean, scope)
        for scope in ("batch", "group", "domain", "running", None)
    ),
    *(
        ({"norm_std_type": scope}, lambda credit: credit.normalisation.std, scope)
        for scope in ("batch", "group", "domain", "running", None)
    ),
    ({"gamma": 0.9}, lambda credit: credit.normalisation.gamma, 0.9),
    ({"lambd": 0.8}, lambda credit: credit.normalisation.lambd, 0.8),
    ({"whiten_advantages": True}, lambda credit: credit.normalisation.whiten, True),
    ({"reward_clip": 3.0}, lambda credit: credit.normalisation.reward_clip, 3.0),
    ({"reward_clip_on": "normalised"}, lambda credit: credit.normalisation.clips_normalised, True),
    ({"advantage_clip": 4.0}, lambda credit: credit.normalisation.advantage_clip, 4.0),
    *(({"adv_estimator": method}, lambda credit: credit.estimator, name) for name, method in ESTIMATORS.items()),
    (
        {"adv_estimator": ESTIMATORS["pass_at_k"], "pass_k": 3},
        lambda credit: dict(credit.estimator_args),
        {"pass_k": 3},
    ),
    ({"adv_estimator": ESTIMATORS["gigpo"], **GIGPO}, lambda credit: dict(credit.estimator_args), GIGPO),
    (
        {"adv_estimator": USERS, "adv_estimator_args": {"own": 1}},
        lambda credit: dict(credit.estimator_args),
        {"own": 1},
    ),
    ({"add_token_level_kl": True, "init_kl_coef": 0.25}, lambda credit: credit.kl_coef, 0.25),
    ({"add_token_level_kl": False, "init_kl_coef": 0.25}, lambda credit: credit.kl_coef, 0.0),
    *(({"kl_penalty": kind}, lambda credit: credit.kl_estimator, kind) for kind in ("k1", "k2", "k3", "abs")),
    ({"target_kl": 0.5}, lambda credit: credit.target_kl, 0.5),
    ({"kl_horizon": 77}, lambda credit: credit.kl_horizon, 77),
    ({"difficulty_loss_weight": True}, lambda credit: (credit.weigh_difficulty, credit.weigh_length), (True, False)),
    ({"length_loss_weight": True}, lambda credit: (credit.weigh_difficulty, credit.weigh_length), (False, True)),
    ({"self_distillation": None}, lambda credit: credit.teacher_weight, 0.0),
    ({"self_distillation": SELF_TAUGHT}, lambda credit: credit.teacher_weight, 0.25),
]


@pytest.mark.parametrize(
    ("keys", "read", "expected"), CREDIT, ids=lambda one: str(one) if isinstance(one, dict) else ""
)
def test_a_credit_key_reaches_its_field(
    keys: Mapping[str, Any], read: Callable[[Any], Any], expected: object, configured: Configured
) -> None:
    assert read(wire_rlvr.credit(configured(RLVR).model_copy(update=keys))) == expected


SHAPING: list[Case] = [
    ({"max_len_mask": True}, lambda shaping: shaping.max_len_mask, True),
    ({"error_max_len_clip": True, "error_max_len_threshold": 9}, lambda shaping: shaping.longest_wrong, 9),
    ({"error_max_len_clip": False, "error_max_len_threshold": 9}, lambda shaping: shaping.longest_wrong, None),
    (
        {"difficulty_mask": True, "difficulty_low_threshold": 0.1, "difficulty_high_threshold": 0.95},
        lambda shaping: shaping.difficulty,
        (0.1, 0.95),
    ),
    ({"difficulty_mask": False, "difficulty_low_threshold": 0.1}, lambda shaping: shaping.difficulty, None),
    (
        {"overlong_buffer": OverlongBufferConfig.model_validate({"len": 4, "penalty_factor": 0.5})},
        lambda shaping: shaping.overlong,
        Overlong(limit=30, buffer=4, factor=0.5),
    ),
    ({"overlong_buffer": None}, lambda shaping: shaping.overlong, None),
]


@pytest.mark.parametrize(
    ("keys", "read", "expected"), SHAPING, ids=lambda one: str(one) if isinstance(one, dict) else ""
)
def test_a_shaping_key_reaches_its_field(
    keys: Mapping[str, Any], read: Callable[[Any], Any], expected: object, configured: Configured
) -> None:
    assert read(wire_rlvr.shaping(configured(RLVR).model_copy(update=keys), 30)) == expected


SCHEDULER: list[Case] = [
    ({"rollout_batch_size": 6}, lambda given: given["batch_size"], 6),
    ({"async_generation_ratio": 1.5}, lambda given: given["async_generation_ratio"], 1.5),
    ({"rollout_window": 24}, lambda given: given["window"], 24),
]


@pytest.mark.parametrize(
    ("keys", "read", "expected"), SCHEDULER, ids=lambda one: str(one) if isinstance(one, dict) else ""
)
def test_a_scheduler_key_reaches_its_argument(
    keys: Mapping[str, Any],
    read: Callable[[Any], Any],
    expected: object,
    configured: Configured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read(scheduled(configured(RLVR).model_copy(update=keys), monkeypatch)) == expected


def scheduled(config: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments of the scheduler by name."""
    signature = inspect.signature(wire_rlvr.RolloutScheduler)
    monkeypatch.setattr(
        wire_rlvr, "RolloutScheduler", lambda *given, **named: dict(signature.bind(*given, **named).arguments)
    )
    return cast(Any, wire_rlvr.scheduler_of(config, cast(Any, None), cast(Any, None), lambda group: None))


@pytest.mark.parametrize(("seeded", "seed"), [(True, 5), (False, None)])
def test_prompts_have_seeds_only_if_seeded(
    seeded: bool, seed: int | None, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(RLVR, "seed=5", f"++actor_infer.generating_args.seeded={str(seeded).lower()}")
    assert scheduled(config, monkeypatch)["seed"] == seed


def test_dynamic_sampling_reaches_the_scheduler(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = scheduled(configured(RLVR), monkeypatch)
    assert plain["most_batches"] is None and plain["keep"].others is everything
    monkeypatch.undo()
    assert scheduled(configured(RLVR, "+dynamic_sampling.max_num_gen_batches=4"), monkeypatch)["most_batches"] == 4


def test_the_critics_keys_reach_its_updates(configured: Configured) -> None:
    config = configured("algorithms/ppo_critic", "value_clip=0.3", "critic_warmup=2")
    critic = cast(Any, SimpleNamespace(train_step=None))
    found = wire_critic.learning(config, make_plan(config), critic, critic, cast(Any, None))
    assert found.critic is not None and found.critic.loss == ValueLoss(0.3) and found.critic.warmup == 2
    assert found.updates == make_plan(config).batch.updates


@pytest.mark.parametrize("experiment", ["tiny/tiny_distill", "algorithms/on_policy_distillation_full"])
def test_a_teachers_keys_reach_both_ends(
    experiment: str, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a top k, the student's loader gets the divergence. With it, both models get the same k and
    temperature.
    """
    monkeypatch.setattr(wire_teacher, "student_loader", lambda path, teacher, measure: measure)
    monkeypatch.setattr(wire_teacher, "output_rows", lambda path, trust: 100)
    monkeypatch.setattr(wire_teacher, "model_path", lambda config, model: "")
    monkeypatch.setattr(wire_teacher, "model_name", lambda config, model: "")
    model = cast(Any, SimpleNamespace(trust_remote_code=False))
    config = configured(experiment).model_copy(
        update={"divergence": "jsd", "jsd_beta": 0.9, "distill_temperature": 2.0}
    )
    measure, top = Divergence("jsd", 0.9, 2.0), TeacherTop(3, 100, 2.0)
    assert wire_teacher.teaching(config, model, [model]).load == measure
    both = wire_teacher.teaching(config.model_copy(update={"distill_top_k": 3}), model, [model])
    assert cast(Any, both.load).keywords == {"top": top, "measure": measure}
    assert cast(Any, both.wrap).keywords == {"top": top}


def test_the_weight_of_distillation_reaches_its_loss(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_same_tokens", "prepare_rows"):
        monkeypatch.setattr(wire_distill, name, lambda *_: None)
    monkeypatch.setattr(wire_distill, "teaching", lambda *_: SimpleNamespace(load=None, wrap=None))
    made: list[Any] = []
    pipeline = SimpleNamespace(prepared=lambda config: None)
    monkeypatch.setattr(wire_distill, "OfflinePipeline", lambda rows, make, *_: made.append(make) or pipeline)
    wire_distill.prepare_distill(configured("tiny/tiny_distill", "distill_loss_weight=0.25"))
    assert made[0].args == (wire_distill.Distillation(0.25),)


PREFERENCES: list[tuple[Mapping[str, Any], object]] = [
    ({"preference_loss": "dpo", "beta": 0.3}, Dpo(0.3, 0.0)),
    ({"preference_loss": "dpo", "label_smoothing": 0.2}, Dpo(0.1, 0.2)),
    ({"preference_loss": "ipo", "beta": 0.3}, Ipo(0.3)),
    ({"preference_loss": "dpo_norm", "beta": 3.0, "label_smoothing": 0.2}, DpoNorm(3.0, 0.2)),
    ({"preference_loss": "simpo", "beta": 2.0, "simpo_gamma": 0.7}, SimPo(2.0, 0.7)),
    ({"preference_loss": "orpo", "beta": 0.3}, OrPo(0.3)),
    (
        {"added_preference_losses": {"sft": 0.2, "ipo": 0.5}},
        Mixture(Dpo(0.1), ((0.2, ChosenLikelihood()), (0.5, Ipo(0.1)))),
    ),
    (
        {
            "preference_loss": Method("roll.algorithms.preference:Ipo", PreferenceTraits()),
            "preference_loss_args": {"beta": 7.0},
        },
        Ipo(7.0),
    ),
]


@pytest.mark.parametrize(("keys", "expected"), PREFERENCES, ids=lambda one: str(one) if isinstance(one, dict) else "")
def test_a_preference_key_reaches_its_field(keys: Mapping[str, Any], expected: object, configured: Configured) -> None:
    assert preference_of(keys, configured) == PreferenceLoss(cast(Any, expected))


def preference_of(keys: Mapping[str, Any], configured: Configured) -> object:
    named = {
        key: PREFERENCE_LOSSES.get(value, value) if key == "preference_loss" else value for key, value in keys.items()
    }
    return preference_loss(configured("tiny/tiny_dpo").model_copy(update={"beta": 0.1, "label_smoothing": 0.0} | named))


def test_ktos_keys_reach_their_fields(configured: Configured) -> None:
    keys = {"preference_loss": "kto", "beta": 0.3, "desirable_weight": 2.0, "undesirable_weight": 3.0}
    assert preference_of(keys, configured) == Kto(0.3, 2.0, 3.0)


def test_no_key_is_left_out() -> None:
    assert keys_in(wire_rlvr.credit) <= keys_of(CREDIT) and keys_in(wire_rlvr.shaping) <= keys_of(SHAPING)
    own = {key for key in readers(ESTIMATORS) if key not in ("value_clip", "critic_warmup")}
    assert own <= keys_of(CREDIT), "a key of an estimator"
    other = {"preference_loss": None, "desirable_weight": None, "undesirable_weight": None}
    assert set(readers(PREFERENCE_LOSSES)) <= {key for keys, _ in PREFERENCES for key in keys} | set(other)
    direct = keys_in(wire_rlvr.scheduler_of) - {"seed", "actor_infer"}
    assert direct == keys_of(SCHEDULER)
