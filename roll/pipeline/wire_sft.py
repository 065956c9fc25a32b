"""SFT: from the configuration to the parts of its loop."""

from __future__ import annotations

from functools import partial

from roll.config.schema import SftConfig
from roll.data.examples import ExampleSet, prepare_examples
from roll.data.sampler import ExampleSampler
from roll.models.load import check_readable, load_tokenizer
from roll.pipeline import sft
from roll.pipeline.interrupt import Interrupt
from roll.pipeline.meter import Meter
from roll.pipeline.rlvr import Position
from roll.pipeline.roles import Roles, model_path
from roll.pipeline.stage import Stage
from roll.pipeline.wire_rlvr import Loop, report_dropped


def prepare(config: SftConfig) -> Loop:
    """Check the model's files and prepare all examples; the loop, ready to be given its surroundings.

    Raises:
        BadInput: model or data cannot be used.
    """
    model_args = config.sft_train.model_args
    check_readable(model_path(config, model_args))
    tokenizer = load_tokenizer(model_path(config, model_args), model_args.trust_remote_code)
    examples = prepare_examples(config.sft_train.data_args, tokenizer, config.prompt_length, config.response_length)
    report_dropped(examples.too_long, "prompt_length + response_length", config.prompt_length + config.response_length)
    return partial(_loop, config, examples)


async def _loop(config: SftConfig, examples: ExampleSet, roles: Roles, stage: Stage, interrupt: Interrupt) -> Position:
    batch_size = stage.plan.batch.sequences_per_step
    passes = -(-len(examples) * config.sft_train.training_args.num_train_epochs // batch_size)
    steps = min(config.max_steps, passes)
    actor_train = roles.actor_train("sft_train", config.sft_train, steps, temperature=1.0)
    turns = await roles.start()

    sampler = ExampleSampler(examples, config.seed)
    position = await stage.keeper.restore(actor_train, sampler)
    meter = Meter(roles.groups, sum(map(len, roles.groups.values())), turns.resident)
    parts = sft.Sft(
        draw=lambda: sampler.draw(batch_size),
        train=meter.timed("train", actor_train.train_step),
        measure=lambda batch: meter.step(len(batch.sequences.token_ids)),
        save=meter.timed("checkpoint", stage.keeper.save_if_due),
        interrupted=interrupt.happened,
        tracker=stage.tracker,
        max_steps=steps,
    )
    return await sft.train(parts, position)
