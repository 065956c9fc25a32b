"""Wires rewards that a model computes: the judge or the reward model of a domain, and the tokens that it reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from roll.config.derived.batch import longest_sequence
from roll.config.derived.fixed_roles import (
    PREFIX,
    TEMPLATE_TOKENS,
    judge_context,
    judge_sampling,
    model_reward,
    reward_role,
)
from roll.config.schema.model import DataConfig, ModelConfig
from roll.config.schema.model_rewards import JUDGE, SCORER
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RewardConfig, RewardModelRole
from roll.config.shipped import judge_templates
from roll.data.chat import (
    NO_END,
    ChatTemplate,
    EndOfTurn,
    Render,
    Template,
    end_of_turn,
    render_example,
    renderer,
    template_remedy,
    with_white_space,
)
from roll.data.native import added_tokens, special_marks
from roll.data.picture_files import data_url
from roll.data.picture_parts import MARK
from roll.data.pictures import Sight, load_sight
from roll.data.questions import marked_pictures, named_pictures
from roll.data.rows import Conversation, prompt_conversation
from roll.data.tables import adds_space, continuation
from roll.errors import DataError, Fault
from roll.models.load import load_tokenizer, sees_readably
from roll.models.value import check_reward_model, pad_token, scored_token
from roll.rewards.judges.chat_api import ApiModel, Messages
from roll.rewards.judges.judge import SCORE_TEMPLATE, Chat, Judge, JudgeTemplate, answer_pattern
from roll.rewards.judges.reward_models import EncodeMessage, EngineJudge, ScoredTokens, Scorer
from roll.rewards.reward_workers import ModelReward
from roll.runs.model_paths import model_path
from roll.runs.rlvr.seeing_judges import (
    AnsweredEncoder,
    SeeingScorerEncoder,
    seeing_encoder,
    shown_urls,
    trial_picture,
)
from roll.runs.role_models import model_shape, sampling_of
from roll.runs.roles import Roles
from roll.types import Ints, Prompt, Sampling

E = TypeVar("E")


def prepare_reward_models(config: RlvrConfig) -> Callable[[Roles], dict[str, ModelReward]]:
    """Read the templates and tokenizers of every domain that a model scores.

    Return a function that requests these models from the roles, and returns their rewards by domain.

    Raises:
        DataError: a tokenizer cannot be read, or its template refuses a user message.
    """
    prepare = {JUDGE: prepare_judge, SCORER: prepare_scorer}
    makers: dict[str, Callable[[Roles], ModelReward]] = {
        domain: prepare[kind](config, domain, reward)
        for domain, reward in config.rewards.items()
        if (kind := model_reward(domain, reward)) is not None
    }
    return lambda roles: {domain: make(roles) for domain, make in makers.items()}


def prepare_judge(config: RlvrConfig, domain: str, reward: RewardConfig) -> Callable[[Roles], Judge]:
    """Prepare a domain that a judge scores. Return a function that requests the judge from the roles.

    Raises:
        DataError: the judge's tokenizer cannot be read, or its template refuses a user message.
    """
    template = judge_template(reward.judge_prompt)
    pattern = answer_pattern(reward.judge_pattern, reward.judge_max_score, reward.judge_prompt)
    role = reward_role(domain, reward)
    chat: Callable[[Roles], Chat]
    if role is None:
        chat = partial(api_chat, api_model(config, reward), f"{PREFIX}{domain}", reward)
    else:
        chat = partial(
            engine_chat,
            config,
            domain,
            role,
            judge_encoder(config, domain, role),
            with_chat_model(config, f"{PREFIX}{domain}", role, reward.template, chat_end),
        )
    question, pictures = question_of(row_sources(config)), shown_urls if reward.judge_sees_pictures else None
    return lambda roles: Judge(template, pattern, chat(roles), question, reward.failed_value, pictures)


def prepare_scorer(config: RlvrConfig, domain: str, reward: RewardConfig) -> Callable[[Roles], Scorer]:
    """Prepare a domain that a reward model scores. Return a function that requests the model from the roles.

    Raises:
        DataError: the tokenizer or the model's configuration cannot be read, or the model is not a reward model.
    """
    role = reward_role(domain, reward)
    assert role is not None, "the configuration was checked"
    path, model_args = model_path(config, role.model_args), role.model_args
    check_reward_model(path, model_args)
    pad = pad_token(path, model_args)
    sources = row_sources(config)
    place = f"{PREFIX}{domain}"
    tokenizer = load_tokenizer(path, model_args.trust_remote_code)
    sight = _sight_of_scorer(config, place, path, tokenizer, model_args)
    with template_faults(place, reward.template):
        answered = answered_encoder(renderer(reward.template, tokenizer), tokenizer, reward.template == "raw")
        answered([{"role": "user", "content": "?"}], "!")
        seen = SeeingScorerEncoder(answered, sight) if sight else None
        if seen:
            seen([{"role": "user", "content": f"{MARK}?"}], (trial_picture(),), "!")

    def encode(prompt: Prompt, response: str) -> ScoredTokens:
        source, shown = source_of(prompt.row, sources), None
        if seen:
            files = prompt.shown.asked().files if prompt.shown else ()
            tokens, shown = seen(marked_pictures(prompt.row, source, len(files)), files, response)
        else:
            tokens = answered(prompt_conversation(prompt.row, source), response)
        return tokens[: int(np.flatnonzero(scored_token(tokens, pad))[0]) + 1], shown

    def make(roles: Roles) -> Scorer:
        engines, context = roles.reward_model(
            f"{PREFIX}{domain}", role, positions_of(path, config, model_args.sees_pictures)
        )
        return Scorer(engines, encode, context, reward.failed_value)

    return make


def _sight_of_scorer(
    config: RlvrConfig, place: str, path: str, tokenizer: PreTrainedTokenizerBase, model_args: ModelConfig
) -> Sight | None:
    """Return how a reward model sees pictures; None if it sees none. Raises DataError if the policy sees some then."""
    sight = load_sight(path, tokenizer, model_args.trust_remote_code, model_args.sees_pictures)
    policy = config.actor_train.model_args
    if sight is None and sees_readably(model_path(config, policy), policy):
        problem = f"'{path}' sees no pictures, and the policy's prompts may show some"
        remedy = "use a reward model that sees pictures (Qwen3.5 and Gemma 3: set model_args.sees_pictures: true), or "
        remedy += "a policy of text alone"
        raise DataError(Fault(f"{place}.model_args.model_name_or_path", problem, remedy, "unfit"))
    return sight


def positions_of(path: str, config: RlvrConfig, asked: bool | None = None) -> int:
    """Return the largest number of tokens of an input to a reward model, counted by the model's own tokenizer.

    It is twice the longest sequence of the policy, plus the tokens of the template, but at most the model's number of
    position embeddings.

    Args:
        asked: `model_args.sees_pictures`.
    """
    shape = model_shape(path, asked)
    room = 2 * longest_sequence(config) + TEMPLATE_TOKENS
    return min(room, shape.max_position_embeddings) if shape and shape.max_position_embeddings else room


def judge_template(name: str | None) -> JudgeTemplate:
    """Return the shipped template of this name, or else the template in the file of this name."""
    file = Path(judge_templates().get(name or SCORE_TEMPLATE, name or ""))
    return JudgeTemplate(file.read_text(encoding="utf-8").rstrip("\n"))


def row_sources(config: RlvrConfig) -> list[DataConfig]:
    """Return the `data_args` of all data sets whose rows are scored."""
    held_out = config.validation.named_sets() if config.validation else {}
    sources = [config.actor_train.data_args, *(one.data_args for one in held_out.values())]
    return [columns for columns in sources if columns is not None]


def question_of(sources: Sequence[DataConfig]) -> Callable[[Prompt], str]:
    """Return a function that returns the user's question in a prompt as text, with the names of its pictures."""
    return lambda prompt: question_text(
        named_pictures(prompt.row, source_of(prompt.row, sources), len(prompt.shown.names) if prompt.shown else 0)
    )


