"""Checks the block `speculative`: the draft, and what speculative decoding was not tried with. Does not import vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from roll.config.derived.model_shape import ModelShape
from roll.config.derived.placement import model_roles
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RewardModelRole, RoleConfig
from roll.engines.vllm.settings import SpeculativeConfig, VllmConfig
from roll.errors import Fault


def speculation_faults(
    engine: VllmConfig, place: str, name: str, role: RoleConfig, config: Config, shape: ModelShape | None
) -> Iterator[Fault]:
    """Yield faults of the block `speculative`.

    On the CPU, vLLM 0.32 divides the logits of the tokens that it verifies by numbers from uninitialised memory instead
    of the temperature (its `_expand_kernel_impl` fills a copy).
    """
    block = engine.speculative
    if block is None:
        return
    yield from _draft(block, place, shape)
    if role.device_mapping is None:
        problem = f"{block.method}, but on the CPU vLLM samples at a wrong temperature where it verifies a draft"
        yield Fault(place, problem, "remove it", "not_supported")
    if isinstance(role, RewardModelRole):
        yield Fault(place, f"{block.method}, but a reward model generates nothing", "remove it", "no_effect")
    if isinstance(config, RlvrConfig) and config.router_replay and name == "actor_infer":
        problem = "true, but whether an engine returns the routes of verified tokens was not tried"
        yield Fault("router_replay", problem, f"set it to false, or remove {place}", "not_supported")
    if block.draft is not None and (sharing := _sharing(name, config)):
        problem = f"it shares devices with {' and '.join(sharing)} in turns, and a draft that has left them is lost"
        yield Fault(f"{place}.draft", problem, "set time_sharing=false, or use the method ngram", "not_supported")
    untried = {
        "quantization": engine.quantization is not None and block.draft is not None,
        "a model with gated-delta layers": bool(shape and shape.delta),
        "a model that sees pictures": bool(shape and shape.vision),
    }
    if names := [what for what, is_given in untried.items() if is_given]:
        yield Fault(place, f"{block.method} was not tried with {' or '.join(names)}", "remove it", "not_supported")


def _draft(block: SpeculativeConfig, place: str, shape: ModelShape | None) -> Iterator[Fault]:
    """Yield faults of the draft's folder, and of keys that the method does not read."""
    where = f"{place}.draft"
    if block.method == "ngram":
        if block.draft is not None:
            yield Fault(where, f"'{block.draft}', but ngram has no weights", "remove it", "no_effect")
        return
    if block.longest_match != SpeculativeConfig.model_fields["longest_match"].default:
        problem = f"{block.longest_match}, but only the method ngram looks for tokens"
        yield Fault(f"{place}.longest_match", problem, "remove it", "no_effect")
    if block.draft is None:
        yield Fault(where, f"missing, but {block.method} needs weights", "set it to the draft's folder", "missing")
        return
    try:
        written = dict(json.loads((Path(block.draft) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        problem = f"'{block.draft}' has no config.json that can be read: {error}"
        yield Fault(where, problem, "set it to a folder with the draft's weights and config.json", "not_found")
        return
    if not block.draft_bytes:
        problem = f"'{block.draft}' has no weights (*.safetensors)"
        yield Fault(where, problem, "set it to a folder with the draft's weights and config.json", "not_found")
    if shape and written.get("vocab_size") != shape.vocab_size:
        problem = (
            f"'{block.draft}' has a vocabulary of {written.get('vocab_size')} tokens, and the model {shape.vocab_size}"
        )
        yield Fault(where, problem, "use a draft with the model's vocabulary", "contradiction")


def _sharing(name: str, config: Config) -> list[str]:
    """Return the roles with which a role takes turns on its devices, by their names."""
    devices = {other: set(role.device_mapping or ()) for other, role in model_roles(config).items()}
    others = [other for other in devices if other != name and devices[name] & devices[other]]
    return others if config.time_sharing else []
