"""A run whose environment asks a fixed model, a model behind a URL and the policy itself, and learns from none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.conftest import World
from tests.integration.test_agents import samples
from tests.integration.test_model_rewards import serving
from tests.unit.rewards.chat_server import Response, completion, error

pytestmark = pytest.mark.engines
KNOWN = "owl"
"""A word that only the server knows; short, because the model has 64 positions."""
TALK = '''
from roll.agents.environments.base import Ask, Observation, Step


class Talk:
    """A turn about a sum, whose answer each partner hears in turn, and a second turn after what the server said."""

    async def reset(self, row, seed):
        self._heard = []
        return Observation([{"role": "user", "content": row["prompt"]}])

    async def step(self, message):
        self._said = str(message["content"]) or "nothing"
        return Step(done=True, reward=len(self._said) / 100) if self._heard else self._asks("live")

    async def hear(self, partner, text):
        self._heard.append(text)
        if partner == "live":
            return self._asks("fixed")
        return self._asks("api") if partner == "fixed" else Step([{"role": "user", "content": text}])

    def _asks(self, partner):
        return Step(asks=Ask(partner, [{"role": "user", "content": self._said[:8]}]))

    def close(self):
        pass
'''


def test_a_run_with_all_kinds_of_partners(world: World, leaves_nothing: Callable[[], None]) -> None:
    (world.folder / "talks.py").write_text(TALK)

    def behaviour(body: dict[str, Any], number: int) -> Response:
        return error(503, "busy", **{"Retry-After": "0"}) if number == 3 else completion(KNOWN)

    with serving(behaviour) as server:
        model = "{model_name_or_path: warm/export, dtype: fp32}"
        fixed = f"type: inference, strategy_args: {{strategy_name: hf_infer}}, model_args: {model}, template: chatml"
        partners = (
            f"{{live: {{type: live}}, fixed: {{{fixed}, generating_args: {{max_new_tokens: 6}}}}, "
            f"api: {{type: api, api_url: '{server.url}', model_name: m, api_key_variable: TINY_PARTNER}}}}"
        )
        arguments = world.rlvr(
            "partners",
            *("~rewards", "~reference", "use_kl_loss=false", "kl_loss_coef=0", "max_steps=2", "validation=null"),
            *("save_at_end=false", "prompt_length=32", "+sequence_length=64", "actor_train.data_args.template=chatml"),
            "rollout_batch_size=4",
            "trace_steps=1",
            f"+environments={{arithmetic: {{environment: 'talks:Talk', max_turns: 2, partners: {partners}}}}}",
        )
        outcome = world.wait(world.start(*arguments, environment={"TINY_PARTNER": "hush-hush"}))
    assert outcome.status == 0, outcome.output
    leaves_nothing()
    assert {headers["authorization"] for headers in server.headers} == {"Bearer hush-hush"}
    texts = [file.read_text() for file in (world.folder / "partners").rglob("*") if file.suffix in (".yaml", ".jsonl")]
    assert "hush-hush" not in "".join(texts)
    for line in world.metrics("partners")[1:]:
        assert line["mismatch/logprob_abs_diff_mean"] < 1e-4, "the trainer sees what the engine saw, in fp32"
        assert line["episode/environment_failed_fraction"] == 0 == line["episode/retried"]
        asked = {name: line[f"partner/arithmetic/{name}/asked"] for name in ("live", "fixed", "api")}
        assert len(set(asked.values())) == 1 and asked["api"] > 0 and line["partner/arithmetic/api/unavailable"] == 0
        assert line["partner/arithmetic/live/answer_tokens"] > 0 < line["partner/arithmetic/fixed/answer_tokens"]
    responses = [response for record in samples(world.folder / "partners") for response in record["responses"]]
    both = [response for response in responses if "partner_turns" in response]
    assert both, "most episodes came to their partners"
    for response in both:
        turns = response["partner_turns"]
        assert [turn["partner"] for turn in turns] == ["live", "fixed", "api"] and turns[2]["text"] == KNOWN
        assert {turn["after"] for turn in turns} == {1}
        segments = response["trajectories"][0]["segments"]
        assert KNOWN in segments[2]["text"] and not segments[2]["sampled"]
        assert all(KNOWN not in segment["text"] for segment in segments if segment["sampled"])
    trace = json.loads((world.folder / "partners/trace.json").read_text())
    named = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert {f"environments.arithmetic.partners.{name}" for name in ("live", "fixed", "api")} <= named
