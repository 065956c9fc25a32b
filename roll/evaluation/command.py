"""The command line of `python -m roll.evaluate`.

Exit status: 0 done, 2 the request, the model or the data cannot be used, 3 a part failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from roll.errors import run_command
from roll.evaluation.request import Request

CPU = "cpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the evaluation of the command line. Return the exit status."""
    return run_command(lambda: _evaluate(request_of(argv)))


def _evaluate(request: Request) -> None:
    from roll.evaluation.settings import plan_evaluation  # Here, so that `--help` needs no torch.
    from roll.evaluation.subject import find_subject

    evaluation = plan_evaluation(request, find_subject(request.subject))
    for text in evaluation.warnings:
        print(f"warning: {text}", file=sys.stderr)
    if request.dry_run:
        config = evaluation.config
        roles = ", ".join(f"{role.ranks} x {name} ({role.strategy})" for name, role in evaluation.plan.roles.items())
        sets = ", ".join(config.validation.named_sets() if config.validation else ())
        print(f"{evaluation.subject.model}: {sets} answered by {roles}, into {config.output_dir}")
        return
    from roll.evaluation.results import result_table
    from roll.evaluation.run import run

    result = run(evaluation)
    Console().print(result_table(result))
    print(f"samples and results: {result.folder}")


def request_of(argv: Sequence[str] | None) -> Request:
    """Return the request of a command line's words."""
    given = vars(parser().parse_intermixed_args(argv))
    given |= {"data": tuple(given["data"]), "overrides": tuple(given["overrides"])}
    return Request(**given)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    found = argparse.ArgumentParser(
        "python -m roll.evaluate",
        allow_abbrev=False,
        description="Answer held-out prompts with a model, score the answers, and report accuracy, pass@k and avg@n with intervals.",
    )
    found.add_argument("subject", help="a run folder (its newest checkpoint), a checkpoint's folder, a Hugging Face folder or a Hub id")
    found.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the configuration: rewards.math_rule.timeout=30")
    rows = found.add_argument_group("rows; if not given, the run's validation sets, columns, template and rewards")
    rows.add_argument("--data", action="append", default=[], help="file, folder or Hub name with prompts; each --data is a set of its own")
    rows.add_argument("--split", help="split of a source that has several (train)")
    rows.add_argument("--reward", help="name of a reward function, or package.module:function: scores all rows")
    rows.add_argument("--template", choices=("native", "chatml", "qwen2_5", "raw"), help="chat template (native)")
    columns = rows.add_mutually_exclusive_group()
    columns.add_argument("--prompt", metavar="COLUMN", help="column that holds the prompt as text (prompt)")
    columns.add_argument("--messages", metavar="COLUMN", help="column that holds a list of {role, content}")
    rows.add_argument("--limit", type=positive, help="most prompts of a set, the first ones (all)")
    sampling = found.add_argument_group("sampling; if not given, as the run validates")
    sampling.add_argument("--samples", type=positive, help="responses to each prompt (1)")
    sampling.add_argument("--temperature", type=float, help="0 is greedy (0 for one sample, 1 for several)")
    sampling.add_argument("--top-p", type=float, help="nucleus sampling (1, keeps all)")
    sampling.add_argument("--top-k", type=int, help="sample among the k most probable tokens (-1, keeps all)")
    sampling.add_argument("--max-new-tokens", type=positive, help="longest response in tokens (1024)")
    sampling.add_argument("--seed", type=int, help="of sampling (42)")
    engine = found.add_argument_group("engine; if not given, as the run generates")
    engine.add_argument("--strategy", choices=("vllm", "hf_infer"), help="vllm where it is installed, else hf_infer")
    engine.add_argument("--devices", type=devices, help="GPUs, as 0,1, or cpu (GPU 0 if there is one, else the CPU)")
    engine.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="precision (bf16 on a GPU, fp32 on the CPU)")
    found.add_argument("--output", type=Path, help="folder of the results (RUN/evaluations/step_N, or output/evaluations/NAME)")
    found.add_argument("--dry-run", action="store_true", help="check the request and plan; read no rows, start nothing")
    return found


def positive(text: str) -> int:
    """Parse a number above 0. Raises ArgumentTypeError for any other text."""
    if text.isdecimal() and (number := int(text)) > 0:
        return number
    raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")


def devices(text: str) -> tuple[int, ...]:
    """Parse GPU numbers, or `cpu` as none. Raises ArgumentTypeError for any other text."""
    if text.lower() == CPU:
        return ()
    words = text.split(",")
    if all(word.strip().isdecimal() for word in words):
        return tuple(int(word) for word in words)
    raise argparse.ArgumentTypeError(f"'{text}' is neither cpu nor a list of GPU numbers such as 0,1")