def judge_encoder(config: RlvrConfig, domain: str, role: RewardModelRole) -> EncodeMessage:
    """Return the encoder of a user's message for a judge. Raises DataError if a message, or a picture that the judge
    should see, cannot be encoded.
    """
    place, reward = f"{PREFIX}{domain}", config.rewards[domain]
    if reward.judge_sees_pictures:
        return _seeing_judge_encoder(config, place, role, reward.template)
    encode = with_chat_model(config, place, role, reward.template, message_encoder)
    with template_faults(place, reward.template):
        encode("?")
    return lambda message, _: (encode(message), None)


def _seeing_judge_encoder(config: RlvrConfig, place: str, role: RewardModelRole, template: Template) -> EncodeMessage:
    path, trusts = model_path(config, role.model_args), role.model_args.trust_remote_code
    tokenizer = load_tokenizer(path, trusts)
    sight = load_sight(path, tokenizer, trusts)
    if sight is None:
        problem = f"true, but '{path}' sees no pictures"
        remedy = "remove it, or use a model that sees pictures"
        raise DataError(Fault(f"{place}.judge_sees_pictures", problem, remedy, "unfit"))
    with template_faults(place, template):
        render, tokens = renderer(template, tokenizer), partial(open_tokens, tokenizer=tokenizer)
        encode = seeing_encoder(render, partial(tokens, special_tokens=template == "raw"), sight)
        encode("?", [data_url(trial_picture())])
    return encode


