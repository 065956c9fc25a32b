"""The command line of `python -m roll.evaluate`.

Exit status: 0 success; 2 the request, the model or the data cannot be used; 3 a part of the run failed; 130
interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from roll.config.schema.faults import printable
from roll.config.schema.strategies import serving_names
from roll.evaluation.request import Request
from roll.system.command import run_command

if TYPE_CHECKING:
    from roll.evaluation.settings import Evaluation

CPU = "cpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the evaluation of the command line. Return the exit status."""
    return run_command(lambda: _evaluate(request_of(argv)))


def _evaluate(request: Request) -> None:
    if request.dry_run:
        _show(_planned(request))
        return
    from roll.tracking.life import ActivityDisplay

    with ActivityDisplay(Console(stderr=True)) as life:
        life.driver("loading libraries")
        from roll.evaluation.results import result_table
        from roll.evaluation.run import run_evaluation

        result = run_evaluation(_planned(request), life)
    Console().print(result_table(result))
    print(f"samples and results: {result.folder}")


def _planned(request: Request) -> Evaluation:
    """Return the checked evaluation of a request, and print its warnings and the arguments of its rewards."""
    # Imported here, so that `--help` does not need torch.
    from roll.evaluation.settings import find_subject, plan_evaluation

    evaluation = plan_evaluation(request, find_subject(request.subject))
    for text in evaluation.warnings:
        print(f"warning: {text}", file=sys.stderr)
    for name, block in evaluation.config.rewards.items():
        if block.reward_args:
            print(f"rewards.{name}.reward_args: {printable(block.reward_args)}", file=sys.stderr)
    return evaluation


def _show(evaluation: Evaluation) -> None:
    """Print the plan, and what was tried of the rows. Raises DataError, see `try_held_out`."""
    from roll.evaluation.settings import try_held_out

    config = evaluation.config
    roles = ", ".join(f"{role.ranks} x {name} ({role.strategy})" for name, role in evaluation.plan.roles.items())
    sets = ", ".join(config.validation.named_sets() if config.validation else ())
    print(f"{evaluation.subject.model}: {roles} will answer {sets}; results in {config.output_dir}")
    print("\n".join(try_held_out(evaluation)))


def request_of(argv: Sequence[str] | None) -> Request:
    """Parse the command line. `argv` None means `sys.argv`."""
    given = vars(evaluation_parser().parse_intermixed_args(argv))
    given |= {"data": tuple(given["data"]), "overrides": tuple(given["overrides"])}
    return Request(**given)


def evaluation_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    found = argparse.ArgumentParser(
        "python -m roll.evaluate",
        allow_abbrev=False,
        description="Answer held-out prompts with a model, score the answers, and report accuracy, pass@k and avg@n, "
        "with intervals.",
    )
    found.add_argument(
        "subject",
        help="a run folder (uses its newest checkpoint), a checkpoint folder, a Hugging Face folder or a Hub id",
    )
    found.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="configuration keys to set, such as rewards.math_rule.timeout=30",
    )
    rows = found.add_argument_group(
        "rows (the run's validation sets, columns, template and rewards replace these defaults)"
    )
    rows.add_argument(
        "--data",
        action="append",
        default=[],
        help="file, folder or Hub name with prompts; each --data is a separate set",
    )
    rows.add_argument("--split", help="split to use if the source has several (default: train)")
    rows.add_argument("--reward", help="reward function that scores all rows: a name, or package.module:function")
    rows.add_argument(
        "--template", choices=("native", "chatml", "qwen2_5", "raw"), help="chat template (default: native)"
    )
    columns = rows.add_mutually_exclusive_group()
    columns.add_argument("--prompt", metavar="COLUMN", help="column that holds the prompt as text (default: prompt)")
    columns.add_argument("--messages", metavar="COLUMN", help="column that holds a list of {role, content}")
    rows.add_argument(
        "--ground-truth",
        metavar="COLUMN",
        help="column of the reference answer, or keys joined with dots that lead to it",
    )
    rows.add_argument("--limit", type=positive, help="use only the first LIMIT prompts of each set (default: all)")
    _add_sampling(found)
    _add_engine(found)
    found.add_argument(
        "--output",
        type=Path,
        help="folder for the results (default: RUN/evaluations/step_N, or output/evaluations/NAME)",
    )
    found.add_argument(
        "--dry-run", action="store_true", help="check the request and the first rows, print the plan, start nothing"
    )
    return found


def _add_sampling(found: argparse.ArgumentParser) -> None:
    sampling = found.add_argument_group("sampling (the run's validation settings replace these defaults)")
    sampling.add_argument("--samples", type=positive, help="number of responses to each prompt (default: 1)")
    sampling.add_argument(
        "--temperature", type=float, help="0 means greedy decoding (default: 0 for one sample, 1 for several)"
    )
    sampling.add_argument("--top-p", type=float, help="probability mass of nucleus sampling (default: 1, all tokens)")
    sampling.add_argument(
        "--top-k", type=int, help="sample only from the k most probable tokens (default: -1, all tokens)"
    )
    sampling.add_argument(
        "--max-new-tokens", type=positive, help="largest number of tokens of a response (default: 1024)"
    )
    sampling.add_argument("--seed", type=int, help="seed of the sampling (default: 42)")


def _add_engine(found: argparse.ArgumentParser) -> None:
    engine = found.add_argument_group("engine (the run's settings replace these defaults)")
    engine.add_argument(
        "--strategy",
        choices=serving_names(),
        help="engine (default: vllm if it is installed, else hf_infer)",
    )
    engine.add_argument(
        "--devices", type=devices, help="GPU numbers such as 0,1, or cpu (default: GPU 0 if there is one, else the CPU)"
    )
    engine.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="precision of weights (default: bf16 on a GPU, fp32 on the CPU)",
    )


def positive(text: str) -> int:
    """Parse a whole number above 0. Raises ArgumentTypeError for any other text."""
    if text.isdecimal() and (number := int(text)) > 0:
        return number
    raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")


def devices(text: str) -> tuple[int, ...]:
    """Parse a list of GPU numbers. `cpu` returns an empty tuple. Raises ArgumentTypeError for any other text."""
    if text.lower() == CPU:
        return ()
    words = text.split(",")
    if all(word.strip().isdecimal() for word in words):
        return tuple(int(word) for word in words)
    raise argparse.ArgumentTypeError(f"'{text}' is neither cpu nor a list of GPU numbers such as 0,1")
