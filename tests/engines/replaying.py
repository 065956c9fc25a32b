"""Compares the trainer's log-probs and choice of experts with those of an engine that returned its routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.models.load import load_causal_model
from roll.models.packed import PackedPolicy, packed_inputs
from roll.models.replay import RouteReplay
from roll.models.routers import router_modules
from roll.types import Completion, Ints
from tests.engines.generating import engine_log_probs


@dataclass(frozen=True)
class Compared:
    """The trainer beside the engine, over all sampled tokens."""

    same_routes: float
    """Share of tokens for which the trainer's routers choose the engine's experts in every layer."""
    before: Tensor
    """Log-prob of the trainer minus that of the engine, [S], without replay."""
    after: Tensor
    """The same with replay."""

    def __str__(self) -> str:
        said = [f"{self.same_routes:.4f} of the tokens have the engine's routes without replay"]
        for when, difference in (("without", self.before), ("with", self.after)):
            said.append(f"{when} replay KL {kl(difference):.3g}, largest difference {difference.abs().max():.3g}")
        return "; ".join(said)


@torch.no_grad()
def compared(
    model: Path,
    dtype: str,
    pairs: Sequence[tuple[Ints, Completion]],
    weights_of: PackedPolicy | None = None,
    device: str = "cpu",
) -> Compared:
    """Compute the log-probs of responses in the trainer, without replay and with it.

    Args:
        pairs: prompts and the engine's responses with routes.
        weights_of: policy whose weights the engine has; those of the model's folder if None.

    Raises:
        AssertionError: with replay, a token with a route was routed otherwise.
    """
    trainer = PackedPolicy(load_causal_model(str(model), ModelConfig.model_validate({"dtype": dtype}))).to(device)
    if weights_of is not None:
        trainer.load_state_dict(weights_of.state_dict())
    trainer.replay = RouteReplay(trainer.causal)
    seen: list[Tensor] = []
    for router in router_modules(trainer.causal).values():
        router.register_forward_hook(lambda router, inputs, outputs: seen.append(outputs[2]))
    ids = [np.concatenate([prompt, completion.token_ids]) for prompt, completion in pairs]
    batch = concatenate(ids, [np.arange(len(one)) >= len(prompt) for one, (prompt, _) in zip(ids, pairs, strict=True)])
    given = np.concatenate([completion.routes for _, completion in pairs if completion.routes is not None])
    engine = torch.from_numpy(np.concatenate([engine_log_probs(completion) for _, completion in pairs]))
    before = trainer(packed_inputs(batch, device))[0].cpu() - engine
    own = torch.stack(seen, 1).sort(-1).values.cpu()
    seen.clear()
    after = trainer(packed_inputs(replace(batch, routes=given), device))[0].cpu() - engine
    known = torch.from_numpy((given >= 0).all((1, 2)))
    assert int((~known).sum()) == len(pairs), "only the last token of each sequence may lack routes"
    theirs = torch.from_numpy(given).long().sort(-1).values
    assert torch.equal(torch.stack(seen, 1).sort(-1).values.cpu()[known], theirs[known])
    return Compared((own == theirs).flatten(1).all(1)[known].float().mean().item(), before, after)


def kl(difference: Tensor) -> float:
    """Return the k3 estimate of KL(engine, trainer) in nats per token."""
    return (difference.double().exp() - 1 - difference.double()).mean().item()