def with_chat_model(
    config: RlvrConfig,
    place: str,
    role: RewardModelRole,
    template: Template,
    make: Callable[[ChatTemplate, PreTrainedTokenizerBase, bool], E],
) -> E:
    """Call `make` with the chat template and the tokenizer of a model, and return the result.

    Args:
        place: path of the block that has the key `template`.

    Raises:
        DataError: the tokenizer cannot be read, or its chat template is needed and missing.
    """
    tokenizer = load_tokenizer(model_path(config, role.model_args), role.model_args.trust_remote_code)
    with template_faults(place, template):
        return make(renderer(template, tokenizer), tokenizer, template == "raw")


@contextmanager
def template_faults(place: str, template: str) -> Iterator[None]:
    """A context that turns a ValueError about a model's template into a DataError for the key `template`."""
    try:
        yield
    except ValueError as error:
        raise DataError(
            Fault(f"{place}.template", f"is '{template}', but {error}", template_remedy(template), "unfit")
        ) from error


def sampling_of_judge(reward: RewardConfig, end: EndOfTurn = NO_END) -> Sampling:
    """Return the sampling parameters of a judge's answers. `end` ends them, besides its own end of sequence."""
    keys = judge_sampling(reward)
    assert keys.max_new_tokens is not None and keys.num_return_sequences is not None
    return sampling_of(keys, keys.max_new_tokens, keys.num_return_sequences, False, end)


def api_model(config: RlvrConfig, reward: RewardConfig) -> ApiModel:
    """Return the judge model behind a URL. Its API key is read from the environment of this process."""
    assert reward.judge_api_url is not None and reward.judge_model_name is not None, "the configuration was checked"
    return ApiModel(
        url=reward.judge_api_url,
        model=reward.judge_model_name,
        key=os.environ[reward.judge_api_key_env] if reward.judge_api_key_env else None,
        sampling=sampling_of_judge(reward),
        seconds=reward.judge_timeout,
        retries=reward.judge_retries,
        concurrency=reward.judge_concurrency,
        max_calls=reward.judge_max_calls,
        seed=config.seed,
    )


def api_chat(model: ApiModel, name: str, reward: RewardConfig, roles: Roles) -> Chat:
    """Request the process that sends requests to the judge's URL."""
    return roles.api_judge(name, model, reward.system_envs)


def chat_end(render: ChatTemplate, tokenizer: PreTrainedTokenizerBase, is_raw: bool) -> EndOfTurn:
    """Return what ends an answer of a model in its template."""
    return NO_END if is_raw else end_of_turn(render, tokenizer)


def engine_chat(
    config: RlvrConfig, domain: str, role: RewardModelRole, encode: EncodeMessage, end: EndOfTurn, roles: Roles
) -> Chat:
    """Request the engines of a judge that the run itself serves."""
    reward = config.rewards[domain]
    shape = model_shape(model_path(config, role.model_args))
    context = judge_context(config, reward, shape.max_position_embeddings if shape else None)
    engines, context = roles.fixed_engines(f"{PREFIX}{domain}", role, context)
    seed = config.seed if judge_sampling(reward).seeded else None
    return EngineJudge(engines, encode, sampling_of_judge(reward, end), context, seed)


