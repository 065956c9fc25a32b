"""Keys of learning from feedback: the policy is taught by itself, which sees more than the prompt."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll.config.schema.base import PositiveFloat, PositiveInt, StrictConfig

Hint = Literal["solution", "feedback", "success"]
"""What the teacher may see beyond the prompt. Each has a template with a field of its name."""
Share = Annotated[float, Field(gt=0, le=1)]


class SelfDistillationConfig(StrictConfig):
    """Learning from feedback (SDPO, OPSD): the teacher is the policy itself, whose prompt also has hints."""

    sees: Annotated[list[Hint], Field(min_length=1)] = Field(
        description="Hints in the teacher's prompt, in this order: `solution`, from a column of the row; `feedback`, "
        "the note of the reward on a response that did not pass; `success`, another response to the same prompt that "
        "passed. A response without any of them is not taught."
    )
    teacher: Literal["live", "frozen", "averaged"] = Field(
        "live",
        description="Weights of the teacher: those of the policy before the step's first update (`live`), those of "
        "the reference (`frozen`), or an exponential moving average of the policy's (`averaged`).",
    )
    update_rate: Share = Field(
        0.05,
        description="`averaged`: share a of the newest weights. After each step, the average is (1 - a) times itself "
        "plus a times the policy's weights.",
    )
    weight: Share = Field(
        1.0,
        description="Weight w of the teacher: the advantage of a token is (1 - w) times that of `adv_estimator`, plus "
        "w times log(teacher / policy). 1 learns from the teacher alone.",
    )
    clip: PositiveFloat | None = Field(
        None, description="Clip log(teacher / policy) of each token to [-c, c], in nats. If not given, no clip."
    )
    solution_column: str = Field(
        "ground_truth",
        min_length=1,
        description="`solution`: the column of the rows, or keys joined by dots that reach into one. A row without a "
        "value has no solution.",
    )
    prompt_length: PositiveInt | None = Field(
        None,
        description="Longest prompt of the teacher, in tokens. A response with a longer one is not taught. If not "
        "given: the root keys `prompt_length + response_length`.",
    )
    template: str = Field(
        "{prompt}\n\n{hints}\n\nNow answer the question.",
        description="The teacher's last message, with the fields `{prompt}`, the last message of the prompt, and "
        "`{hints}`, the hints with an empty line between them.",
    )
    solution_template: str = Field("The solution is:\n\n{solution}", description="How a `solution` is written.")
    feedback_template: str = Field(
        "An earlier answer was wrong. What was found about it:\n\n{feedback}", description="How `feedback` is written."
    )
    success_template: str = Field(
        "An answer that was found to be right:\n\n{success}", description="How a `success` is written."
    )
