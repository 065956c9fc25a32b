"""Checks the keys of the partners of environments, and of what depends on them."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.checks.domains import api_faults
from roll.config.derived.domains import CRITIC, CRITIQUE, CRITIQUES, ENVIRONMENTS, environment_of
from roll.config.derived.fixed_roles import all_partners
from roll.config.derived.placement import shared_partners
from roll.config.schema.environments import EnvironmentConfig
from roll.config.schema.partners import PartnerConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import Fault

OF_MODEL = ("model_args", "strategy_args", "device_mapping", "world_size", "template")
OF_API = ("api_url", "model_name", "api_key_variable", "timeout", "retries", "concurrency", "max_calls")
UNREAD = {
    "inference": OF_API,
    "api": OF_MODEL,
    "live": (*OF_MODEL, *OF_API, "generating_args", "system_envs"),
}
"""By type of partner: the keys that it does not read."""


def partner_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of partners, of environments with agents that cannot have them, and of what a reward scores."""
    for place, (domain, _, partner) in all_partners(config).items():
        yield from _unread(place, partner)
        yield from _sampling(f"{place}.generating_args", partner)
        if partner.type == "inference" and partner.strategy_args is None:
            remedy = "add strategy_args with strategy_name vllm or hf_infer"
            yield Fault(f"{place}.strategy_args", "missing, but the run serves the model", remedy, "missing")
        if partner.type == "inference" and (partner.model_args is None or not partner.model_args.model_name_or_path):
            # An evaluation puts the evaluated model in the place of pretrain, which is no fixed partner.
            remedy = "set it to the model's folder or Hub name, for the policy before the first step that of pretrain"
            problem = "missing, but the run serves the model"
            yield Fault(f"{place}.model_args.model_name_or_path", problem, remedy, "missing")
        if partner.type == "api":
            yield from _api(place, partner, config.environments[domain].episode_timeout)
    for place, others in shared_partners(config).items():
        problem = (
            f"shared with {' and '.join(others)}, which take turns, but a partner answers at any time of an episode"
        )
        remedy = "give it devices of its own, or set time_sharing=false so that all roles stay on the devices"
        yield Fault(f"{place}.device_mapping", problem, remedy, "contradiction")
    for domain, section in config.environments.items():
        where = f"{ENVIRONMENTS}{domain}"
        if section.agent is not None and section.partners:
            problem = "set, but an agent runs its episodes itself, and may call other models as it likes"
            yield Fault(f"{where}.partners", problem, "remove it, or remove agent", "exclusive")
        if section.scored is not None and domain not in config.rewards:
            problem = f"'{section.scored}', but there is no rewards.{domain} that scores a text"
            yield Fault(f"{where}.scored", problem, f"remove it, or add rewards.{domain}", "owner_missing")
        if environment_of(domain, section) == CRITIQUE:
            yield from _critique(where, domain, section, config)


def _unread(place: str, partner: PartnerConfig) -> Iterator[Fault]:
    # A resolved configuration contains every key, so keys with their default values do not count.
    usual = {key: field.get_default(call_default_factory=True) for key, field in PartnerConfig.model_fields.items()}
    for key in UNREAD[partner.type]:
        if getattr(partner, key) != usual[key]:
            yield Fault(
                f"{place}.{key}", f"set, but a partner of type {partner.type} does not read it", "remove it", "unread"
            )


def _sampling(where: str, partner: PartnerConfig) -> Iterator[Fault]:
    sampling = partner.generating_args
    if partner.type == "live" or sampling is None:
        return
    if sampling.num_return_sequences not in (None, 1):
        problem = f"{sampling.num_return_sequences}, but a partner's turn is a single answer"
        yield Fault(f"{where}.num_return_sequences", problem, "remove it", "not_supported")
    if sampling.seeded:
        problem = "true, but the seed of an episode decides: actor_infer.generating_args.seeded"
        yield Fault(f"{where}.seeded", problem, "remove it, and set that key", "unread")


def _api(place: str, partner: PartnerConfig, episode_seconds: float) -> Iterator[Fault]:
    model, url = ("model_name", partner.model_name), ("api_url", partner.api_url)
    yield from api_faults(place, model, url, ("api_key_variable", partner.api_key_variable), "PARTNER_API_KEY")
    if partner.timeout >= episode_seconds:
        problem = (
            f"{partner.timeout:g} s is not below episode_timeout, {episode_seconds:g} s: one request could outlast it"
        )
        yield Fault(f"{place}.timeout", problem, "lower it, or raise episode_timeout", "not_below")


def _critique(where: str, domain: str, section: EnvironmentConfig, config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of the environment `critique`: no critic, no reward, or a critique that no turn would follow."""
    if CRITIC not in section.partners and section.agent is None:
        problem = f"missing, but '{CRITIQUE}' asks the partner '{CRITIC}'"
        yield Fault(f"{where}.partners.{CRITIC}", problem, "add it, with its type", "missing")
    if domain not in config.rewards:
        problem = f"'{CRITIQUE}' returns no reward of its own, and there is no rewards.{domain}"
        yield Fault(where, problem, f"add rewards.{domain}, which scores the policy's last answer", "missing")
    critiques = section.environment_args.get("critiques", CRITIQUES)
    if isinstance(critiques, int) and section.max_turns <= critiques:
        problem = f"{section.max_turns}, but no turn would follow the last of {critiques} critiques"
        yield Fault(f"{where}.max_turns", problem, f"set it to at least {critiques + 1}", "too_small")