def judge_metrics(models: Mapping[str, ModelReward]) -> dict[str, float]:
    """Return the metrics of the judges since the last call."""
    metrics: dict[str, float] = {}
    for domain, model in models.items():
        if isinstance(model, Judge):
            counts = model.reset_counts()
            metrics |= {
                f"judge/{domain}/asked": counts["asked"],
                f"judge/{domain}/remembered": counts["remembered"],
                f"judge/{domain}/unavailable": counts["unavailable"],
                f"judge/{domain}/prompt_tokens": counts["prompt_tokens"],
                f"judge/{domain}/answer_tokens": counts["answer_tokens"],
            }
    return metrics


def requested_conversation(row: Mapping[str, Any], sources: Sequence[DataConfig]) -> Conversation:
    """Return the messages that the policy was asked to answer.

    Args:
        sources: settings of the data sets that the row may come from. The first one whose prompt column the row has is
            used.

    Raises:
        RowFault: the row fits none of the data sets. This cannot happen for a row that was checked when it was
            prepared.
    """
    return prompt_conversation(row, source_of(row, sources))


def source_of(row: Mapping[str, Any], sources: Sequence[DataConfig]) -> DataConfig:
    """Return the first of the data sets whose prompt column the row has, or else the first of all."""
    of_row = [columns for columns in sources if row.get(columns.messages or columns.prompt or "") is not None]
    return (of_row or sources)[0]


def question_text(conversation: Conversation) -> str:
    """Return the conversation as text: the message alone if there is one, or else every message with its role.

    System messages are left out.
    """
    turns = [message for message in conversation if message["role"] != "system"]
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in turns)


def message_encoder(render: Render, tokenizer: PreTrainedTokenizerBase, special_tokens: bool) -> Callable[[str], Ints]:
    """Return the function that converts a user's message to the tokens of a prompt. It raises TemplateFault if the
    template rejects one.

    Args:
        special_tokens: whether the tokenizer adds the special tokens that begin a text. False if the template writes
            them.
    """
    encode = conversation_encoder(render, tokenizer, special_tokens)
    return lambda message: encode([{"role": "user", "content": message}])


def conversation_encoder(
    render: Render, tokenizer: PreTrainedTokenizerBase, special_tokens: bool
) -> Callable[[Messages], Ints]:
    """Return the function that converts a conversation to the tokens of a prompt. See `message_encoder`."""
    return lambda messages: open_tokens(render(messages, True), tokenizer, special_tokens)


def answered_encoder(render: Render, tokenizer: PreTrainedTokenizerBase, special_tokens: bool) -> AnsweredEncoder:
    """Return the function that converts a conversation and its response to tokens, as for training a reward model
    (`prepare_examples`).

    It raises TemplateFault if the template rejects the conversation. Its last argument changes the rendered prompt, to
    write the placeholders of pictures.
    """
    end = tokenizer.eos_token if isinstance(tokenizer.eos_token, str) else ""
    marks = special_marks(tokenizer, str(tokenizer.chat_template or ""))

    def encode(conversation: Conversation, response: str, change: Callable[[str], str] = str) -> Ints:
        messages = [*conversation, {"role": "assistant", "content": response}]
        prompt, answer = render_example(messages, render, end, marks)
        answer = with_white_space(answer, render(messages, False), marks)
        prompt = change(prompt)
        given = open_tokens(prompt, tokenizer, special_tokens)
        plain: Any = tokenizer.encode(answer, add_special_tokens=False)
        continued = continuation(tokenizer, prompt, answer) if adds_space(tokenizer) else plain
        return np.concatenate([given, np.asarray(continued, np.int32)])

    return encode


def open_tokens(text: str, tokenizer: PreTrainedTokenizerBase, special_tokens: bool) -> Ints:
    """Return the tokens of a text that another one continues, without the special tokens that the tokenizer appends."""
    token_ids: Any = tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]
    ending = len(added_tokens(tokenizer)[1]) if special_tokens else 0
    return np.asarray(token_ids[: len(token_ids) - ending], np.int32)
