"""The comparison of learnt tokens with the masks of a training template."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import template_masks as masks

OWN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] "
    "}}<|im_end|>\n{% "
    "endfor "
    "%}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRAINING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}<think>\n\n</think>\n\n{{ m['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("training", "verdict"),
    [
        (TRAINING, masks.MEANT),
        (TRAINING.replace("<|im_end|>\n{% endgeneration %}", "<|im_end|>{% endgeneration %}{{ '\n' }}"), masks.EQUAL),
        (TRAINING.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n"), masks.DIFFERS),
        (TRAINING.replace("<think>\n\n</think>\n\n", ""), masks.DIFFERS),
    ],
)
def test_only_header_and_newline_may_differ(training: str, verdict: str) -> None:
    assert masks.compared(OWN, training, masks.ROWS["plain"]) == verdict


def test_row_shortened_by_training_template_is_marked_lost() -> None:
    assert masks.compared(OWN, TRAINING, masks.ROWS["thinking"]) == masks.LOST


def test_the_policy_generates_neither_header_nor_newline() -> None:
    pieces = [("<|user|>Hi<|assistant|>", False), ("\nYes.<|end|>\n", True)]
    wanted = [("<|user|>Hi<|assistant|>", False), ("\n", False), ("Yes.<|end|>", True), ("\n", False)]
    assert masks.policy_part(pieces, "<|assistant|>\n") == wanted


@pytest.mark.parametrize(("training", "status"), [(TRAINING, 0), (TRAINING.replace("<think>\n\n</think>\n\n", ""), 1)])
def test_unintended_mask_difference_sets_exit_status(
    training: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.jinja").write_text(OWN)
    (tmp_path / "mine_training.jinja").write_text(training)
    assert masks.main(["--templates", str(tmp_path)]) == status
    assert ("not meant: mine: plain" in capsys.readouterr().out) == bool(status)
