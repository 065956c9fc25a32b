"""The cells of the DeepSpeed matrix, and the tables of their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

PIPELINES = ("rlvr", "critic", "sft", "dpo", "reward_model", "distill")
OFFLOADS = {0: ("none",), 1: ("none", "optimizer"), 2: ("none", "optimizer"), 3: ("none", "optimizer", "all")}
DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("fp16",)}
"""Precisions of the matrix by device. A GPU runs those that a CPU cannot run."""
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 5e-3}
"""Largest allowed difference of a loss: in nats; for `rlvr` in units of the objective, for `critic` in half a squared
reward.
"""
QUANTISED_TOLERANCE = 3e-1
MUON_TOLERANCE = 1e-3
"""Tolerance of Muon, which orthogonalises matrices in bf16."""
ZEROPP: dict[str, dict[str, Any]] = {
    "int8 weights": {"zero_quantized_weights": True},
    "int4 gradients": {"zero_quantized_gradients": True},
    "hpZ": {"zero_hpz_partition_size": 2},
    "ZeRO++": {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2},
}
"""Keys of ZeRO++ by name."""


class Cell(NamedTuple):
    """One configuration of training."""

    pipeline: str
    """One of `PIPELINES`; `critic` is the value model of `rlvr` with `adv_estimator: gae`."""
    stage: int
    offload: str
    """`none`, `optimizer`, `all` (optimizer and parameters) or `nvme` (both, to a file system)."""
    dtype: str
    lora: bool
    optimizer: str = "adamw"
    zeropp: str = ""
    """A key of `ZEROPP`."""

    @property
    def name(self) -> str:
        """Return a name such as `sft, ZeRO-3, offload none, fp32, LoRA, adamw`."""
        zero = f"ZeRO-{self.stage}" + (f" with {self.zeropp}" if self.zeropp else "")
        return (
            f"{self.pipeline}, {zero}, offload {self.offload}, {self.dtype}, {'LoRA' if self.lora else 'full'}, "
            f"{self.optimizer}"
        )

    @property
    def tolerance(self) -> float:
        """Return the largest allowed difference."""
        if self.optimizer == "adamw_8bit" or self.zeropp not in ("", "hpZ"):
            return QUANTISED_TOLERANCE
        return max(TOLERANCE[self.dtype], MUON_TOLERANCE if self.optimizer == "muon" else 0.0)


@dataclass(frozen=True)
class Said:
    """Outcome of a cell."""

    machine: str
    """Device and versions."""
    difference: float | None
    """Largest difference of the two loss curves. None if there is no curve."""
    trouble: str = ""
    """The reason for a missing curve."""
    lacks: bool = False
    """Whether the cell failed because this machine lacks what it needs."""


def cells(device: str) -> list[Cell]:
    """Return all cells of a device."""
    matrix = [
        Cell(pipeline, stage, offload, dtype, lora)
        for dtype in DTYPES[device]
        for pipeline in PIPELINES
        for stage, offloads in OFFLOADS.items()
        for offload in offloads
        for lora in (False, True)
    ]
    return [*matrix, *special(device)]


def special(device: str) -> list[Cell]:
    """Return the cells outside the matrix, all of pipeline `sft`: other optimizers, NVMe and ZeRO++."""
    swapped = [Cell("sft", 3, "nvme", dtype, lora) for dtype in ("fp32", "bf16") for lora in (False, True)]
    if device == "cpu":
        out = [
            Cell("sft", stage, "none", "fp32", False, optimizer)
            for optimizer in ("lion", "adagrad", "muon")
            for stage in OFFLOADS
        ]
        return [
            *out,
            *swapped,
            *(Cell("sft", 3, "none", dtype, lora, zeropp="hpZ") for dtype in DTYPES[device] for lora in (False, True)),
        ]
    out = [Cell("sft", stage, "none", "bf16", False, "adamw_8bit") for stage in OFFLOADS]
    out += [
        Cell("sft", stage, "optimizer", "fp32", False, optimizer)
        for optimizer in ("lion", "adagrad")
        for stage in (1, 2, 3)
    ]
    out += swapped
    # Quantised gradients and an adapter are refused.
    kinds = [
        (key, lora)
        for key, keys in ZEROPP.items()
        for lora in (False, True)
        if not (lora and "zero_quantized_gradients" in keys)
    ]
    return out + [Cell("sft", 3, "none", "bf16", lora, zeropp=key) for key, lora in kinds]


def tables_of(found: Mapping[Cell, Said], device: str) -> str:
    """Return Markdown: the matrix, the cells outside it, the reasons for missing curves, and the machine."""
    if not found:
        return "None of these cells has been run."
    columns = [(dtype, lora) for dtype in DTYPES[device] for lora in (False, True)]
    titles = " | ".join(f"{dtype}, {'LoRA' if lora else 'full'}" for dtype, lora in columns)
    lines = [f"| pipeline | stage | offload | {titles} |", "|---" * (3 + len(columns)) + "|"]
    for pipeline in PIPELINES:
        for stage, offload in ((stage, offload) for stage, offloads in OFFLOADS.items() for offload in offloads):
            row = [Cell(pipeline, stage, offload, dtype, lora) for dtype, lora in columns]
            if any(cell in found for cell in row):
                lines.append(f"| `{pipeline}` | {stage} | {offload} | {' | '.join(figures(found, row))} |")
    lines += [
        "",
        f"| `sft` with | offload | precision, trains |{''.join(f' stage {stage} |' for stage in OFFLOADS)}",
        "|---" * 7 + "|",
    ]
    ways = dict.fromkeys(cell._replace(stage=0) for cell in special(device))
    for way in ways:
        row = [way._replace(stage=stage) for stage in OFFLOADS]
        if any(cell in found for cell in row):
            trains = f"{way.dtype}, {'LoRA' if way.lora else 'full'}"
            lines.append(
                f"| {way.zeropp or f'`{way.optimizer}`'} | {way.offload} | {trains} | "
                f"{' | '.join(figures(found, row))} |"
            )
    return "\n".join(
        [*lines, *troubles(found), "", f"On: {'; '.join(sorted({said.machine for said in found.values()}))}."]
    )


def figures(found: Mapping[Cell, Said], row: Sequence[Cell]) -> Iterator[str]:
    """Yield the text of each cell: the difference, in bold above its tolerance; a word if there is no curve; a dash if
    it was not run.
    """
    for cell in row:
        said = found.get(cell)
        if said is None:
            yield "–"
        elif said.difference is None:
            yield "lacking" if said.lacks else "**failed**"
        else:
            yield f"**{said.difference:.0e}**" if is_bad(cell, said) else f"{said.difference:.0e}"


def troubles(found: Mapping[Cell, Said]) -> Iterator[str]:
    """Yield an empty line, and then a line for each reason for missing curves. Yield nothing if no curve is missing."""
    reasons: dict[str, list[Cell]] = {}
    for cell, said in found.items():
        if said.difference is None:
            reasons.setdefault(said.trouble, []).append(cell)
    if reasons:
        yield ""
    for reason, of in reasons.items():
        word = "Lacking" if found[of[0]].lacks else "Failed"
        more = f" and {len(of) - 1} more" if len(of) > 1 else ""
        yield f"- {word} ({of[0].name}{more}): {reason}"


def is_failed(said: Said) -> bool:
    """Whether a curve is missing although the machine has everything that the cell needs."""
    return said.difference is None and not said.lacks


def is_bad(cell: Cell, said: Said) -> bool:
    """Whether a cell failed, exceeds its tolerance, or has a difference of NaN."""
    return is_failed(said) or (said.difference is not None and not said.difference <= cell.tolerance)
