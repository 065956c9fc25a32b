"""Wires the partners of environments: fixed models that the run serves, and models behind URLs."""

from __future__ import annotations

import os
from collections.abc import Callable

from roll.agents.partners import ApiPartner, EnginePartner, Partner
from roll.config.derived.fixed_roles import all_partners, partner_context, partner_role, partner_sampling
from roll.config.schema.partners import PartnerConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import PartnerRole
from roll.data.chat import NO_END, EndOfTurn
from roll.rewards.judges.chat_api import ApiModel
from roll.runs.model_paths import model_path
from roll.runs.rlvr.reward_models import chat_end, conversation_encoder, template_faults, with_chat_model
from roll.runs.role_models import model_shape, sampling_of
from roll.runs.roles import Roles
from roll.types import Sampling

FixedPartners = dict[tuple[str, str], Partner]
"""Partners with constant weights, by domain and name."""


def prepare_partners(config: RlvrConfig) -> Callable[[Roles], FixedPartners]:
    """Read the templates and tokenizers of all partners that the run serves.

    Return a function that requests the partners from the roles. Those of type `live` are not among them.

    Raises:
        DataError: a tokenizer cannot be read, or its template refuses a user message.
    """
    makers: dict[tuple[str, str], Callable[[Roles], Partner]] = {}
    for place, (domain, name, partner) in all_partners(config).items():
        if partner.type == "api":
            makers[domain, name] = _behind_url(config, place, partner)
        elif (role := partner_role(partner)) is not None:
            makers[domain, name] = _served(config, place, partner, role)
    return lambda roles: {key: make(roles) for key, make in makers.items()}


def _behind_url(config: RlvrConfig, place: str, partner: PartnerConfig) -> Callable[[Roles], Partner]:
    """Prepare a partner behind a URL. Its API key is read from the environment of this process."""
    assert partner.api_url is not None and partner.model_name is not None, "the configuration was checked"
    model = ApiModel(
        url=partner.api_url,
        model=partner.model_name,
        key=os.environ[partner.api_key_variable] if partner.api_key_variable else None,
        sampling=_sampling(partner, NO_END),
        seconds=partner.timeout,
        retries=partner.retries,
        concurrency=partner.concurrency,
        max_calls=partner.max_calls,
        seed=config.seed,
        budget=f"{place}.max_calls",
    )
    return lambda roles: ApiPartner(roles.api_judge(place, model, partner.system_envs))


def _served(config: RlvrConfig, place: str, partner: PartnerConfig, role: PartnerRole) -> Callable[[Roles], Partner]:
    encode = with_chat_model(config, place, role, partner.template, conversation_encoder)
    with template_faults(place, partner.template):
        encode([{"role": "user", "content": "?"}])
    sampling = _sampling(partner, with_chat_model(config, place, role, partner.template, chat_end))
    shape = model_shape(model_path(config, role.model_args))
    context = partner_context(config, partner, shape.max_position_embeddings if shape else None)

    def make(roles: Roles) -> Partner:
        engines, length = roles.fixed_engines(place, role, context)
        return EnginePartner(engines, encode, sampling, length)

    return make


def _sampling(partner: PartnerConfig, end: EndOfTurn) -> Sampling:
    keys = partner_sampling(partner)
    assert keys.max_new_tokens is not None
    return sampling_of(keys, keys.max_new_tokens, 1, False, end)
