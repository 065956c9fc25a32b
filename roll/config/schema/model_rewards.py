"""Keys of rewards that a model gives: a judge that writes its verdict, or a classifier whose score is the reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll.config.schema.base import NonNegativeFloat, NonNegativeInt, PathText, PositiveFloat, PositiveInt, Seconds, StrictConfig
from roll.config.schema.engine import HfInferStrategyConfig, VllmStrategyConfig
from roll.config.schema.model import GeneratingConfig, ModelConfig

JUDGE, SCORER = "llm_judge", "reward_model"
MODEL_REWARDS = (JUDGE, SCORER)
"""Rewards that are not functions."""
ServingStrategy = Annotated[VllmStrategyConfig | HfInferStrategyConfig, Field(discriminator="strategy_name")]


class JudgeSamplingConfig(GeneratingConfig):
    """How a judge's answers are sampled."""

    max_new_tokens: PositiveInt = Field(512, description="Longest answer in tokens.")
    temperature: NonNegativeFloat = Field(0.0, description="Softmax temperature; 0 is greedy.")
    num_return_sequences: PositiveInt = Field(1, description="Answers to each response; the reward is the mean of their verdicts.")


class ModelRewardKeys(StrictConfig):
    """Keys of a domain whose reward is `llm_judge` or `reward_model`."""

    model_args: ModelConfig | None = Field(None, description="`llm_judge`, `reward_model`: the model that is served in the run.")
    strategy_args: ServingStrategy | None = Field(None, description="The backend that serves it.")
    device_mapping: tuple[NonNegativeInt, ...] | None = Field(
        None, description="Its GPUs, as of any role. Without it the model runs on the CPU, in `world_size` workers."
    )
    generating_args: JudgeSamplingConfig | None = Field(None, description="`llm_judge`: sampling of its answers.")
    template: Literal["native", "chatml", "qwen2_5", "raw"] = Field(
        "native", description="Chat template of a model that is served in the run, as of `data_args`."
    )
    max_tokens_per_microbatch: PositiveInt | None = Field(
        None, description="`reward_model` with `hf_infer`: token budget of one forward pass; see the roles' key."
    )
    infer_batch_size: PositiveInt = Field(1, description="`reward_model` with `hf_infer`: sequences behind the default of that budget.")
    judge_model_type: Literal["inference", "api"] | None = Field(
        None, description="`llm_judge`, required: a model that is served in the run, or one behind a URL."
    )
    judge_prompt: PathText | None = Field(
        None,
        description="The judge's prompt: `same_answer`, `score`, or a text file with `{question}`, `{response}` and `{reference}` "
        "in it; `score` if not given.",
    )
    judge_pattern: str | None = Field(
        None,
        description="Regular expression that finds the verdict in the answer: the group of its last match, a number, yes or no; without "
        'a group a match is 1, and none 0. If not given: the word "yes" with a `judge_prompt`, else `Score: x` of 10.',
    )
    judge_max_score: PositiveFloat | None = Field(
        None,
        description="The number is divided by this; one above it or below 0 is no verdict. If not given, the number is the reward.",
    )
    judge_api_url: str | None = Field(
        None, description="`api`: base of an OpenAI-compatible API (`https://host/v1`), or the whole address of its chat completions."
    )
    judge_model_name: str | None = Field(None, description="`api`: the model's name there.")
    judge_api_key_env: str | None = Field(None, description="`api`: environment variable that holds the key; none is sent if not given.")
    judge_timeout: Seconds = Field(60.0, description="`api`: deadline of one request, in seconds.")
    judge_retries: NonNegativeInt = Field(5, le=1000, description="`api`: further attempts after a request that failed temporarily.")
    judge_concurrency: PositiveInt = Field(32, le=65536, description="`api`: concurrent requests.")
    judge_max_calls: PositiveInt | None = Field(
        None,
        description="`api`: most requests, with retries, until the run ends or resumes or the calling process is replaced. "
        "Further responses get no verdict.",
    )
