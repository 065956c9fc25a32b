"""Keys of rewards computed by a model: a judge that generates a verdict, or a classifier whose score is the reward."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll.config.schema.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Seconds,
    StrictConfig,
)
from roll.config.schema.model import GeneratingConfig, ModelConfig
from roll.config.schema.strategies import ServingStrategy

JUDGE, SCORER = "llm_judge", "reward_model"
MODEL_REWARDS = (JUDGE, SCORER)
"""Names of the rewards that are computed by a model."""


class JudgeSamplingConfig(GeneratingConfig):
    """Sampling parameters of a judge."""

    max_new_tokens: PositiveInt = Field(512, description="Longest answer of the judge in tokens.")
    temperature: NonNegativeFloat = Field(0.0, description="Softmax temperature; 0 is greedy decoding.")
    num_return_sequences: PositiveInt = Field(
        1, description="Number of answers per response. The reward is the mean of their verdicts."
    )


class ModelRewardKeys(StrictConfig):
    """Keys of a domain whose reward is `llm_judge` or `reward_model`."""

    model_args: ModelConfig | None = Field(
        None, description="`llm_judge`, `reward_model`: the model that this run serves."
    )
    strategy_args: ServingStrategy | None = Field(None, description="The backend that serves the model.")
    device_mapping: tuple[NonNegativeInt, ...] | None = Field(
        None, description="GPUs of the model, as for a role. If not given, it runs on the CPU in `world_size` workers."
    )
    generating_args: JudgeSamplingConfig | None = Field(
        None, description="`llm_judge`: sampling parameters of the judge's answers."
    )
    template: Literal["native", "chatml", "qwen2_5", "raw"] = Field(
        "native", description="Chat template of a model that this run serves; see `template` of `data_args`."
    )
    max_tokens_per_microbatch: PositiveInt | None = Field(
        None, description="`reward_model` with `hf_infer`: token budget of one micro-batch; see this key of the roles."
    )
    infer_batch_size: PositiveInt = Field(
        1, description="`reward_model` with `hf_infer`: batch size in the default of `max_tokens_per_microbatch`."
    )
    judge_model_type: Literal["inference", "api"] | None = Field(
        None,
        description="`llm_judge`, required: a model that this run serves (`inference`), or one behind a URL (`api`).",
    )
    judge_prompt: PathText | None = Field(
        None,
        description="Prompt of the judge: `same_answer`, `score`, or a text file with `{question}`, `{response}` and "
        "`{reference}`. `score` if not given.",
    )
    judge_pattern: str | None = Field(
        None,
        description="Regular expression for the verdict. The group of its last match in the answer is a number, yes "
        "or no; without a "
        "group, a match is 1 and no match 0. If not given: `Score: x` out of 10 if `judge_prompt` is `score`, "
        "otherwise the word "
        '"yes".',
    )
    judge_max_score: PositiveFloat | None = Field(
        None,
        description="Largest score: the number is divided by it, and a number above it or below 0 is no verdict. If "
        "not given: 10 for `Score: x`; otherwise the number is the reward.",
    )
    judge_sees_pictures: bool = Field(
        False,
        description="The judge sees the pictures of a prompt, before its text. `api`: they are sent as `image_url` "
        "parts with `data:` URLs. `inference`: the model must see pictures. If false, it reads `[picture 1]` in place "
        "of the first, and so on.",
    )
    judge_api_url: str | None = Field(
        None,
        description="`api`: base URL of an OpenAI-compatible API (`https://host/v1`), or the full URL of its chat "
        "completions.",
    )
    judge_model_name: str | None = Field(None, description="`api`: name of the model in the API.")
    judge_api_key_env: str | None = Field(
        None, description="`api`: environment variable with the API key; no key is sent if not given."
    )
    judge_timeout: Seconds = Field(60.0, description="`api`: timeout of one request, in seconds.")
    judge_retries: NonNegativeInt = Field(
        5, le=1000, description="`api`: number of retries of a request that failed temporarily."
    )
    judge_concurrency: PositiveInt = Field(32, le=65536, description="`api`: number of concurrent requests.")
    judge_max_calls: PositiveInt | None = Field(
        None,
        description="`api`: budget of requests, retries included; further responses get no verdict. The count "
        "restarts if the run resumes or the calling process is replaced.",
    )
