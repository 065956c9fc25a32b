"""Wires both ends of distillation: the teacher model that sends its output, and the student model that uses this
output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from roll.algorithms.divergence import Divergence
from roll.backend_settings import ModelLoader, ModelWrapper
from roll.config.schema.model import ModelConfig
from roll.config.schema.offline import DistillConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.models.student import PackedTeacher, PackedTopTeacher, load_top_student, output_rows, student_loader
from roll.models.teacher_top import TeacherTop
from roll.runs.role_models import model_path


@dataclass(frozen=True)
class Teaching:
    """Functions that build the student, which receives hidden states or a top-k distribution, and the teacher, which
    sends them.
    """

    load: ModelLoader
    """Loads the student."""
    wrap: ModelWrapper
    """Wraps the teacher's model."""


def teaching(config: DistillConfig | RlvrConfig, student: ModelConfig, teachers: Sequence[ModelConfig]) -> Teaching:
    """Return the functions for top-k distributions with `distill_top_k`, otherwise for hidden states, which yield full
    distributions.

    Several teachers require `distill_top_k`. All of them send tensors of the same width, over the tokens that every
    model has.

    Raises:
        DataError: the configuration of a model cannot be read.
    """
    measure = Divergence(config.divergence, config.jsd_beta, config.distill_temperature)
    if config.distill_top_k is None:
        [teacher] = teachers
        return Teaching(student_loader(model_path(config, teacher), teacher, measure), PackedTeacher)
    rows = min(
        output_rows(model_path(config, model_args), model_args.trust_remote_code) for model_args in (student, *teachers)
    )
    top = TeacherTop(min(config.distill_top_k, rows), rows, config.distill_temperature)
    return Teaching(partial(load_top_student, top=top, measure=measure), partial(PackedTopTeacher, top=top))
