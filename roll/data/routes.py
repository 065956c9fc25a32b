"""Which reward domain a row belongs to, by its columns. Pure functions; a dry run uses them too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from roll.config.schema.environments import EnvironmentConfig
from roll.config.schema.roles import RewardConfig
from roll.data.rows import RowFault
from roll.errors import ConfigError, Fault
from roll.registry import nearest
from roll.types import Bools

DOMAIN = "domain"
"""Column with a row's reward domain."""
ROWS_READ = 100
"""Number of rows without a domain that are read again. As many or fewer are named."""
TAGS = ("data_source", "source", "dataset")
"""Columns that hold the tags in files of other programs, by their usual names."""
DEFAULT_DOMAIN = "math_rule"
"""Name of the reward domain of rows that name no domain, as in ROLL."""


class Label(NamedTuple):
    """The values of a row's two columns that decide its domain; None for an empty one."""

    domain: str | None
    tag: str | None


@dataclass(frozen=True)
class DomainRoutes:
    """Maps labels to reward domains."""

    domains: tuple[str, ...]
    """All domains: those in `rewards`, then those only in `environments`."""
    of_tag: Mapping[str, str]
    """Domain of each tag."""

    def labels(self, domains: NDArray, tags: NDArray) -> Sequence[Label]:
        """Return the labels [rows] of a table from its columns of domains and tags, with strings or None."""
        return [Label(*pair) for pair in zip(domains.tolist(), tags.tolist(), strict=True)]

    def domain_index(self, label: Label) -> int:
        """Return the index of a row's domain in `domains`, -1 if it has none."""
        found = self._named(label) or (DEFAULT_DOMAIN if DEFAULT_DOMAIN in self.domains else None)
        return self.domains.index(found) if found else -1

    def is_default(self, label: Label) -> bool:
        """Whether only `DEFAULT_DOMAIN` can take the row: neither its domain nor its tag leads to another."""
        return self._named(label) is None

    def _named(self, label: Label) -> str | None:
        if label.domain in self.domains:
            return label.domain
        if label.tag is not None:
            return self.of_tag.get(label.tag)
        return self.domains[0] if len(self.domains) == 1 else None

    def faults(
        self, labels: Sequence[Label], usable: Bools, tag_column: str, row_at: Callable[[int], Mapping[str, Any]]
    ) -> list[tuple[int, RowFault]]:
        """Return the position and the fault of each usable row that belongs to no domain. `row_at` reads one of the
        first rows, for its remedy: those of further ones are not shown.
        """
        if DEFAULT_DOMAIN in self.domains:
            return []
        wrong = [place for place, label in enumerate(labels) if usable[place] and self.domain_index(label) < 0]
        rows = [row_at(place) for place in wrong[:ROWS_READ]]
        read = dict(zip(wrong, rows, strict=False))
        return [(place, self._fault(labels[place], tag_column, read.get(place, {}))) for place in wrong]

    def fault(self, label: Label, tag_column: str, row: Mapping[str, Any]) -> RowFault | None:
        """Return the fault of a row that belongs to no domain; None if it belongs to one."""
        return self._fault(label, tag_column, row) if self.domain_index(label) < 0 else None

    def _fault(self, label: Label, tag_column: str, row: Mapping[str, Any]) -> RowFault:
        if label.tag is None:
            code, reason = "missing", f"no '{tag_column}'"
            problem = f"column '{tag_column}' is missing or empty, so no reward domain scores the row"
        else:
            hint = nearest(label.tag, list(self.of_tag))
            code, reason = "unknown_name", "tag without a domain"
            problem = f"no reward domain includes the tag '{label.tag}'{hint}"
        known = ", ".join(sorted(self.of_tag))
        remedy = f"list its tag in the `tag_included` of a reward, or set the row's '{tag_column}' to one of: {known}"
        other = next((name for name in TAGS if isinstance(row.get(name), str) and row[name]), None)
        if label.tag is None and other is not None:
            remedy = f"set data_args.tag: {other}, which is '{row[other]:.60}' here, and {remedy}"
        return RowFault(
            reason, problem, f"{remedy}; or add a domain `{DEFAULT_DOMAIN}`, which takes all other rows", code
        )


def tag_routes(sections: Mapping[str, RewardConfig | EnvironmentConfig]) -> dict[str, str]:
    """Return the domain of each tag.

    Raises:
        ConfigError: two domains claim the same tag.
    """
    routes: dict[str, str] = {}
    faults: list[Fault] = []
    for domain, section in sections.items():
        for tag in section.tag_included or (domain,):
            if routes.setdefault(tag, domain) != domain:
                remedy = "a tag can belong to one domain only; remove it from one of the two `tag_included`"
                problem = f"claims the tag '{tag}', as does the domain '{routes[tag]}'"
                place = "environments" if isinstance(section, EnvironmentConfig) else "rewards"
                faults.append(Fault(f"{place}.{domain}.tag_included", problem, remedy, "duplicate"))
    if faults:
        raise ConfigError(*faults)
    return routes
